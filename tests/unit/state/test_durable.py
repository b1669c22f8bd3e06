"""The durable tier of one process: when it begins a checkpoint, when it waits for one, and what it says of the volume.
Files are real, and the clock of most tests is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from regroup.checkpoint import Checkpointer, CheckpointError, store
from regroup.checkpoint.checkpointer import Origin
from regroup.data import SamplePlan
from regroup.protocol.state import StatePair
from regroup.state.durable import Durable, patience_s
from regroup.state.training import TrainingState
from tests.builders.checkpoints import build, flat, make, save, train
from tests.trainer.dead_volume import DeadVolume


class Clock:
    """A clock that a test moves, in place of the module `time`."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The only clock of the durable tier."""
    virtual = Clock()
    monkeypatch.setattr("regroup.checkpoint.checkpointer.time", virtual)
    monkeypatch.setattr("regroup.state.durable.time", virtual)
    return virtual


def durable_of(monkeypatch: pytest.MonkeyPatch, directory: Path) -> tuple[TrainingState, Durable, Checkpointer]:
    """Return the durable tier of a process that writes, every 60 s."""
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(directory))
    monkeypatch.setenv("REGROUP_CHECKPOINT_EVERY_SECONDS", "60")
    state = TrainingState(*build(), {})
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    durable.is_writer = True
    assert durable.checkpointer is not None
    return state, durable, durable.checkpointer


class Asked(int):
    """The number of steps that every rank has committed; it says when the writer thread compares it."""

    looks: ClassVar = threading.Semaphore(0)

    def __ge__(self, step: int) -> bool:
        self.looks.release()
        return int(self) >= step


def test_checkpoint_is_committed_after_the_next_step_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    origin = Origin(1, "aaaa", 0, 0)
    for step, step_s in ((1, 70.0), (2, 70.0), (3, 600.0), (4, 7200.0)):
        state.named(StatePair(1, step), 1)
        assert checkpointer.wait(30)
        Asked.looks = threading.Semaphore(0)
        durable.save_if_due(origin, alone=False)
        assert checkpointer.busy == (step > 1), "the first call starts the clock"
        durable.known_by_all = Asked(step - 1)
        assert not checkpointer.busy or Asked.looks.acquire(timeout=30), "the data is written"
        for _ in range(7 if checkpointer.busy else 0):
            while Asked.looks.acquire(blocking=False):
                pass
            clock.now_s += step_s / 7
            for _ in range(3):  # the last one is after the clock was moved
                assert Asked.looks.acquire(timeout=30)
            assert durable.problem() == "", "a step takes as long as it takes: nothing is wrong with the volume"
        clock.now_s += 0 if checkpointer.busy else step_s
        durable.known_by_all = step
        assert checkpointer.wait(30)
        saved = durable.report()
        assert (saved and saved["step"]) == (step if step > 1 else None)
    assert checkpointer.longest_s == 0, "steps are no part of what the volume takes"


def test_generation_that_rolled_back_begins_a_checkpoint_with_its_first_step_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    state.named(StatePair(2, 7), 2)
    durable.hurry()
    assert not checkpointer.busy
    assert list(tmp_path.iterdir()) == []
    for step in (8, 9):
        state.named(StatePair(2, step), 2)
        durable.save_if_due(Origin(2, "aaaa", 1, 7), alone=True)
        assert checkpointer.wait(30)
        clock.now_s += 1.0
    saved = durable.report()
    assert saved is not None
    assert saved["step"] == 8, "the next one is due after the interval"


def test_each_step_that_is_longer_than_the_interval_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    for step in range(1, 6):
        state.named(StatePair(1, step), 1)
        Asked.looks = threading.Semaphore(0)
        durable.known_by_all = Asked(step - 1)  # the rows of a step say who has committed the one before
        durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
        state.staging.settle()  # as the next commit does, for which the write before this one waits
        while step > 1 and checkpointer._host_of is not None:  # the step takes longer than the volume
            assert Asked.looks.acquire(timeout=30)
        clock.now_s += 70.0
    durable.known_by_all = 5
    assert checkpointer.wait(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}.g1-aaaa" for step in range(2, 6)]


