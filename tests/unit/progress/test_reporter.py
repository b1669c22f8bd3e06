"""How many steps a generation does again, and what is said at the end."""

from typing import cast

import pytest
import torch

from regroup.data import SamplePlan
from regroup.generation.watcher import Watcher
from regroup.progress.reporter import Attempts, Progress, Reporter
from regroup.protocol import local
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import TrainingState


def generation(attempts: Attempts, *indices: int, commits: bool = True) -> int:
    """Begin steps in a new generation; return how many of them it says it does again."""
    attempts.begin_generation()
    for index in indices:
        attempts.begin(index)
        if commits and index == indices[0]:
            attempts.told(index)
    return attempts.redone


@pytest.mark.parametrize(
    ("continues_at", "want"),
    [
        pytest.param(11, 0, id="after the step that was in flight: it was committed"),
        pytest.param(10, 1, id="at the step in flight"),
        pytest.param(8, 3, id="further back: what was rolled back counts"),
        pytest.param(20, 0, id="further on: the others were ahead"),
    ],
)
def test_steps_that_were_begun_before_are_counted(continues_at: int, want: int) -> None:
    attempts = Attempts()
    assert generation(attempts, *range(11)) == 0
    assert generation(attempts, continues_at, continues_at + 1) == want


def test_generation_that_commits_nothing_leaves_the_count_to_the_next() -> None:
    attempts = Attempts()
    generation(attempts, *range(11))
    assert generation(attempts, 8, commits=False) == 3
    assert generation(attempts, 8, 9) == 3
    assert generation(attempts, 9) == 1


class Agent:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def send(self, message: object) -> None:
        self.told.append(message)

    send_soon = send


def make_reporter(agent: Agent, durable: Durable | None = None) -> Reporter:
    plan, model = SamplePlan(0, 100, 10, 5, 1), torch.nn.Linear(1, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    reporter = Reporter(cast(Watcher, agent), plan, durable or Durable(state, plan), Memory(state, plan, None, 0))
    reporter.begin_generation(1, 0.0)
    return reporter


def test_each_commit_says_what_the_snapshots_cover() -> None:
    agent = Agent()
    reporter = make_reporter(agent)
    for step in (5, 6):
        reporter.begin_step(step - 1)
        reporter.committed(Progress(step, 0.5, step - 1, 20, snapshot_step=step - 3))
    told = [one for one in agent.told if isinstance(one, local.Committed)]
    assert [(one.step, one.snapshot_step, one.first_step_ms is None) for one in told] == [(5, 2, False), (6, 3, True)]


class OnDevice:
    """A loss on a device. Notes when it is read."""

    def __init__(self, value: float, reads: list[float]) -> None:
        self._value, self._reads = value, reads

    def __float__(self) -> float:
        self._reads.append(self._value)
        return self._value


def test_loss_on_a_device_is_told_with_the_next_step() -> None:
    """By then the device has computed it: to read it sooner would have the host wait in each step."""
    agent, reads = Agent(), list[float]()
    reporter = make_reporter(agent)
    for step, loss in ((5, 0.5), (6, 0.25)):
        reporter.begin_step(step - 1)
        reporter.committed(Progress(step, OnDevice(loss, reads), step - 1, 20))
    assert reads == [0.5]
    reporter.finished(7, 0.125)
    told = [one for one in agent.told if isinstance(one, local.Committed)]
    assert [(one.step, one.loss) for one in told] == [(5, None), (6, 0.5), (7, 0.125)]


class Saves:
    """In place of the durable tier: has saved what it is told to have."""

    saved: dict[str, object] | None = None

    def report(self) -> dict[str, object] | None:
        return self.saved

    def problem(self) -> str:
        return ""

    def late(self) -> str:
        return "Checkpoints begin every 40 s." if self.saved else ""


def test_late_copies_are_reported_each_time_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    agent, durable = Agent(), Saves()
    reporter = make_reporter(agent, cast(Durable, durable))
    for step in (5, 6, 7):
        reporter.begin_step(step - 1)
        reporter.committed(Progress(step, 0.5, step - 1, 20))
        reporter.say_late()
        durable.saved = {"generation": 1, "step": 5, "directory": "g1-s5"}
    told = [one.checkpoints_late for one in agent.told if isinstance(one, local.Committed)]
    assert told == ["", "Checkpoints begin every 40 s.", "Checkpoints begin every 40 s."]
    assert capsys.readouterr().out == "Checkpoints begin every 40 s.\n"


def test_checkpoint_that_is_written_after_the_last_step_is_told() -> None:
    agent, durable = Agent(), Saves()
    reporter = make_reporter(agent, cast(Durable, durable))
    reporter.begin_step(4)
    reporter.committed(Progress(5, 0.5, 4, 20))
    reporter.saved()
    assert len(agent.told) == 1, "nothing was saved"
    durable.saved = {"generation": 1, "step": 5, "directory": "g1-s5"}
    reporter.saved()
    told = [one for one in agent.told if isinstance(one, local.Committed)]
    assert [(one.step, one.checkpoint) for one in told] == [(5, None), (5, durable.saved)]
    assert [one.first_step_ms is None for one in told] == [False, True], "what a generation says once"
    reporter.begin_generation(2, 0.0)
    reporter.saved()
    assert len(agent.told) == 2, "no step of this generation is there to say it of"


@pytest.mark.parametrize("loss", [0.25, None])
def test_end_is_told_with_the_loss_of_its_step(loss: float | None) -> None:
    agent = Agent()
    make_reporter(agent).finished(20, loss)
    told, finished = agent.told
    assert isinstance(told, local.Committed)
    assert (told.step, told.loss) == (20, loss)
    assert isinstance(finished, local.FinishedLocally)
