"""A rehearsal under an agent: the block of a step runs before the process is ready, and leaves nothing behind."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import regroup
from regroup.checkpoint import tree as trees
from regroup.checkpoint.checkpointer import Origin
from regroup.errors import UsageError
from regroup.generation.membership import Alone
from regroup.job import Job
from regroup.protocol import env, local
from regroup.strategies import LocalSGD
from regroup.transaction.rehearsal import MICROBATCHES


class Agent:
    """What a session says to its agent, and what else happens, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def watcher(self, _path: str, attach: local.Attach) -> Any:
        events = self.events
        events.append("rehearses" if attach.rehearses else "ready")

        class Watcher:
            finish = None

            def may_rehearse(self) -> bool:
                return True

            def ready(self) -> None:
                if "rehearses" in events and "ready" not in events:
                    events.append("ready")

            def send(self, message: Any) -> None: ...

            send_soon = send

            def close(self) -> None: ...

        return Watcher()

    def regrouper(self, *_: Any) -> Alone:
        events = self.events

        class Member(Alone):
            """Is alone in generation 1 from when it asks for it."""

            is_alone = False

            def __init__(self) -> None:
                self.origin = Origin(0, "", 0, 0)
                self.block, self.ended, self.over, self.rank = None, False, False, -1

            def ensure(self) -> bool:
                if self.generation:
                    return False
                events.append("entered")
                self.origin, self.rank, self.adopted_at_s = Origin(1, "", 1, 0), 0, time.monotonic()
                return True

            def explains(self, error: BaseException) -> bool:
                return isinstance(error, regroup.GenerationChanged)

        return Member()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """This process is a trainer process of a worker."""
    for name in (env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    agent = Agent()
    monkeypatch.setenv(env.SOCKET, "/nowhere")
    monkeypatch.setattr("regroup.job.Watcher", agent.watcher)
    monkeypatch.setattr("regroup.job.Regrouper", agent.regrouper)
    monkeypatch.setattr(Job, "_attached", False)
    yield agent
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()


class Block(torch.nn.Module):
    """A forward of the script's own: torch does not compile the frames of its own containers."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def make_job(*layers: torch.nn.Module, **changes: Any) -> Job:
    model = changes.pop("model", None)
    if model is None:
        model = Block(torch.nn.Linear(4, 8), *layers, torch.nn.Linear(8, 2))
    fields: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.1),
        "data": (torch.randn(64, 4), torch.randint(2, (64,))),
        "global_batch": 16,
        "microbatch": 4,
    }
    return regroup.session(**{**fields, **changes})


def no_steps(_step: Any) -> None: ...


def train(job: Job, total: int = 1, *, in_step: Callable[[Any], None] = no_steps, **commit: Any) -> list[Any]:
    """Run the script's loop; return its steps."""
    steps = []
    with job:
        for step in job.steps(total):
            with step:
                for batch in step.microbatches():
                    loss = torch.nn.functional.cross_entropy(job.model(batch[0]), batch[1], reduction="sum")
                    step.backward(sum=loss, weight=len(batch[1]))
                in_step(step)
                step.commit(**commit)
            steps.append(step)
    return steps


def counting(events: list[str]) -> Callable[..., Any]:
    def compile_(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        events.append("compiled")
        return graph.forward

    return compile_


def wrapped(model: torch.nn.Module, backend: Any) -> torch.nn.Module:
    compiled: Any = torch.compile(model, backend=backend)
    module: torch.nn.Module = compiled
    return module


def in_place(model: torch.nn.Module, backend: Any) -> torch.nn.Module:
    model.compile(backend=backend)
    return model


def a_part(model: torch.nn.Module, backend: Any) -> torch.nn.Module:
    return torch.nn.Sequential(in_place(model, backend))


@pytest.mark.parametrize("compile_", [wrapped, in_place, a_part])
def test_compiled_model_compiles_before_its_process_is_ready(agent: Agent, compile_: Any) -> None:
    model = compile_(Block(torch.nn.Linear(4, 2)), counting(agent.events))
    steps = train(make_job(model=model), 2)
    assert agent.events == ["rehearses", "compiled", "ready", "entered"]
    assert [(s.index, s.rehearsal, s.committed, s.interrupted) for s in steps] == [
        (0, True, False, True),
        (0, False, True, False),
        (1, False, True, False),
    ]


@pytest.mark.parametrize(
    ("rehearse", "compiles", "begins"),
    [
        pytest.param(None, False, "ready", id="nothing is known to compile"),
        pytest.param(True, False, "rehearses", id="the script asks for it"),
        pytest.param(False, True, "ready", id="the script does not want it"),
    ],
)
def test_script_decides(agent: Agent, rehearse: bool | None, compiles: bool, begins: str) -> None:
    model = Block(torch.nn.Linear(4, 2))
    if compiles:
        in_place(model, counting([]))
    steps = train(make_job(model=model, rehearse=rehearse))
    assert agent.events[0] == begins
    assert [step.rehearsal for step in steps] == ([True, False] if begins == "rehearses" else [False])


def test_rehearsal_makes_no_inner_step(agent: Agent) -> None:
    """An inner batch of the two microbatches would be complete; and the round that follows is as without a rehearsal."""
    ends = []
    for rehearse in (True, False):
        torch.manual_seed(1)
        agent.events.clear()
        Job._attached = False
        job = make_job(rehearse=rehearse, strategy=LocalSGD(inner_steps=2))
        steps: list[int] = []
        job.optimizer.register_step_pre_hook(lambda *_, steps=steps: steps.append(len(agent.events)))
        train(job)
        assert len(steps) == 2
        assert steps[0] == len(agent.events), "all are made after the generation was entered"
        ends.append([parameter.detach().clone() for parameter in job.model.parameters()])
    for rehearsed, plain in zip(*ends):
        assert torch.equal(rehearsed, plain)


def test_plain_python_rehearses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    assert [step.rehearsal for step in train(make_job(rehearse=True), 2)] == [False, False]


def test_argument_is_checked() -> None:
    with pytest.raises(UsageError, match=r"rehearse is 'auto'; it must be True, False, or None"):
        make_job(rehearse="auto")


Held = dict[str, Any]


def held(job: Job, scaler: Any) -> Held:
    """Return everything that a rehearsal must leave as it is, copied."""
    text, tensors = trees.pack(job.state.tree())
    _, numpys, *position = np.random.get_state()
    return {
        "state": (text, {name: tensor.clone() for name, tensor in tensors.items()}),
        "gradients": [None if p.grad is None else p.grad.clone() for p in job.model.parameters()],
        "optimizer": len(job.optimizer.state),
        "scaler": (scaler._scale, scaler._growth_tracker),
        "random": (torch.get_rng_state(), random.getstate(), numpys, position),
        "outcome": (job.step, job.generation, job.state.pair, job.state.record),
    }


def assert_same(now: Any, before: Any, where: str = "") -> None:
    if isinstance(before, torch.Tensor):
        assert torch.equal(now, before), where
    elif isinstance(before, np.ndarray):
        assert now.tobytes() == before.tobytes(), where
    elif isinstance(before, dict):
        assert now.keys() == before.keys(), where
        for key in before:
            assert_same(now[key], before[key], f"{where}.{key}")
    elif isinstance(before, (tuple, list)):
        assert len(now) == len(before), where
        for i, value in enumerate(before):
            assert_same(now[i], value, f"{where}[{i}]")
    else:
        assert now == before, where


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_rehearsal_leaves_everything_as_it_was(agent: Agent, reduction: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    layers = [torch.nn.Dropout(0.5)] if reduction == "exact" else [torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)]
    job = make_job(*layers, rehearse=True, scaler=scaler, reduction=reduction)
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)
    job.state.extra["schedule"] = schedule
    first = next(job.model.parameters())
    first.grad = torch.ones_like(first)
    before, hooks, seen = held(job, scaler), [], []

    def draw(step: Any) -> None:
        torch.rand(3), random.random(), np.random.rand()
        if step.rehearsal:
            seen.append(agent.events[-1])
            assert first.grad is not None
            assert reduction == "exact" or not torch.equal(first.grad, torch.ones_like(first)), "backward has run"

    with job:
        for step in job.steps(1):
            if not step.rehearsal:
                assert_same(held(job, scaler), before | {"outcome": (0, 1, None, None)})
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).pow(2).sum(), weight=len(batch.y))
                draw(step)
                step.commit(
                    before=[lambda: hooks.append("before")], after=[schedule.step, lambda: hooks.append("after")]
                )
    assert seen == ["rehearses"]
    assert hooks == ["before", "after"], "of the step that was committed"
    assert len(job.optimizer.state) == len(list(job.model.parameters()))


