"""Changes of scripts that save in place: real agents, real processes, random moments. No checkpoint may be broken.

Each script writes a checkpoint of several files over the one before, which takes 0.5 to 2 s. Its next process reads them first, and
notes `broken` if one is not complete or is of another step than the others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.apiserver import free_port
from harness.local_run import LocalRun
from harness.polling import until
from regroup.protocol import wire
from regroup.protocol.state import Phase
from tests.long import only_long, trials
from tests.trainer.agent_edge import OperatorEdge, Worker, generation

BEGIN = """
import json, os, signal, sys, threading, time
from pathlib import Path

DIRECTORY = Path(__file__).parent
FILES = [DIRECTORY / name for name in ("model.ckpt", "optimizer.ckpt", "state.ckpt")]

def note(what, **values):
    with open(Path(os.environ["NOTES"]) / str(os.getpid()), "a") as notes:
        notes.write(json.dumps({"what": what, "at": time.time(), **values}) + "\\n")

def save(step, seconds):
    for path in FILES:
        with open(path, "wb") as file:
            for chunk in range(8):
                file.write(json.dumps([step, chunk]).encode().ljust(1 << 16) + b"\\n")
                file.flush()
                time.sleep(seconds / 30)
        time.sleep(seconds / 30)
    note("saved", step=step)

