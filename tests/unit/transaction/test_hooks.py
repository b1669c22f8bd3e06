"""What a commit's hooks may be: bound to what is in the state, and local."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

import regroup
from regroup.errors import UsageError
from regroup.state.training import TrainingState
from regroup.transaction.hooks import Hooks, refuse_collectives


class Trainer:
    """A script's own object: it has a scheduler, and a state."""

    def __init__(self, schedule: Any) -> None:
        self.parts = {"schedule": [schedule]}

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.parts["schedule"][0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts["schedule"][0].load_state_dict(state["schedule"])

    def on_step(self) -> None:
        self.parts["schedule"][0].step()


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, StepLR]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, StepLR(optimizer, 1)


def test_scheduler_in_no_state_is_refused_by_name() -> None:
    model, optimizer, schedule = parts()
    hooks = Hooks(TrainingState(model, optimizer, {}))
    for hook in (schedule.step, functools.partial(schedule.step), lambda: schedule.step()):
        with pytest.raises(UsageError, match=r'uses a StepLR .* state={"steplr": ...}'):
            hooks.check([hook])
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for update in (functools.partial(averaged.update_parameters, model), lambda: averaged.update_parameters(model)):
        with pytest.raises(UsageError, match="AveragedModel"):
            hooks.check([update])


def test_what_is_in_the_state_is_taken_wherever_it_is() -> None:
    model, optimizer, schedule = parts()
    outer = SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 1)], [5])
    trainer = Trainer(schedule)
    hooks = Hooks(TrainingState(model, optimizer, {"trainer": trainer, "outer": outer}))
    count: list[int] = []
    loss = torch.nn.CrossEntropyLoss()
    teacher = torch.nn.Linear(2, 2)
    around = torch.nn.Sequential(model)
    hooks.check(
        [
            schedule.step,
            trainer.on_step,
            lambda: schedule.step(),
            outer._schedulers[0].step,
            model[1].train,  # type: ignore[index]
            optimizer.zero_grad,
            functools.partial(count.append, 1),
            lambda: count.append(2),
            print,
            lambda: loss.reduction,
            lambda: teacher(torch.ones(2)),  # it is only read
            around.train,
            loss.train,
        ]
    )


def test_what_a_hook_is_given_is_not_kept() -> None:
    model, optimizer, _ = parts()
    hooks = Hooks(TrainingState(model, optimizer, {}))
    for _ in range(5):
        hooks.check([functools.partial(print, torch.ones(3), list(model.parameters()))])
    assert not hooks._good


class Group:
    is_applying = False


@pytest.mark.parametrize("watch", [True, False])
def test_our_own_collectives_know_that_a_commit_is_applied(watch: bool) -> None:
    group: Any = Group()
    with refuse_collectives(group, watch=watch):
        assert group.is_applying
    assert not group.is_applying
    with pytest.raises(ZeroDivisionError), refuse_collectives(group, watch=watch):
        raise ZeroDivisionError
    assert not group.is_applying


def alone() -> ProcessGroup:
    """Return torch's own group of one rank."""
    store = PrefixStore("test", HashStore())
    group = ProcessGroup(store, 0, 1)
    gloo = ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def test_collective_of_torchs_own_is_refused_in_a_commit() -> None:
    group = alone()
    tensor, model = torch.ones(2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2)).sum().backward()
    with refuse_collectives(None, watch=True):
        optimizer.step()
        with pytest.raises(UsageError, match=r"calls a collective \(allreduce_"):
            group.allreduce([tensor]).wait()
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]


class Counted:
    """A backend of torch.compile without a compiler, which counts its graphs and their calls."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:  # noqa: ARG002
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return graph.forward(*args)

        return run


def trained(backend: Any, compiles: str) -> list[torch.Tensor]:
    """Return the parameters after four steps of a session whose optimizer, or hook, is compiled."""
    torch.manual_seed(0)
    model, averaged = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))

    def follow() -> None:
        for mine, theirs in zip(averaged.parameters(), model.parameters()):
            mine.data.lerp_(theirs.data, 0.5)

    hook: Any = follow
    if compiles == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
    elif compiles == "hook":
        hook = torch.compile(follow, backend=backend)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    session = regroup.session(
        model=model, optimizer=optimizer, data=(x, x[:, :2]), global_batch=8, microbatch=8, state={"ema": averaged}
    )
    with session as job:
        for step in job.steps(4):
            with step:
                for batch in step.microbatches():
                    step.backward(sum=(model(batch.x) - batch.y).square().sum(), weight=len(batch.y))
                step.commit(after=[hook])
    return [*model.parameters(), *averaged.parameters()]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiles", ["optimizer", "hook"])
def test_what_a_commit_runs_stays_compiled(compiles: str) -> None:
    counted = Counted()
    compiled = trained(counted, compiles)
    assert (counted.num_calls, counted.num_graphs) == (4, 1), "the first commit is watched, the others are not"
    for mine, theirs in zip(compiled, trained(None, "nothing")):
        torch.testing.assert_close(mine, theirs)


def test_collective_in_a_compiled_hook_is_refused() -> None:
    group = alone()
    tensor = torch.ones(2)

    def communicate() -> None:
        group.allreduce([tensor])

    eager: Any = torch.compiler.disable(communicate)  # type: ignore[no-untyped-call]

    @torch.compile(backend=Counted())
    def hook() -> None:
        tensor.add_(1)
        eager()

    with pytest.raises(UsageError, match=r"calls a collective \(allreduce_"), refuse_collectives(None, watch=True):
        hook()


@pytest.mark.parametrize("name", ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"])
def test_optimizer_that_communicates_is_refused(name: str) -> None:
    model, optimizer, _ = parts()
    communicating = type(name, (type(optimizer),), {})(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=f"optimizer is a {name}, whose step"):
        TrainingState(model, communicating, {})


def test_optimizer_that_needs_a_closure_is_refused() -> None:
    model, optimizer, _ = parts()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UsageError, match=r"optimizer\[1\] is a LBFGS, whose step\(\) evaluates the loss again"):
        TrainingState(model, [optimizer, lbfgs], {})
    with pytest.raises(UsageError, match="empty list"):
        TrainingState(model, [], {})
    with pytest.raises(
        UsageError, match=r"optimizer\[1\] steps a parameter of shape \[2, 2\] that optimizer\[0\] steps, too"
    ):
        TrainingState(model, [optimizer, torch.optim.Adam(model.parameters())], {})
    with pytest.raises(UsageError, match=r"optimizer\[1\] steps a parameter"):
        TrainingState(model, [optimizer, optimizer], {})