def test_training_after_a_rehearsal_has_the_bits_of_training_without(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(rehearse: bool) -> Any:
        monkeypatch.setattr(Job, "_attached", False)
        torch.manual_seed(1)
        agent.events.clear()
        job = make_job(torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), rehearse=rehearse)
        losses = [step.loss for step in train(job, 3) if step.committed]
        assert ("rehearses" in agent.events) is rehearse
        return losses, trees.pack(copy.deepcopy(job.state.tree()))

    assert_same(trained(True), trained(False))


class Slices(torch.utils.data.Dataset[Any]):
    """Counts what is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.full((4,), float(index)), index % 2


@pytest.mark.usefixtures("agent")
def test_rehearsal_reads_real_samples_and_no_whole_step() -> None:
    job = make_job(rehearse=True, data=(data := Slices()))
    read: list[list[int]] = []

    def look(_step: Any) -> None:
        read.append(data.read[:])
        data.read.clear()

    train(job, in_step=look)
    plan = job.plan
    assert read[0] == torch.cat([plan.ids(0, v) for v in range(MICROBATCHES)]).tolist()
    assert read[1] == torch.cat([plan.ids(0, v) for v in range(plan.num_virtual)]).tolist()


@pytest.mark.usefixtures("agent")
def test_what_was_read_ahead_for_a_rehearsal_is_not_the_steps() -> None:
    """The share is the same, of the next step: what was read for that does for the first one only if it begins anew."""
    loader = torch.utils.data.DataLoader(Slices(), batch_size=4, num_workers=1)
    seen: list[list[float]] = []

    def look(step: Any) -> None:
        seen[-1] = [step.rehearsal, *seen[-1]]

    job = make_job(rehearse=True, data=loader, global_batch=8)
    with job:
        for step in job.steps(2):
            with step:
                seen.append([])
                for x, y in step.microbatches():
                    seen[-1] += x[:, 0].tolist()
                    step.backward(sum=job.model(x).sum(), weight=len(y))
                look(step)
                step.commit()
    assert job.plan.num_virtual == MICROBATCHES
    wants = [(True, 0), (False, 0), (False, 1)]
    assert seen == [[is_, *torch.cat([job.plan.ids(i, v) for v in range(2)]).tolist()] for is_, i in wants]


def test_error_in_the_block_is_the_scripts_own_and_the_process_never_was_ready(agent: Agent) -> None:
    def fails(_step: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(make_job(rehearse=True), in_step=fails)
    assert agent.events == ["rehearses"]


def test_block_without_commit_is_refused_in_the_rehearsal(agent: Agent) -> None:
    def forget(job: Job) -> None:
        with job:
            for step in job.steps(1):
                with step:
                    pass

    with pytest.raises(UsageError, match="step 0 ended without"):
        forget(make_job(rehearse=True))
    assert agent.events == ["rehearses"]


class Counter:
    """A metric that is a part of the state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]

    def add(self) -> None:
        self.value += 1