def load():
    if not FILES[0].exists():
        return 0
    held = [[json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else [] for path in FILES]
    steps = {step for file in held for step, _ in file}
    if any([chunk for _, chunk in file] != list(range(8)) for file in held) or len(steps) != 1:
        note("broken", held=[len(file) for file in held], steps=sorted(steps))
        os._exit(9)
    return steps.pop()
"""

IN_PLACE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, step = dist.get_rank(), load()
dist.barrier()
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
note("began", step=step, world=dist.get_world_size())
while not (DIRECTORY / "end").exists() or step % 4:
    time.sleep(0.01)
    parameter.grad = torch.ones(4)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    step += 1
    if rank == 0 and step % 4 == 0:
        save(step, 0.5 + 1.5 * (step % 3) / 2)
note("ended", step=step)
"""

ALONE = """
import torch
step = load()
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
note("began", step=step)
{before}
while True:
    time.sleep(0.01)
    parameter.grad = torch.ones(4)
    optimizer.step()
    step += 1
    {after}
"""

WITHOUT_TORCH = """
step = load()
note("began", step=step)
while True:
    step += 1
    save(step, 1.5)
    time.sleep(2.5)
"""

THREAD = ALONE.format(
    before="saver = None",
    after="""if step % 50 == 0 and (saver is None or not saver.is_alive()):
        saver = threading.Thread(target=save, args=(step, 1.0), daemon=True)
        saver.start()""",
)
CHILD = "def main():\n" + textwrap.indent(
    ALONE.format(
        before="import multiprocessing\nsaver = None",
        after="""if step % 50 == 0 and (saver is None or not saver.is_alive()):
        saver = multiprocessing.get_context("spawn").Process(target=save, args=(step, 1.0), daemon=True)
        saver.start()""",
    ),
    "    ",
)
CHILD += "\nif __name__ == '__main__':\n    main()\n"


def scripted(worker: Worker, text: str) -> str:
    path = worker.directory / "train.py"
    path.write_text(BEGIN + text)
    return str(path)


class Changes:
    """Announces planned generations to one worker."""

    def __init__(self, operator: OperatorEdge, worker: Worker, text: str, **environ: str) -> None:
        self.operator, self.worker, self.number = operator, worker, 0
        worker.start(sys.executable, scripted(worker, text), REGROUP_PRELOAD="torch", OMP_NUM_THREADS="1", **environ)
        operator.wait_body(wire.Hello)
        operator.wait_stream()
        operator.tell(wire.Welcome("Script"))
        operator.wait_phase(Phase.READY, timeout_s=120)
        self.next("forced")

    def next(self, kind: str = "planned") -> float:
        """Announce the next generation, and return the seconds until its processes run."""
        self.number += 1
        began = len(self.worker.noted("began"))
        self.operator.tell(generation(self.number, free_port(), self.worker.processes, kind=kind)[0])
        since = time.monotonic()
        until(
            lambda: self.worker.noted("broken") or len(self.worker.noted("began")) >= began + self.worker.processes,
            f"the processes of generation {self.number} run",
            timeout_s=90,
            details=self.worker.log,
        )
        assert not self.worker.noted("broken"), self.worker.noted()
        return time.monotonic() - since

    def wait_saved(self) -> None:
        """Wait until one more checkpoint is complete, so that the next change meets the middle of a later one or of a step."""
        self.worker.wait_noted("saved", len(self.worker.noted("saved")) + 1, timeout_s=60)

    def faults(self) -> list[str]:
        return [h.body.message for h in self.operator.heard if isinstance(h.body, wire.Fault)]


@only_long("the job below that is scaled replaces its ranks, too")
def test_ranks_that_are_replaced_at_random_moments_never_break_a_checkpoint(
    operator: OperatorEdge, pair: Worker
) -> None:
    changes, moments, times = Changes(operator, pair, IN_PLACE), random.Random(31), 20
    for _ in range(times):
        changes.wait_saved()
        time.sleep(moments.uniform(0.0, 2.0))
        changes.next()
    assert changes.faults() == []
    assert len(pair.noted("saved")) >= times


@pytest.mark.parametrize(
    ("text", "moment_s"),
    [
        pytest.param(THREAD, 0.2, id="a thread saves while the main thread holds"),
        pytest.param(CHILD, 0.2, id="a spawned child saves"),
        pytest.param(WITHOUT_TORCH, 2.5, id="a script without torch, whose main thread saves"),
    ],
)
def test_saves_of_processes_that_hold_or_make_no_steps_are_waited_for(
    operator: OperatorEdge, worker: Worker, text: str, moment_s: float
) -> None:
    """Changes come `moment_s` after the end of a save, and up to 1.3 s later."""
    changes, moments = Changes(operator, worker, text), random.Random(7)
    for _ in range(trials(1, long=3)):
        changes.wait_saved()
        time.sleep(moment_s + moments.uniform(0.0, 1.3))
        changes.next()
    assert changes.faults() == []


def test_process_that_is_stopped_by_a_signal_is_replaced_all_the_same(operator: OperatorEdge, worker: Worker) -> None:
    changes = Changes(operator, worker, ALONE.format(before="", after="pass"))
    time.sleep(1.5)  # the hook has reported its steps
    os.kill(pid_of(worker), signal.SIGSTOP)
    assert 5 <= changes.next() < 12


def test_script_with_data_loader_workers_is_replaced_without_delay(operator: OperatorEdge, worker: Worker) -> None:
    before = "loader = iter(torch.utils.data.DataLoader(range(10**6), num_workers=2, batch_size=2))"
    changes = Changes(operator, worker, ALONE.format(before=before, after="next(loader)"))
    time.sleep(1.0)
    assert changes.next() < 4
    assert changes.faults() == []


def test_script_that_never_steps_and_writes_nothing_is_replaced_at_once(operator: OperatorEdge, worker: Worker) -> None:
    changes = Changes(operator, worker, "note('began')\ntime.sleep(600)")
    assert changes.next() < 2


SAVES = ALONE.format(before="", after="if step % 20 == 0:\n        save(step, 1.5)")


def wait_for_the_middle_of_a_save(directory: Path) -> None:
    """Return when a later save than the first has begun to write over its first file."""
    first, last = directory / "model.ckpt", directory / "state.ckpt"
    until(lambda: last.exists() and last.stat().st_size > 1 << 18, "the last file of a save is written", timeout_s=60)
    before_ns = first.stat().st_mtime_ns
    until(lambda: first.stat().st_mtime_ns > before_ns, "the next save begins", every_s=0.01)


def steps_in(directory: Path) -> set[int]:
    """Return the steps in the files of the checkpoint. One that is not complete is a failure."""
    found = set()
    for name in ("model.ckpt", "optimizer.ckpt", "state.ckpt"):
        lines = [json.loads(line) for line in (directory / name).read_bytes().splitlines()]
        assert [chunk for _, chunk in lines] == list(range(8)), f"{name} is broken"
        found |= {step for step, _ in lines}
    return found


def test_pod_that_is_deleted_in_the_middle_of_a_save_leaves_a_complete_checkpoint(
    operator: OperatorEdge, worker: Worker
) -> None:
    Changes(operator, worker, SAVES, REGROUP_GRACE_SECONDS="20")
    wait_for_the_middle_of_a_save(worker.directory)
    assert worker.agent is not None
    worker.agent.send_signal(signal.SIGTERM)
    operator.wait_body(wire.Draining)
    operator.tell(generation(2, free_port(), kind="planned", member=False)[0])
    assert worker.agent.wait(18) == 128 + signal.SIGTERM
    assert len(steps_in(worker.directory)) == 1


def test_forced_change_in_the_middle_of_a_save_leaves_a_complete_checkpoint(
    operator: OperatorEdge, worker: Worker
) -> None:
    """Another member was lost, for example. The next processes read the checkpoint."""
    changes = Changes(operator, worker, SAVES)
    wait_for_the_middle_of_a_save(worker.directory)
    changes.next("forced")
    assert changes.faults() == []


def test_local_run_that_is_interrupted_in_the_middle_of_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path, start: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "train.py").write_text(BEGIN + SAVES)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("REGROUP_PRELOAD", "torch")
    run = start("--workers", "1", str(tmp_path / "train.py"))
    wait_for_the_middle_of_a_save(tmp_path)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(28) == 130, run.log.read_text()
    assert len(steps_in(tmp_path)) == 1


