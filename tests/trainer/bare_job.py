"""A session in an image without our library. Writes where each interpreter has found the library: {WHERE}/{who}."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch

import regroup

CHILD = "import regroup, os, sys; open(os.environ['WHERE'] + '/subprocess', 'w').write(regroup.__file__)"


def note(who: str) -> None:
    Path(os.environ["WHERE"], who).write_text(regroup.__file__)


if __name__ == "__main__":
    main = os.environ["LOCAL_RANK"] == "0"
    if main:
        note("trainer")
        version = f"{sys.version_info[0]}.{sys.version_info[1]} {torch.__version__.partition('+')[0]}"
        Path(os.environ["WHERE"], "versions").write_text(version)
        Path(os.environ["WHERE"], "users").write_text(os.environ.get("USERS_SITECUSTOMIZE", ""))
        subprocess.run([sys.executable, "-c", CHILD], check=True)
        child = multiprocessing.get_context("spawn").Process(target=note, args=("spawn",))
        child.start()
        child.join()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = (torch.randn(64, 4), torch.randn(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with regroup.session(model=model, optimizer=optimizer, data=data, global_batch=8, microbatch=4) as job:
        for step in job.steps(20):
            with step:
                for x, y in step.microbatches():
                    step.backward(mean=torch.nn.functional.mse_loss(model(x), y), weight=len(y))
                step.commit()