def test_last_checkpoint_does_not_wait_for_a_step_that_will_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROUP_CHECKPOINT_WAIT_SECONDS", "10")
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    state.named(StatePair(1, 7), 1)
    monkeypatch.setattr(checkpointer, "due", lambda _: True)
    durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
    assert checkpointer.busy
    durable.save_now(Origin(1, "aaaa", 0, 0), interrupted=lambda: False)
    assert durable.report() == {"generation": 1, "step": 7, "directory": "step-7.g1-aaaa"}


def test_script_that_raises_ends_the_wait_for_its_next_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    state.named(StatePair(1, 7), 1)
    monkeypatch.setattr(checkpointer, "due", lambda _: True)
    durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
    durable.lost()
    assert checkpointer.wait(30)
    assert durable.report() is None
    assert list(tmp_path.iterdir()) == []


def test_session_that_took_another_ranks_state_commits_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 wrote (1, 101) and was cut off; the others did step 101 again, and that is what it adopts and goes on from."""
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("REGROUP_CHECKPOINT_EVERY_SECONDS", "0")
    model, optimizer = build()
    state = TrainingState(model, optimizer, {})
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    state.named(StatePair(1, 101), 1)
    durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=False)
    durable.known_by_all = 100
    checkpointer = durable.checkpointer
    assert checkpointer is not None
    assert not checkpointer.wait(0)
    durable.lost()
    assert durable.known_by_all == 0
    durable.known_by_all = 200
    assert checkpointer.wait(30)
    assert durable.report() is None
    durable.is_writer = True
    assert durable.problem() == "", "it is no fault of the volume"
    assert list(tmp_path.iterdir()) == []


def test_volume_that_takes_no_checkpoint_is_said_once_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(tmp_path / "file" / "checkpoints"))
    monkeypatch.setenv("REGROUP_CHECKPOINT_EVERY_SECONDS", "0")
    state = TrainingState(*build(), {})
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    assert durable.checkpointer is not None
    assert durable.problem() is None, "it is not the one to write"
    durable.is_writer = True
    for _ in range(3):
        state.named(StatePair(1, 7), 1)
        durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=True)
        assert durable.checkpointer.wait(30)
    assert "could not be written to" in str(durable.problem())
    assert capsys.readouterr().out.count("Checkpoint step-7.g1-aaaa could not be written to") == 1


def test_save_that_must_be_durable_gives_up_a_volume_that_does_not_answer_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("REGROUP_CHECKPOINT_WAIT_SECONDS", "0.3")
    state = TrainingState(*build(), {})
    state.named(StatePair(1, 7), 1)
    durable = Durable(state, SamplePlan(0, 100, 4, 2, 2))
    durable.is_writer = True
    with DeadVolume(tmp_path) as volume:
        durable.save_now(Origin(1, "aaaa", 0, 0), interrupted=lambda: False)
        assert durable.problem() == (
            f"Writing checkpoint step-7.g1-aaaa has taken more than 0.3 s: the volume of {tmp_path} does not answer. Check "
            "the volume, and its mount on this worker's node."
        )
        assert capsys.readouterr().out.splitlines() == [durable.problem()]
        assert durable.report() is None
        volume.answer()
        assert durable.checkpointer is not None
        assert durable.checkpointer.wait(30)
    assert durable.problem() == ""
    assert durable.report() == {"generation": 1, "step": 7, "directory": "step-7.g1-aaaa"}


@pytest.mark.parametrize(
    ("most_s", "longest_s", "want_s"),
    [
        pytest.param(1800, None, 1800, id="none was written before: all that is allowed"),
        pytest.param(1800, 2, 300, id="quick ones before: a file server's restart is still waited for"),
        pytest.param(1800, 200, 800, id="slow ones before: four times the slowest"),
        pytest.param(1800, 900, 1800, id="never more than is allowed"),
        pytest.param(60, 2, 60, id="nor where less is allowed than usual"),
    ],
)
def test_how_long_one_checkpoint_is_waited_for(most_s: float, longest_s: float | None, want_s: float) -> None:
    assert patience_s(most_s, longest_s) == want_s


def test_plain_python_begins_with_the_checkpoint_that_is_named_until_it_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    train(model, optimizer)
    there, here = tmp_path / "there", tmp_path / "here"
    state = TrainingState(model, optimizer, {})
    checkpointer = make(there)
    checkpointer.save(state.saved_tree(), pair=StatePair(4, 60), origin=Origin(4, "a", 3, 50))
    assert checkpointer.wait(30)
    monkeypatch.setenv("REGROUP_CHECKPOINT_DIR", str(here))
    monkeypatch.setenv("REGROUP_RESUME_FROM", str(there / "step-60.g4-a"))

    def alone() -> tuple[Durable, TrainingState, Origin]:
        mine = TrainingState(*build(seed=1), {})
        durable = Durable(mine, SamplePlan(0, 100, 4, 2, 2))
        return durable, mine, durable.continue_alone()

    begun = checkpointer.imported(str(there / "step-60.g4-a"))
    assert checkpointer.imported(begun.path, begun.commit.fingerprint) == begun
    with pytest.raises(CheckpointError, match=r"was replaced after the job had begun with it"):
        checkpointer.imported(begun.path, "0" * 64)

    durable, mine, origin = alone()
    assert (mine.pair, origin) == (StatePair(0, 60), Origin(1, "alone", 0, 60))
    assert flat(mine.saved_tree()) == flat(state.saved_tree())
    mine.named(StatePair(1, 61), 1)
    durable.save_now(origin, interrupted=lambda: False)
    _, again, origin = alone()
    assert (again.pair, origin.start_step) == (StatePair(1, 61), 61)


def test_each_write_and_each_deletion_has_the_bound_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The writer thread does one behind the other. A volume that takes 50 s for each does not hang."""
    checkpointer = make(tmp_path)
    save(checkpointer, 1, 1)
    said: list[str | None] = []

    def slowly(does: Callable[..., Any]) -> Callable[..., Any]:
        def does_slowly(*arguments: Any) -> Any:
            clock.now_s += 50.0
            said.append(checkpointer.hangs(60.0))
            return does(*arguments)

        return does_slowly

    monkeypatch.setattr(store, "write_data", slowly(store.write_data))
    monkeypatch.setattr(store, "delete", slowly(store.delete))
    asked, acknowledged = threading.Event(), threading.Event()

    def know() -> bool:
        asked.set()
        return acknowledged.is_set()

    save(checkpointer, 1, 2, acknowledged=know, wait=False)
    assert asked.wait(30)
    save(checkpointer, 1, 3, wait=False)
    checkpointer.prune(["step-2.g1-00000001"], generation=1)
    acknowledged.set()
    assert checkpointer.wait(30)
    assert said == [None, None, None]
    assert checkpointer.longest_s == 50.0