FLAG = """told = []
signal.signal(signal.{name}, lambda *_: told.append(1))"""
SAVES_AND_ENDS = """if told:
        save(step, 0.5)
        sys.exit({code})"""


@only_long("tests/e2e/test_scripts.py has it on real pods")
def test_script_that_is_told_by_its_own_signal_saves_and_ends(operator: OperatorEdge, worker: Worker) -> None:
    text = ALONE.format(before=FLAG.format(name="SIGUSR1"), after=SAVES_AND_ENDS.format(code=3))
    changes = Changes(operator, worker, text, REGROUP_STOP_SIGNAL="SIGUSR1", REGROUP_STOP_SECONDS="30")
    for _ in range(2):
        time.sleep(0.3)
        saved = len(worker.noted("saved"))
        assert changes.next() < 8
        assert len(worker.noted("saved")) == saved + 1
    assert changes.faults() == []


def test_script_whose_handler_of_sigterm_sets_a_flag_saves_and_ends(operator: OperatorEdge, worker: Worker) -> None:
    """It holds when SIGTERM comes, and must go on to see the flag."""
    text = ALONE.format(before=FLAG.format(name="SIGTERM"), after=SAVES_AND_ENDS.format(code=0))
    changes = Changes(operator, worker, text)
    time.sleep(1.0)
    assert changes.next() < 8
    assert len(worker.noted("saved")) == 1
    assert changes.faults() == []


def pid_of(worker: Worker) -> int:
    (path,) = worker.notes.iterdir()
    return int(path.name)


@pytest.mark.slow
def test_job_that_is_scaled_at_random_moments_never_breaks_a_checkpoint(
    tmp_path: Path, start: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    script = tmp_path / "train.py"
    script.write_text(BEGIN + IN_PLACE)
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("REGROUP_PRELOAD", "torch")
    run = start("--workers", "2", "--min", "1", "--max", "3", "--join-quiet", "0.2", str(script))
    moments = random.Random(31)

    def noted(what: str) -> list[dict[str, object]]:
        lines = [line for path in notes.iterdir() for line in path.read_text().splitlines() if line.endswith("}")]
        return [one for one in map(json.loads, lines) if one["what"] == what]

    workers, generation_before = 2, 0
    for _ in range(trials(4, long=20)):
        generation_before = run.trains(workers, after=generation_before)["membership"]["generation"]
        saved = len(noted("saved"))
        until(lambda saved=saved: len(noted("saved")) > saved, "one more checkpoint", timeout_s=60)  # type: ignore[misc]
        time.sleep(moments.uniform(0.0, 2.0))
        workers = moments.choice([n for n in (1, 2, 3) if n != workers])
        run.scale(workers)
    run.trains(workers, after=generation_before)
    (tmp_path / "end").touch()
    assert run.process.wait(120) == 0, run.log.read_text()
    assert noted("broken") == []
    assert run.status()["restarts"]["processes"] == 0
