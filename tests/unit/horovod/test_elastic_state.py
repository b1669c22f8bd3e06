"""TorchState: what a commit copies, what a restore brings back, and what travels to another rank."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regroup.horovod
from regroup.checkpoint import tree as trees
from regroup.errors import StateError
from regroup.horovod import world
from regroup.horovod.elastic import link
from regroup.horovod.elastic.member import Copy, order
from regroup.horovod.elastic.sampler import ElasticSampler
from regroup.horovod.elastic.state import ObjectState, TorchState


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that belongs to no job."""
    monkeypatch.setattr(link, "place", lambda: (0, 1))
    monkeypatch.setattr(link, "broadcast_object", lambda value: value)
    monkeypatch.setattr(link, "broadcast_parameters", lambda _: None)
    monkeypatch.setattr(link, "member", lambda: None)


def script(seed: int, kind: Any = torch.optim.Adam) -> TorchState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = kind(model.parameters(), lr=0.1)
    return TorchState(
        model,
        optimizer,
        sampler=ElasticSampler(range(32)),
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        epoch=0,
        history=[],
    )


def train(state: TorchState, steps: int = 3) -> None:
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.randn(8, 4)).sum().backward()
        state.optimizer.step()
        state.schedule.step()
        state.sampler.record_batch(0, 2)
        state.epoch += 1
        state.history.append(state.epoch)


def bits(state: TorchState) -> tuple[str, dict[str, list[Any]]]:
    structure, tensors = trees.pack(
        {
            "model": dict(state.model.state_dict()),
            "optimizer": state.optimizer.state_dict(),
            "schedule": state.schedule.state_dict(),
            "sampler": state.sampler.state_dict(),
            "rest": [state.epoch, list(state.history)],
        }
    )
    return structure, {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_restore_brings_back_the_last_commit_as_often_as_it_is_asked(kind: Any) -> None:
    state = script(1, kind)
    train(state)
    state.commit()
    committed = bits(state)
    for _ in range(2):  # a second one finds the copy as it was: training between them does not change it
        train(state)
        assert bits(state) != committed
        state.restore()
        assert bits(state) == committed


def test_copy_of_another_rank_is_that_ranks_state() -> None:
    here, joiner = script(1), script(2)
    train(here)
    here.commit()
    structure, tensors = trees.pack(here.tree())
    joiner.load(trees.unpack(structure, {name: tensor.clone() for name, tensor in tensors.items()}))
    assert bits(joiner) == bits(here)
    train(joiner)
    joiner.restore()
    assert bits(joiner) == bits(here)


def test_tree_is_that_of_the_commit_and_not_of_what_came_after() -> None:
    state = script(1)
    train(state)
    state.commit()
    before = trees.pack(state.tree())[1]
    kept = {name: tensor.clone() for name, tensor in before.items()}
    train(state)
    assert all(torch.equal(kept[name], tensor) for name, tensor in trees.pack(state.tree())[1].items())


def test_part_that_the_script_replaces_is_the_one_that_is_copied_from_then_on() -> None:
    state = script(1)
    state.model = torch.nn.Linear(2, 2)
    state.commit()
    torch.nn.init.zeros_(state.model.weight)
    state.restore()
    assert state.model.weight.abs().sum() > 0
    assert set(state.tree()["parts"]["model"]) == {"weight", "bias"}


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None])
def test_value_that_cannot_travel_is_refused_by_name(value: object) -> None:
    with pytest.raises(StateError, match=r"^The state of hvd.elastic cannot be sent to other ranks: what is a "):
        ObjectState(what=value)


def test_copy_with_other_parts_is_refused() -> None:
    state, other = script(1), TorchState(torch.nn.Linear(1, 1), epoch=3)
    with pytest.raises(StateError, match="Run one script in all workers"):
        state.load(other.tree())


def test_reset_deals_the_samples_anew_before_the_callbacks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    state, seen = script(1), list[Any]()
    state.register_reset_callbacks([lambda: seen.append(len(state.sampler)), lambda: seen.append("second")])
    monkeypatch.setattr(link, "place", lambda: (1, 4))
    state.on_reset()
    assert seen == [8, "second"]


@pytest.mark.parametrize(("rank", "want"), [(0, 1), (1, 0)])
def test_rank_0_says_that_a_script_with_fixed_ranks_is_not_elastic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, want: int
) -> None:
    monkeypatch.setenv("REGROUP_SOCKET", "/nowhere")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(world, "rank", lambda: rank)
    assert regroup.horovod.elastic.run(lambda state: state.epoch)(ObjectState(epoch=3)) == 3
    assert capsys.readouterr().out.count("Call hvd.elastic.run in that script") == want


def test_scripts_find_states_and_sampler_by_horovods_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(regroup.horovod.__file__).with_name("as_horovod")))
    try:
        assert importlib.import_module("horovod.torch.elastic.state").TorchState is TorchState
        assert importlib.import_module("horovod.torch.elastic.sampler").ElasticSampler is ElasticSampler
        assert importlib.import_module("horovod.torch").elastic.run is regroup.horovod.elastic.run
    finally:
        for name in [each for each in sys.modules if each.split(".")[0] == "horovod"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("held", "want"),
    [
        pytest.param([True, True], [0, 1], id="all held it"),
        pytest.param([False, True, True], [1, 2, 0], id="a new process took slot 0: it is the last rank"),
        pytest.param([True, False, True, False], [0, 2, 1, 3], id="holders first, each part in its order"),
        pytest.param([False, False], [0, 1], id="nobody did"),
    ],
)
def test_holders_of_the_state_have_the_low_ranks(held: list[bool], want: list[int]) -> None:
    assert order(held) == want


def test_copy_of_another_process_is_given_to_the_scripts_objects_once() -> None:
    """It may be in a snapshot that this process began with. Then the process holds the newest state, and its objects do not."""
    source, target = script(1), script(2)
    train(source)
    source.save()
    copy = Copy()
    copy.load_state_dict({"tree": source.tree(), "returned": False})
    copy.give(target)
    assert bits(target) == bits(source)
    train(target, 1)
    later = bits(target)
    copy.give(target)
    assert bits(target) == later
