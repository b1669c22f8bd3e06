"""A script that is started again after its loop (rule END): a real session and watcher against an agent that says only the end.

The first run is in plain `python`, and leaves a memory snapshot, a checkpoint, or both.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regroup
from regroup.checkpoint import CheckpointError
from regroup.checkpoint.checkpointer import Checkpointer
from regroup.errors import StateError, UsageError
from regroup.job import Job
from regroup.protocol import env, local
from regroup.protocol.document import CheckpointRef
from regroup.protocol.state import StatePair
from regroup.state.memory import Memory

STEPS = 3


class Agent:
    """Answers each `Attach` with `says`; keeps what it hears. A process that rehearses gets leave to where nothing is said."""

    def __init__(self, path: Path) -> None:
        self.says: list[Any] = []
        self.heard: list[Any] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
                for line in lines:
                    message = local.FROM_TRAINER.decode_line(line)
                    self.heard.append(message)
                    if isinstance(message, local.Attach):
                        for word in self.says:
                            connection.sendall(local.encode(word))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "agent.sock")
    yield agent
    agent.close()


class Tied(torch.nn.Module):
    """A model of what users have: channels_last, BatchNorm, a frozen and a tied parameter, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.norm(self.conv(x)).mean((2, 3))
        out: torch.Tensor = self.head(self.second(self.first(self.frozen(pooled))).to(torch.bfloat16))
        return out


class Run:
    """One start of the script: everything is built anew, from another seed."""

    def __init__(self, seed: int, **changes: Any) -> None:
        torch.manual_seed(seed)
        model = changes.pop("model", None) or Tied()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.job = regroup.session(
            model=model,
            optimizer=optimizer,
            data=(torch.randn(64, 3, 4, 4), torch.randint(2, (64,))),
            global_batch=16,
            microbatch=4,
            state={"schedule": schedule},
            **changes,
        )
        self.schedule = schedule

    def train(
        self, total: int = STEPS, *, ends_at: int | None = None, after: Callable[[Job], None] | None = None
    ) -> int:
        """Run the script; return the number of its steps. `ends_at`: break after that many. `after`: what follows the job."""
        num = 0
        with self.job as job:
            for step in job.steps(total):
                with step:
                    for batch in step.microbatches():
                        loss = torch.nn.functional.cross_entropy(job.model(batch.x).float(), batch.y, reduction="sum")
                        step.backward(sum=loss, weight=len(batch.y))
                    step.commit(after=[self.schedule.step])
                num += 1
                if num == ends_at:
                    break
        if after is not None:
            after(job)
        return num

    def values(self) -> dict[str, Any]:
        structure, tensors = self.job.state.packed()
        return {"structure": structure, **{name: tensor.clone() for name, tensor in tensors.items()}}


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value, name


def spoil(job: Job) -> None:
    """What a script may do with its trained model: average it, quantise it, fine-tune it."""
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()