def change_model(job: Job) -> None:
    with torch.no_grad():
        next(job.model.parameters()).add_(1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(change_model, "the model", id="a parameter"),
        pytest.param(lambda job: job.optimizer.param_groups[0].update(lr=0.2), "the optimizer", id="a learning rate"),
        pytest.param(lambda job: job.state.extra["seen"].add(), r'state\["seen"\]', id="a metric"),
    ],
)
def test_block_that_changes_the_state_before_its_commit_is_refused(agent: Agent, change: Any, named: str) -> None:
    """A redo would change it twice, too."""
    job = make_job(rehearse=True, state={"seen": Counter()})
    with pytest.raises(UsageError, match=rf"The block of a step changes {named} outside step\.commit\(\)"):
        train(job, in_step=lambda _step: change(job))
    assert agent.events == ["rehearses"]


@pytest.mark.usefixtures("agent")
def test_what_changes_behind_the_commit_is_not_run() -> None:
    job = make_job(rehearse=True, state={"seen": Counter()})
    with job:
        for step in job.steps(2):
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).sum(), weight=4)
                step.commit()
                job.state.extra["seen"].add()
    assert job.state.extra["seen"].value == 2


def test_script_may_skip_the_rehearsal(agent: Agent) -> None:
    job = make_job(torch.nn.BatchNorm1d(8), rehearse=True)
    with job:
        for step in job.steps(1):
            if step.rehearsal:
                continue
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).sum(), weight=4)
                step.commit()
    assert agent.events == ["rehearses", "ready", "entered"]
    assert job.step == 1


def test_loop_that_breaks_in_the_rehearsal_ends_as_it_would_without(agent: Agent) -> None:
    job = make_job(rehearse=True)
    with job:
        for _ in job.steps(1):
            break
    assert agent.events == ["rehearses", "ready", "entered"]
    assert (job.outcome, job.step) == ("Complete", 0)


def test_collective_between_steps_is_of_one_rank_in_a_rehearsal(agent: Agent) -> None:
    job = make_job(rehearse=True)
    worlds = []
    with job:
        for step in job.steps(1):
            with step:
                for batch in step.microbatches():
                    step.backward(sum=job.model(batch.x).sum(), weight=4)
                step.commit()
            if step.rehearsal:
                for attempt in job.collective("eval"):
                    with attempt as team:
                        worlds.append((team.rank, team.world_size, team.all_reduce(torch.ones(1)).item()))
                assert agent.events == ["rehearses"], "it waits for nobody"
                assert job._blocks.num_left == 0
    assert worlds == [(0, 1, 1.0)]
    assert not job._blocks.rehearses
