"""What an optimizer keeps is taken as it was saved: types, values, and the strides of its parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regroup.checkpoint import shards
from regroup.errors import UsageError
from regroup.state import optimizers
from regroup.state.optimizers import as_optimizer, load_exactly, step
from regroup.state.training import TrainingState


class Precise(torch.optim.Optimizer):
    """Momentum in float32, whatever the parameters are, with a nested state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["more"] = {"rows": [torch.zeros(3, dtype=torch.float64)], "name": "x", "none": None}
                state["momentum"].mul_(0.9).add_(parameter.grad.float() * 1.0001)
                state["more"]["rows"][0].add_(1 / 3)
                parameter.data.add_(state["momentum"].to(parameter.dtype), alpha=-group["lr"])


def trained(model: torch.nn.Module, optimizer: Any, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(drawn)
        optimizer.step()


def travelled(value: Any) -> Any:
    """Return a state as it comes from another rank or a file: its tensors contiguous copies."""
    if isinstance(value, dict):
        return {key: travelled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [travelled(one) for one in value]
    return value.detach().contiguous().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def test_joiner_goes_on_with_float32_moments_of_bfloat16_parameters() -> None:
    stays, joins = (torch.nn.Linear(5, 3, dtype=torch.bfloat16) for _ in range(2))
    stayed, joined = Precise(stays.parameters()), Precise(joins.parameters())
    trained(stays, stayed)
    joins.load_state_dict(stays.state_dict())
    load_exactly(joined, travelled(stayed.state_dict()))
    for ours, theirs in zip(joins.parameters(), stays.parameters()):
        assert joined.state[ours]["momentum"].dtype == torch.float32
        assert torch.equal(joined.state[ours]["momentum"], stayed.state[theirs]["momentum"])
        assert torch.equal(joined.state[ours]["more"]["rows"][0], stayed.state[theirs]["more"]["rows"][0])
    trained(stays, stayed)
    trained(joins, joined)
    assert all(torch.equal(a, b) for a, b in zip(joins.parameters(), stays.parameters()))


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "plain"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "of several"])
def test_moments_of_a_channels_last_parameter_have_its_strides(kind: dict[str, Any], several: bool) -> None:
    def build() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1, **kind)
        return model, as_optimizer([optimizer], model) if several else optimizer

    (stays, stayed), (joins, joined) = build(), build()
    trained(stays, stayed)
    joins.load_state_dict(stays.state_dict())
    load_exactly(joined, travelled(stayed.state_dict()))
    own = joined.optimizers[0] if several else joined
    weight = next(joins.parameters())
    assert own.state[weight]["exp_avg"].stride() == weight.stride()
    trained(stays, stayed)
    trained(joins, joined)
    assert all(torch.equal(a, b) for a, b in zip(joins.parameters(), stays.parameters()))


@pytest.mark.parametrize("kind", [{"fused": True}, {}], ids=["fused", "plain"])
def test_learning_rate_that_is_a_tensor_stays_the_scripts_own(kind: dict[str, Any]) -> None:
    def build() -> tuple[torch.nn.Module, Any, torch.Tensor]:
        torch.manual_seed(0)
        model, rate = torch.nn.Linear(5, 3), torch.tensor(0.1)
        return model, torch.optim.Adam(model.parameters(), lr=rate, **kind), rate

    (stays, stayed, rate), (joins, joined, own) = build(), build()
    rate.fill_(0.025)
    trained(stays, stayed)
    joins.load_state_dict(stays.state_dict())
    load_exactly(joined, travelled(stayed.state_dict()))
    assert joined.param_groups[0]["lr"] is own
    assert float(own) == float(rate)
    for one in (rate, own):
        one.mul_(0.5)  # the script's schedule
    trained(stays, stayed)
    trained(joins, joined)
    assert all(torch.equal(a, b) for a, b in zip(joins.parameters(), stays.parameters()))