class Place:
    """Where the first run leaves its state, and the process that follows it finds it."""

    def __init__(self, directory: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.snapshots, self.checkpoints = directory / "snapshots", directory / "checkpoints"
        self.socket, self.agent, self.set = str(directory / "agent.sock"), agent, monkeypatch
        for name in (env.SOCKET, env.CHECKPOINT_DIR, env.SNAPSHOT_DIR, env.MAX_WORLD_SIZE, env.SNAPSHOT_BYTES):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(env.JOB_UID, "job")
        self.snapshots.mkdir()

    def first(
        self, *, snapshot: bool = False, checkpoint: bool = False, total: int = STEPS, **train: Any
    ) -> dict[str, Any]:
        """Run the script once, in generation 1; return the state of its last step."""
        if checkpoint:
            self.set.setenv(env.CHECKPOINT_DIR, str(self.checkpoints))
        run = Run(1)
        if snapshot:
            self.set.setenv(env.SNAPSHOT_DIR, str(self.snapshots))
            run.job._memory = Memory(run.job.state, run.job.plan, lambda _: None, 0)
        values: dict[str, Any] = {}

        def keep(_: Job) -> None:
            values.update(run.values())
            spoil(run.job)

        run.train(total, after=keep, **train)
        return values

    def told(self, **changes: Any) -> Place:
        """The operator says the end to whatever starts from now on: rank 2 of 4."""
        finish = {"generation": 1, "step": STEPS, "rank": 2, "world_size": 4, "checkpoint": None, **changes}
        self.agent.says = [local.FinishLocally(**finish)]
        return self

    def again(self, **changes: Any) -> Run:
        """Start the script again, in a process of its own as far as the session sees."""
        self.set.setenv(env.SOCKET, self.socket)
        self.set.setattr(Job, "_attached", False)
        return Run(7, **changes)

    @property
    def newest(self) -> CheckpointRef:
        (found,) = self.checkpoints.glob(f"step-*{STEPS}.*")
        return CheckpointRef(1, STEPS, found.name)


@pytest.fixture
def place(tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, agent, monkeypatch)


# --- exactly the state of the last step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory snapshot", "checkpoint", "both"])
def test_code_after_the_loop_runs_again_with_the_state_of_the_last_step(place: Place, where: str) -> None:
    want = place.first(snapshot=where != "checkpoint", checkpoint=where != "memory snapshot")
    place.told(checkpoint=None if where == "memory snapshot" else place.newest)
    run, seen = place.again(), []
    assert run.train(after=lambda job: seen.append((job.outcome, job.step))) == 0
    assert seen == [("Complete", STEPS)]
    assert_equal(run.values(), want)
    assert run.schedule.last_epoch == STEPS


def test_process_that_takes_no_snapshot_reads_that_of_its_workers_first_process(place: Place) -> None:
    want = place.first(snapshot=True)
    place.set.setenv(env.LOCAL_RANK, "1")
    place.set.setenv(env.LOCAL_WORLD_SIZE, "2")
    run = place.told(rank=3).again()
    assert run.train() == 0
    assert run.job.rank == 3
    assert_equal(run.values(), want)


def test_script_knows_the_place_of_its_predecessor(place: Place) -> None:
    place.first(snapshot=True)
    place.told()
    run = place.again()
    seen = []
    with run.job as job:
        for _ in job.steps(STEPS):
            pytest.fail("all steps are committed")
        seen.append((job.rank, job.world_size, job.is_main, job.step, job.generation, job.outcome, job.groups))
    assert seen == [(2, 4, False, STEPS, 1, "Complete", None)]
    assert (run.job.rank, run.job.world_size, run.job.is_main) == (2, 4, False), "also after the block of the session"
    assert [
        m for m in place.agent.heard if isinstance(m, (local.Entering, local.Committed, local.FinishedLocally))
    ] == []


def test_only_rank_0_is_the_main_process(place: Place) -> None:
    place.first(snapshot=True)
    run = place.told(rank=0).again()
    run.train()
    assert run.job.is_main


def test_loop_that_was_left_early_has_no_steps_when_the_script_is_started_again(place: Place) -> None:
    """The job ended at step 3 of 10. Whether the script would break again does not matter."""
    want = place.first(snapshot=True, total=10, ends_at=STEPS)
    run = place.told().again()
    assert run.train(10) == 0
    assert (run.job.outcome, run.job.step) == ("Complete", STEPS)
    assert_equal(run.values(), want)


def test_process_that_holds_the_state_itself_reads_nothing(place: Place) -> None:
    """It had finished, and was on its way to a newer generation when the end came."""
    run = place.told().again()
    run.job.state.named(StatePair(1, STEPS), 1)
    want = run.values()
    assert run.train() == 0
    assert_equal(run.values(), want)


def test_script_that_fails_again_leaves_what_it_has_found(place: Place) -> None:
    """As often as it takes: the snapshot is read, and never written after the last step."""
    want = place.first(snapshot=True)
    place.told()

    def fails(job: Job) -> None:
        spoil(job)
        raise OSError("no answer")

    for _ in range(2):
        with pytest.raises(OSError, match="no answer"):
            place.again().train(after=fails)
    inside = place.again()

    def fails_inside() -> None:
        with inside.job as job:
            assert list(job.steps(STEPS)) == []
            fails(job)

    with pytest.raises(OSError, match="no answer"):
        fails_inside()
    run = place.again()
    run.train()
    assert_equal(run.values(), want)


def test_script_that_raises_makes_no_checkpoint_of_a_step_that_waits_for_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody will say that all have committed it."""
    place.first(checkpoint=True)
    cancelled: list[Checkpointer] = []
    monkeypatch.setattr(Checkpointer, "cancel", lambda checkpointer: cancelled.append(checkpointer))
    run = place.told(checkpoint=place.newest).again()
    with pytest.raises(OSError, match="no answer"), run.job:
        raise OSError("no answer")
    assert len(cancelled) == 1


# --- no other state ----------------------------------------------------------------------------------------------------------

NOWHERE = (
    f"The state of step {STEPS}, the last one, is in no checkpoint and in no memory snapshot, so what follows the loop cannot run "
    "again. Give the job a checkpoint (spec.checkpoint, or regroup run --checkpoint)."
)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        pytest.param(None, {}, id="nothing was kept"),
        pytest.param({"snapshot": True, "total": 2}, {}, id="the snapshot is older"),
        pytest.param(
            {"snapshot": True},
            {"generation": 2},
            id="the step of that number was committed by a few before the last generation",
        ),
        pytest.param({"checkpoint": True, "total": 2}, {}, id="the checkpoint is older: the operator names none"),
    ],
)
def test_script_is_not_run_with_another_state(place: Place, first: dict[str, Any] | None, told: dict[str, Any]) -> None:
    if first is not None:
        place.first(**first)
    run = place.told(**told).again()
    reached: list[Job] = []
    with pytest.raises(StateError) as error:
        run.train(after=reached.append)
    assert (str(error.value), reached) == (NOWHERE, [])


@pytest.mark.parametrize(
    ("step", "adopted"),
    [
        pytest.param(STEPS - 1, 1, id="another step"),
        pytest.param(STEPS, 2, id="that step, in another generation than the one that has finished"),
    ],
)
def test_own_state_is_taken_for_the_last_one_only_if_it_is(place: Place, step: int, adopted: int) -> None:
    run = place.told().again()
    run.job.state.named(StatePair(1, step), adopted)
    with pytest.raises(StateError, match="in no checkpoint"):
        run.train()


def test_older_snapshot_gives_way_to_the_checkpoint_of_the_last_step(place: Place) -> None:
    want = place.first(checkpoint=True)
    place.set.delenv(env.CHECKPOINT_DIR)
    place.first(snapshot=True, total=STEPS - 1)
    place.set.setenv(env.CHECKPOINT_DIR, str(place.checkpoints))
    run = place.told(checkpoint=place.newest).again()
    run.train()
    assert_equal(run.values(), want)


def test_checkpoint_that_is_gone_is_named(place: Place) -> None:
    place.first(checkpoint=True)
    place.told(checkpoint=CheckpointRef(1, STEPS, "step-3.g1-gone"))
    with pytest.raises(CheckpointError, match=r"step-3\.g1-gone"):
        place.again().train()


def test_damaged_snapshot_is_dropped_and_the_next_process_reads_the_checkpoint(place: Place) -> None:
    want = place.first(snapshot=True, checkpoint=True)
    place.told(checkpoint=place.newest)
    for data in place.snapshots.glob("*.bin"):
        data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(StateError):
        place.again().train()
    run = place.again()
    run.train()
    assert_equal(run.values(), want)


def test_script_that_was_changed_meanwhile_is_told_what_does_not_fit(place: Place) -> None:
    place.first(snapshot=True)
    place.told()
    with pytest.raises(StateError, match="does not fit this script"):
        place.again(model=torch.nn.Linear(3, 2)).train()


# --- what else a script does --------------------------------------------------------------------------------------------------


def test_block_of_collectives_before_the_loop_runs_alone(place: Place) -> None:
    """The others were in it before their first step."""
    want = place.first(snapshot=True)
    run, seen = place.told().again(), []
    with run.job as job:
        for attempt in job.collective("count"):
            with attempt as team:
                seen.append((team.rank, team.world_size, team.all_reduce(torch.ones(1)).item()))
        assert_equal(run.values(), want)
        assert list(job.steps(STEPS)) == []
        with pytest.raises(UsageError, match="comes after the loop"):
            job.collective("eval").__enter__()
    assert seen == [(0, 1, 1.0)]
    assert (job.rank, job.world_size, job.outcome) == (2, 4, "Complete")


@pytest.mark.parametrize("with_collective", [False, True])
def test_nothing_is_rehearsed(place: Place, with_collective: bool) -> None:
    """A rehearsal compiles the step, which takes minutes: no step follows."""
    place.first(snapshot=True)
    run = place.told().again(rehearse=True)
    with run.job as job:
        if with_collective:
            for attempt in job.collective("count"):
                with attempt:
                    pass
        assert list(job.steps(STEPS)) == []
    assert [m.rehearses for m in place.agent.heard if isinstance(m, local.Attach)] == [True, False]


def test_process_that_rehearses_when_the_end_comes_ends_its_rehearsal(place: Place) -> None:
    place.first(snapshot=True)
    place.agent.says = [local.Answer("rehearse", 0, True, 0)]
    run, rehearsed = place.again(rehearse=True), []
    with run.job as job:
        for step in job.steps(STEPS):
            rehearsed.append(step.rehearsal)
            place.told()  # `ready` is answered with it
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).float().sum(), weight=len(batch.y))
                step.commit()
    assert rehearsed == [True]
    assert (job.outcome, job.step, job.rank) == ("Complete", STEPS, 2)


# --- the job ends in another way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_collective", [False, True], ids=["in its loop", "in a collective"])
@pytest.mark.parametrize("outcome", ["Failed", "Released"])
def test_job_that_ends_without_this_process_raises(place: Place, outcome: str, with_collective: bool) -> None:
    place.agent.says = [local.StopLocally(outcome)]
    run = place.again()

    def script() -> None:
        with run.job as job:
            if with_collective:
                for attempt in job.collective("count"):
                    with attempt:
                        pass
            list(job.steps(STEPS))

    with pytest.raises(regroup.JobEnded) as ended:
        script()
    assert (ended.value.outcome, run.job.outcome) == (outcome, outcome)


def test_script_that_does_not_catch_the_end_of_its_job_exits_with_0() -> None:
    script = "from regroup.errors import JobEnded; raise JobEnded('Failed')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
