"""`regroup run` whole: the operator's plan, the real endpoint, real agents and trainers, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.polling import until

DIGITS = Path(__file__).parents[2] / "manifests" / "samples" / "digits.py"
STEPS = "1500"


class Run:
    """A running `regroup run`, its job's file and its processes."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.state = directory / "state"
        self.log = directory / "log"
        command = [sys.executable, "-m", "regroup_cli", "run", "--state-dir", str(self.state), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.state / "job.json").read_text()).get("status") or {}
        except FileNotFoundError:
            return {}
        return found

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            if condition(status):
                return status
            assert self.process.poll() is None or condition(self.status()), (
                f"ended before {what}:\n{self.log.read_text()}"
            )
            time.sleep(0.05)
        pytest.fail(f"{what}: not within {timeout_s:.0f} s\n{self.log.read_text()}")

    def trains(self, ranks: int, after: int = 0) -> dict[str, Any]:
        """Wait until a settled generation above `after` has these ranks and has committed a step."""

        def there(status: dict[str, Any]) -> bool:
            membership = status.get("membership") or {}
            settled = membership.get("adopted") and membership.get("worldSize") == ranks
            return bool(settled) and membership["generation"] > after and status.get("phase") == "Running"

        return self.wait(there, f"{ranks} ranks train in a generation above {after}")

    def scale(self, workers: int) -> None:
        subprocess.run([sys.executable, "-m", "regroup_cli", "scale", str(self.state), str(workers)], check=True)

    def agents(self) -> dict[int, str]:
        """Return {pid: worker} of the agents."""
        found = {}
        for pid in _children(self.process.pid):
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            worker = re.search(r"REGROUP_POD_NAME=([^\0]+)", environment)
            if worker:
                found[pid] = worker[1]
        return found

    def trainers(self) -> dict[str, int]:
        """Return {worker: pid} of the trainers (one process per worker)."""
        return {
            worker: child
            for agent, worker in self.agents().items()
            for child in _children(agent)
            if Path(f"/proc/{child}/comm").read_text().startswith("trainer-")
        }


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(tmp_path, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(30)


def _committed(directory: Path) -> set[str]:
    return {path.parent.name for path in directory.glob("step-*/COMMIT.json")}


def _parameters(text: str) -> str:
    found = re.search(r"held-out accuracy (0\.\d+)\s+parameters sha256 (\w+)", text)
    assert found, text
    assert float(found[1]) >= 0.95
    return found[2]


def test_kill_grow_shrink_and_total_loss_end_in_the_same_parameters(start: Callable[..., Run], tmp_path: Path) -> None:
    """SIGKILL of a rank, 3 -> 5 -> 2, then every process at once: resumed from disk, bitwise equal to plain python.

    Of the checkpoints, one a second, no more stay than were asked for.
    """
    script = [str(DIGITS), "--steps", STEPS, "--reduction", "exact"]
    checkpoints = tmp_path / "checkpoints"
    plain = subprocess.run([sys.executable, *script], capture_output=True, text=True, check=True)
    run = start(
        *("--workers", "3", "--min", "2", "--max", "5", "--join-quiet", "0.2", "--max-restarts", "100"),
        *("--checkpoint", str(checkpoints), "--checkpoint-every", "1", "--checkpoint-keep", "2"),
        *(*script, "--pace", "0.03"),
    )
    first = run.trains(3)["membership"]["generation"]
    before = run.trainers()
    os.kill(before["local-worker-1-0"], signal.SIGKILL)
    second = run.trains(3, after=first)["membership"]["generation"]
    after = run.trainers()
    assert {w: p for w, p in before.items() if "-1-" not in w} == {w: p for w, p in after.items() if "-1-" not in w}

    run.scale(5)
    third = run.trains(5, after=second)["membership"]["generation"]
    assert set(after.items()) <= set(run.trainers().items()), "a survivor lost its process"
    run.scale(2)
    fourth = run.trains(2, after=third)["membership"]["generation"]

    saved = run.wait(
        lambda s: (s.get("checkpoint") or {}).get("generation", 0) >= fourth, "a checkpoint of the last group"
    )
    # The writer may have committed one more than the operator has heard of.
    until(lambda: len(_committed(checkpoints)) in (2, 3), said=lambda: f"there are {_committed(checkpoints)}")
    for agent in run.agents():
        os.kill(agent, signal.SIGKILL)
    run.trains(2, after=fourth)
    resumed = run.wait(
        lambda s: len(s["lineage"]) > 0 and s["lineage"][-1]["generation"] > fourth, "the resumed generation"
    )
    assert resumed["lineage"][-1]["startStep"] >= saved["checkpoint"]["step"]

    ended = run.wait(lambda s: s.get("phase") == "Succeeded", "the end", timeout_s=240)
    assert run.process.wait(60) == 0
    left = _committed(checkpoints)
    assert left == {*ended["checkpoint"]["kept"]}
    assert len(left) == 2
    assert f"step-{STEPS}." in max(left, key=lambda name: int(re.findall(r"\d+", name)[0]))
    assert _parameters(run.log.read_text()) == _parameters(plain.stdout)


def test_script_that_exits_1_fails_the_run_with_its_last_line(start: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys\nsys.exit('no such dataset')\n")
    run = start("--workers", "1", "--max-restarts", "1", str(script))
    assert run.process.wait(120) == 1
    assert re.search(r"exit code 1.*no such dataset", run.log.read_text()), run.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--workers", "3", "nowhere.py"], "SCRIPT (nowhere.py) is not a file.", id="no such script"),
        pytest.param(["--workers", "3", "--min", "4", "--max", "2", str(DIGITS)], "minReplicas (4) is greater", id="min above max"),
        pytest.param(["--workers", "9", "--max", "2", str(DIGITS)], "spec.replicas", id="more workers than the maximum"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_sentence(arguments: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regroup_cli", "run", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