class Offloaded(torch.optim.Optimizer):
    """Its momentum lies in host memory, wherever the parameters are, with a row of it in an order of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.randn(parameter.shape)
                self.state[parameter]["rows"] = torch.randn(4, 2).t()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_moments_stay_on_the_device_where_the_optimizer_keeps_them() -> None:
    """A parameter on another device, which needs no such device here."""
    ours, theirs = (Offloaded([torch.nn.Parameter(torch.empty(3, 2, device="meta"))]) for _ in range(2))
    load_exactly(theirs, travelled(ours.state_dict()))
    (mine,), (loaded,) = ours.state.values(), theirs.state.values()
    for name in ("momentum", "rows"):
        assert loaded[name].device.type == "cpu"
        assert loaded[name].stride() == mine[name].stride()
        assert torch.equal(loaded[name], mine[name])


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of a model group of two processes, of which this is the first; the other one does not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    shards.mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    yield shards.mesh
    shards.mesh = None
    torch.distributed.destroy_process_group()


def test_split_moments_keep_their_type(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    def build() -> tuple[torch.nn.Module, Precise]:
        model = torch.nn.Linear(4, 6, dtype=torch.bfloat16)
        for name, parameter in list(model.named_parameters()):
            split = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(model, name, torch.nn.Parameter(split))
        return model, Precise(model.parameters())

    (ours, stayed), (theirs, joined) = build(), build()
    for parameter in ours.parameters():
        stayed.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        shards.local_of(stayed.state[parameter]["momentum"]).normal_()
    load_exactly(joined, shards.joined(shards.apart(stayed.state_dict())))
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        kept, loaded = stayed.state[mine]["momentum"], joined.state[other]["momentum"]
        assert (loaded.dtype, loaded.placements) == (torch.float32, kept.placements)
        assert torch.equal(shards.local_of(loaded), shards.local_of(kept))


def test_optimizer_among_the_further_state_is_loaded_as_it_was_saved() -> None:
    def build() -> tuple[torch.nn.Module, Precise, TrainingState]:
        model = torch.nn.Linear(5, 3, dtype=torch.bfloat16)
        further = Precise(model.parameters())
        trained(model, further)
        return (
            model,
            further,
            TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {"further": further}, None),
        )

    (ours, further, state), (theirs, loaded, other) = build(), build()
    tree = {"model": ours.state_dict(), "optimizer": state.optimizer.state_dict()}
    other.load({**tree, "state": {"further": travelled(further.state_dict())}})
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert loaded.state[b]["momentum"].dtype == torch.float32
        assert torch.equal(loaded.state[b]["momentum"], further.state[a]["momentum"])


def test_sparse_adam_is_refused() -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    with pytest.raises(UsageError, match=r"SparseAdam, which takes sparse gradients only.*Adam"):
        as_optimizer(torch.optim.SparseAdam(model.parameters()), model)


# --- parameters of several meshes --------------------------------------------------------------------------------------


class Stepped(torch.optim.SGD):
    """Notes for each group how it is stepped."""

    def __init__(self, groups: Any, *, fails: bool = False) -> None:
        super().__init__(groups, lr=0.1)
        self.foreach: list[Any] = []
        self._fails = fails

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.foreach = [group["foreach"] for group in self.param_groups]
        if self._fails:
            raise RuntimeError("no memory")


def split_over(mesh: str | None) -> torch.nn.Parameter:
    """Return a parameter that is split over a mesh of this name; None: it is whole."""
    made = torch.nn.Parameter(torch.zeros(1))
    if mesh is not None:
        made.device_mesh = mesh  # type: ignore[attr-defined]
    return made


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "is_split", lambda one: hasattr(one, "device_mesh"))
    monkeypatch.setattr(shards, "mesh", "mesh")


MIXED = ["tensor", None]


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize(
    ("meshes", "settings", "want"),
    [
        pytest.param(MIXED, {}, False, id="some are whole"),
        pytest.param(["tensor", "shard"], {}, False, id="two meshes"),
        pytest.param(["shard", "shard"], {}, None, id="one mesh: together"),
        pytest.param([None, None], {}, None, id="all are whole: together"),
        pytest.param(MIXED, {"foreach": True}, True, id="the script has said how"),
        pytest.param(MIXED, {"foreach": False}, False, id="as it is done here"),
        pytest.param(MIXED, {"fused": True}, None, id="the script has said fused"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_parameters_of_several_meshes_are_stepped_one_by_one(
    meshes: list[str | None], settings: dict[str, Any], want: bool | None, fails: bool, number: int
) -> None:
    mixed = {"params": [split_over(mesh) for mesh in meshes], **settings}
    plain = {"params": [split_over(None)]}
    optimizer = Stepped([mixed, plain], fails=fails)
    model = torch.nn.Module()
    model.own = torch.nn.ParameterList([*mixed["params"], *plain["params"]])
    both: Any = optimizer if number == 1 else as_optimizer([optimizer], model)
    before = [dict(group) for group in optimizer.param_groups]
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            step(both) if number == 1 else both.step()
    else:
        step(both) if number == 1 else both.step()
    assert optimizer.foreach == [want, None]
    assert [dict(group) for group in optimizer.param_groups] == before, "the setting is the script's"


@pytest.mark.usefixtures("split")
def test_optimizer_that_knows_no_foreach_is_stepped_as_it_is() -> None:
    optimizer = Precise([split_over(mesh) for mesh in MIXED])
    step(optimizer)
    assert "foreach" not in optimizer.param_groups[0]
