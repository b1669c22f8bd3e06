"""What a process leaves in the memory snapshot as it ends: the state of its last commit, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import regroup
from regroup.errors import DivergedError
from regroup.job import Job
from regroup.protocol import env, snapshot
from regroup.protocol.local import Snapshotted
from regroup.state.memory import Memory
from regroup.step import Step


@pytest.fixture
def told() -> list[Snapshotted]:
    """What the agent hears."""
    return []


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[Snapshotted]) -> Job:
    """A session in a world of one, with the memory tier that it has under an agent."""
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(env.SNAPSHOT_DIR, str(tmp_path))
    monkeypatch.setenv(env.JOB_UID, "job")
    model = torch.nn.Linear(4, 2)
    made = regroup.session(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=(torch.randn(64, 4), torch.randint(2, (64,))),
        global_batch=16,
        microbatch=4,
    )
    made._memory = Memory(made.state, made.plan, told.append, 0)
    return made


def run(job: Job, in_step: Callable[[Step], None], total: int = 3) -> None:
    """Train; `in_step` is what the script does wrong, in any step before its commit."""
    with job:
        for step in job.steps(total):
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).sum(), weight=4)
                in_step(step)
                step.commit(after=[lambda: in_step(step)])  # noqa: B023 - called at once


def raises(error: BaseException, *, committing: bool = False) -> Callable[[Step], None]:
    """Raise in step 2, after two have been committed: before its commit, or while that changes the state."""
    calls = 0

    def in_step(step: Step) -> None:
        nonlocal calls
        calls += step.index == 2
        if calls == 1 + committing:
            raise error

    return in_step


@pytest.mark.parametrize(
    ("error", "committing", "want"),
    [
        pytest.param(OSError("no answer"), False, [2], id="an exception of the script's"),
        pytest.param(KeyboardInterrupt(), False, [2], id="an interrupt"),
        pytest.param(SystemExit(1), False, [2], id="an exit"),
        pytest.param(DivergedError("Ranks differ."), False, [], id="what is diverged is nothing to go back to"),
        pytest.param(ZeroDivisionError(), True, [], id="the commit had begun: the state may be half changed"),
    ],
)
def test_last_copy(
    job: Job,
    tmp_path: Path,
    told: list[Snapshotted],
    error: BaseException,
    committing: bool,
    want: list[int],
) -> None:
    with pytest.raises(type(error)):
        run(job, raises(error, committing=committing))
    held = snapshot.held(tmp_path, "job")
    assert [one.state.step for one in held] == want
    assert [one.is_last for one in held] == [True] * len(want)
    assert [(one.state, one.is_last) for one in told] == [(one.state, True) for one in held]


def test_script_that_fails_after_its_loop_leaves_the_state_of_the_last_step(job: Job, tmp_path: Path) -> None:
    """Rule END: its process is started again with that state, whatever the script has done with its model meanwhile."""
    committed: list[torch.Tensor] = []

    def train_and_upload() -> None:
        for step in job.steps(2):
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).sum(), weight=4)
                step.commit()
            committed[:] = [p.detach().clone() for p in job.model.parameters()]
        with torch.no_grad():
            for p in job.model.parameters():
                p.zero_()
        raise OSError("upload")

    with pytest.raises(OSError, match="upload"), job:
        train_and_upload()
    assert job.outcome == "Complete"
    newest, *_ = snapshot.held(tmp_path, "job")
    assert (newest.state.step, newest.is_last) == (2, True)
    job._memory.restore()
    assert [p.tolist() for p in job.model.parameters()] == [p.tolist() for p in committed]


def test_copy_that_fails_does_not_hide_the_scripts_exception(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_device() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(job.state, "packed", no_device)
    with pytest.raises(OSError, match="no answer"):
        run(job, raises(OSError("no answer")))
    assert "could not be copied to the memory snapshot: CUDA error" in capsys.readouterr().out
