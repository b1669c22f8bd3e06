"""The commands of the tutorial on a cluster, as a reader types them: an empty directory, a kubeconfig, and the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from cluster import binaries, paths
from cluster.kubectl import Kubectl
from harness import installation
from harness.installed import Clean, asked
from tests.long import only_long
from tests.trainer.test_tutorials import blocks

PAGE = paths.REPOSITORY / "docs/tutorials/cluster-job.md"
PUBLIC = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
WATCH = "kubectl regroup watch train\n"
PROGRAMS = ("make_data.py", "predict.py")
LONGEST_S = 600


def wheel(directory: Path) -> Path:
    uv = shutil.which("uv") or paths.REPOSITORY / ".uv/bin/uv"
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", directory, paths.REPOSITORY], check=True)
    (built,) = directory.glob("*.whl")
    return built


def volume(k: Kubectl, namespace: str, claim: str) -> None:
    """Offer a volume to a claim that the reader makes: this cluster has no provisioner."""
    installation.volume(k, namespace, claim)
    k.run("delete", "pvc", claim, f"--namespace={namespace}")
    k.run(
        "patch", "pv", f"{namespace}-{claim}", "--type=json", '--patch=[{"op": "remove", "path": "/spec/claimRef/uid"}]'
    )


def kubeconfig(namespace: str, directory: Path) -> Path:
    """Return a kubeconfig whose context has the namespace, as a user has one."""
    own = directory / "kubeconfig"
    shutil.copy(paths.kubeconfig(), own)
    kubectl = str(binaries.ensure() / "kubectl")
    subprocess.run(
        [kubectl, f"--kubeconfig={own}", "config", "set-context", "--current", f"--namespace={namespace}"], check=True
    )
    return own


@only_long("test_submit.py submits a script in the same image, and unit tests have the code of the pull")
@pytest.mark.timeout(900)
def test_script_becomes_a_model_in_ten_minutes(
    operator: Kubectl, train_namespace: str, torch_image: str, tmp_path: Path
) -> None:
    for claim in ("points", "train-checkpoints"):
        volume(operator, train_namespace, claim)
    own = kubeconfig(train_namespace, tmp_path)
    built = wheel(tmp_path / "wheel")
    work = tmp_path / "empty"
    work.mkdir()
    began = time.monotonic()
    clean = Clean(work / "venv", built)
    clean.add([*asked(built, "cli"), *asked(built, "trainer"), "safetensors"])
    script = ["set -euo pipefail"]
    for name, body in blocks(PAGE.read_text().replace(PUBLIC, torch_image)):
        if name:
            (work / name).write_text(body)
        if body == WATCH:  # on a terminal, and Ctrl-C after a while
            script.append(
                f"timeout --signal=INT 25 script --quiet --flush --command {WATCH.strip()!r} watched > screen || true"
            )
        elif not body.startswith("python3 -m venv"):  # done above, without an index
            script.append(f"python {name}" if name in PROGRAMS else "" if name else body)
    path = os.pathsep.join((str(binaries.ensure()), os.environ["PATH"]))
    done = clean.run(work, "bash", "-c", "\n".join(script), timeout_s=LONGEST_S, KUBECONFIG=str(own), PATH=path)
    took_s = time.monotonic() - began
    print(f"tutorial: {took_s:.0f} s")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert took_s < LONGEST_S
    (share,) = re.findall(r"(\d+)% of the points are recognised", done.stdout)
    assert int(share) > 80
    watched = (work / "watched").read_text()
    assert re.search(r"loss +[▁-█]{2,}", watched), f"no curve in {watched[-2000:]}"
    assert "[0.0] step 50 " in done.stdout
    assert "lost a process" in done.stdout
    assert re.search(r" 3/3 ", done.stdout)
    assert re.search(r"model.safetensors: 4 tensors", done.stdout)
    assert operator.get("pods", f"--namespace={train_namespace}", "--selector=regroup.dev/pull-of=train")["items"] == []
