"""A directory of this machine trains in an image that has torch and nothing of it, by one command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster import binaries, paths
from cluster.kubectl import Kubectl, wait_until
from harness.job import JobView

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from model.net import net

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(ddp.parameters(), lr=float(sys.argv[1]))
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
Path("written.txt").write_text("beside the script")
print("trained", dist.get_world_size(), Path.cwd(), flush=True)
dist.destroy_process_group()
"""


def test_directory_trains_in_an_image_without_it(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "model" / "net.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(4, 1)\n")
    environment = {
        **os.environ,
        "PATH": f"{binaries.ensure()}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("operator", "trainer-image")),
    }
    where = [f"--kubeconfig={paths.kubeconfig()}", f"--namespace={train_namespace}", "--directory=.", "--user=23456"]
    size = ["--workers=2", "--cpu=100m", "--memory=2Gi", f"--image={torch_image}"]
    done = subprocess.run(
        [sys.executable, "-m", "regroup_cli", "submit", "train.py", *where, *size, "--", "0.01", "100"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "  Running" in done.stdout
    view = JobView(operator, train_namespace, "train")
    wait_until(lambda: _state(view) in ("Succeeded", "Failed"), "the job ends", timeout_s=120)
    assert _state(view) == "Succeeded", view.status()["conditions"]
    logs = "\n".join(view.logs(pod["metadata"]["name"]) for pod in view.pods())
    assert logs.count("trained 2 /code") == 2
    operator.run("delete", "dtj", "train", f"--namespace={train_namespace}")
    wait_until(
        lambda: (
            not operator.get("configmaps", "--selector=regroup.dev/code-of", f"--namespace={train_namespace}")["items"]
        ),
        "its files go with it",
        timeout_s=60,
    )


def _state(job: JobView) -> str:
    return str((job.status().get("summary") or {}).get("state"))
