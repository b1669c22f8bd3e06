"""Jobs of this machine that the Python client starts go on without it, and another client finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from regroup_client import Client, ClientError, JobError

SUBMITS = """
from regroup_client import Client
job = Client.local().submit("train.py", ["--name", "a b", 0.5], workers=1, max=2, env={"COLOUR": "$HOME"}, name="waits")
print(job.name)
"""
WAITS = """
import os, sys, time
print(sys.argv[1:], os.environ["COLOUR"], flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.timeout(180)
def test_local_job_outlives_the_program_that_submitted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WAITS)
    (tmp_path / "queue.py").write_text("raise SystemExit('a module of the user hides one of the standard library')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SUBMITS], capture_output=True, text=True, timeout=120, check=True
    )
    with Client.local() as client:
        (job,) = client.jobs()
        assert job.name == done.stdout.strip()
        assert client.job("waits").status().directory == job.name
        lines = job.logs(follow=True, grep="COLOUR|name")
        first = next(lines)  # it may be read before the status has the worker's rank
        assert str(first) in [f"{whose} ['--name', 'a b', '0.5'] $HOME" for whose in ("[0]", "[0.0]")]
        lines.close()
        job.scale(2)
        with pytest.raises(JobError, match=r"spec\.replicas \(3\)"):
            job.scale(3)
        assert job.status().replicas == 2
        job.delete()
        assert client.jobs() == []
        with pytest.raises(ClientError, match=r"There is no job .* on this machine"):
            job.wait()
    assert not list((tmp_path / "home/regroup/runs").iterdir())