AFTER_A_STEP = "a checkpoint begins after a step, once the data of the one before is on the volume"


@pytest.mark.parametrize(
    ("write_s", "step_s", "generations", "want"),
    [
        pytest.param(0.0, 61.0, 1, "", id="the interval is kept"),
        pytest.param(30.0, 200.0, 1, f"every 230 s, and {{}} is 60: {AFTER_A_STEP}. Raise it to 230,", id="long steps"),
        pytest.param(150.0, 60.0, 1, "every 210 s, and {} is 60: writing one has taken 150 s.", id="a slow volume"),
        pytest.param(30.0, 200.0, 4, "", id="each generation has one step: it is no interval"),
    ],
)
def test_why_checkpoints_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock,
    write_s: float, step_s: float, generations: int, want: str,
) -> None:  # fmt: skip
    state, durable, checkpointer = durable_of(monkeypatch, tmp_path)
    write_data, begun = store.write_data, threading.Event()

    def slow(*arguments: Any) -> Path:
        assert begun.wait(30)
        clock.now_s += write_s
        return write_data(*arguments)

    monkeypatch.setattr(store, "write_data", slow)
    for step in range(1, 6):
        if step <= generations:
            durable.begin_generation()
        state.named(StatePair(1, step), 1)
        begun.clear()
        durable.save_if_due(Origin(1, "aaaa", 0, 0), alone=True)
        begun.set()
        assert checkpointer.wait(30)
        clock.now_s += step_s
    assert want.format("spec.checkpoint.everySeconds") in (durable.late() or "")
    assert bool(durable.late()) == bool(want)
    durable.is_writer = False
    assert durable.late() is None, "another process says it"
