"""What a configuration makes of a model: equal gradients however blocks run, rates by step, GPT-2 by its number of parameters."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from regroup import strategies
from regroup.checkpoint.shards import is_split
from regroup.data import SamplePlan
from regroup.generation.groups import Groups
from regroup.parallel import ddp
from regroup.parallel.strategy import Share
from regroup.train import build, config, passes, sections, tasks
from regroup.train.tasks.language_model import GPT, GPT2, TINY, Shape
from tests.long import only_long

SHAPE = Shape(layers=2, heads=2, width=16, length=8, vocabulary=32)
PRECISIONS = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}
"""With the largest difference of a gradient, relative to the gradient's norm in float32."""


def _gradients(model: GPT, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(x[:, :-1], x[:, 1:])
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _blocks() -> list[Any]:
    """Return precision, what is recomputed, and whether blocks are compiled, which takes seconds: each precision once."""
    compiled = {("float32", "none"), ("bfloat16", "full"), ("float16", "selective")}
    return [
        pytest.param(*one, marks=only_long("each is compiled once") if one[2] and one[:2] not in compiled else ())
        for one in product(PRECISIONS, ["none", "full", "selective"], [False, True])
    ]


@pytest.mark.parametrize(("precision", "recompute", "compiles"), _blocks())
def test_gradients_are_the_same_however_blocks_run(model: GPT, precision: str, recompute: str, compiles: bool) -> None:
    wanted = _gradients(model, torch.float32)
    changed = copy.deepcopy(model)
    build.prepare_blocks(changed.blocks, recompute, compiles, backend="aot_eager")
    if compiles:
        build.prepare_loss(changed, backend="aot_eager")
    counters.clear()
    with warnings.catch_warnings():
        # torch.compile looks at its input's.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        got = _gradients(changed, build.DTYPES[precision])
    graphs = 2 if compiles else 0
    assert counters["stats"]["unique_graphs"] == graphs, (
        "the blocks have one graph, the output layer with the loss another"
    )
    assert not counters["graph_break"]
    assert (got - wanted).norm() <= PRECISIONS[precision] * wanted.norm()
    assert changed.state_dict().keys() == model.state_dict().keys()
    if precision != "float32":
        assert not torch.equal(got, wanted), "it ran in float32"


def test_block_that_comes_twice_runs_twice() -> None:
    shared = torch.nn.Linear(4, 4)
    row, x = tasks.task.Chain({}, [shared, shared], {"out": torch.nn.Linear(4, 2)}), torch.ones(3, 4)
    assert torch.equal(row(x), torch.nn.Sequential(*row)(x))


def test_loss_of_a_row_is_that_of_its_scores(model: GPT) -> None:
    x = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))
    wanted = cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert torch.equal(model(x[:, :-1], x[:, 1:]), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo's own
@pytest.mark.parametrize(
    ("tied", "compiles"), [(True, False), (False, False), (True, True)], ids=["tied", "its own", "tied, compiled"]
)
@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_aligned_product_trains_the_same_parameters(precision: str, bound: float, compiles: bool, tied: bool) -> None:
    torch.manual_seed(0)
    model = GPT(replace(SHAPE, vocabulary=33, tied=tied))
    x = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))
    wanted_scores, wanted = model(x[:, :-1]), _gradients(model, build.DTYPES[precision])
    aligned = copy.deepcopy(model)
    aligned.align(64)
    if compiles:
        build.prepare_loss(aligned, backend="aot_eager")
    got = _gradients(aligned, build.DTYPES[precision])
    assert got.shape == wanted.shape
    assert (got - wanted).norm() <= bound * wanted.norm()
    assert torch.allclose(aligned(x[:, :-1]), wanted_scores, atol=1e-6), (
        "scores are those of the model's own vocabulary"
    )
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in aligned.state_dict().items()} == shapes


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers of columns of the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.columns.add(out.shape[-1])
        return out


@pytest.mark.parametrize(("device", "columns"), [("cpu", {33}), ("cuda", {64})])
def test_compiled_product_is_aligned_on_a_gpu(device: str, columns: set[int]) -> None:
    with FakeTensorMode(), torch.device(device):
        model = GPT(replace(SHAPE, vocabulary=33))
        build.prepare_loss(model, backend="eager")
        x = torch.zeros(3, 8, dtype=torch.int64)
        with _Products() as products, torch.compiler.set_stance("force_eager"), torch.no_grad():
            scores = model(x)
    assert products.columns == columns
    assert scores.shape == (3, 8, 33)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo's own
def test_no_change_of_ranks_or_microbatches_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner has rehearsed two microbatches alone; the steps that follow have other shares, other ranks and evaluations."""
    monkeypatch.setattr(ddp, "PARCEL_BYTES", 0)
    torch.manual_seed(0)
    model = GPT(SHAPE)
    build.prepare_blocks(model.blocks, "none", compiles=True, backend="aot_eager")
    build.prepare_loss(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    strategy = ddp.DataParallel(model, optimizer, SamplePlan(0, 64, 12, 3, 4))
    x = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))

    def run(ranks: int, microbatches: int) -> None:
        strategy.begin_generation(cast(Groups, _Ranks(ranks)))
        strategy.begin_step()
        for v in range(microbatches):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x[:, :-1], x[:, 1:])
            strategy.backward(loss, torch.full_like(loss, 1 / microbatches), last=v == microbatches - 1)
        strategy._launch(Share(0))
        optimizer.step()

    counters.clear()
    run(1, 2)
    assert counters["stats"]["unique_graphs"] == 2
    for ranks, microbatches in ((2, 2), (4, 1), (3, 4), (1, 4)):
        run(ranks, microbatches)
    with passes.evaluating(model, is_compiled=True):
        model(x[:2, :-1])
    run(2, 1)
    assert counters["stats"]["unique_graphs"] == 2


class _Ranks:
    """Groups, as far as sending goes: what is sent is not waited for."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def launch(self, *_: Any, **__: Any) -> None: ...


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "products", "rest"), [("none", 1, 1), ("full", 2, 2), ("selective", 1, 2)])
def test_what_backward_computes_again(model: GPT, recompute: str, products: int, rest: int) -> None:
    changed = copy.deepcopy(model)
    build.prepare_blocks(changed.blocks, recompute, compiles=False)
    with _Count() as count:
        _gradients(changed, torch.float32)
    # The last product of a block is not computed again: nothing needs it.
    last = SHAPE.layers if recompute == "full" else 0
    assert count.calls["addmm"] == products * 4 * SHAPE.layers - last
    assert count.calls["_scaled_dot_product_flash_attention_for_cpu"] == products * SHAPE.layers
    assert count.calls["gelu"] == rest * SHAPE.layers


def test_gpt2_has_its_parameters() -> None:
    with torch.device("meta"):
        model = GPT(GPT2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert sum(parameter.numel() for parameter in GPT(TINY).parameters()) == 842_496


def test_a_prediction_does_not_see_what_follows(model: GPT) -> None:
    x = torch.randint(32, (1, 8), generator=torch.Generator().manual_seed(2))
    later = x.clone()
    later[0, 5:] = (later[0, 5:] + 1) % 32
    before, after = model(x), model(later)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


CONSTANT = sections.Constant(name="constant", warmup_steps=3)
COSINE = sections.Decay(name="cosine", warmup_steps=0, final_fraction=0.1)
LINEAR = sections.Decay(name="linear", warmup_steps=1, final_fraction=0.0)


@pytest.mark.parametrize(
    ("schedule", "step", "want"),
    [
        pytest.param(CONSTANT, 0, 0.25, id="the first step of warm-up trains"),
        pytest.param(CONSTANT, 2, 0.75, id="the last step of warm-up"),
        pytest.param(CONSTANT, 3, 1.0, id="after warm-up"),
        pytest.param(CONSTANT, 10, 1.0, id="it stays"),
        pytest.param(COSINE, 0, 1.0, id="no warm-up"),
        pytest.param(COSINE, 5, 0.55, id="half a cosine is half way"),
        pytest.param(COSINE, 10, 0.1, id="the last step has the final rate"),
        pytest.param(COSINE, 99, 0.1, id="and what comes after it"),
        pytest.param(LINEAR, 0, 0.5, id="warm-up before a decay"),
        pytest.param(LINEAR, 1, 1.0, id="the highest rate"),
        pytest.param(LINEAR, 4, 2 / 3, id="a third of the line"),
        pytest.param(LINEAR, 10, 0.0, id="the end of the line"),
    ],
)
def test_rate_of_a_step(schedule: sections.Constant | sections.Decay, step: int, want: float) -> None:
    assert build.rate_factor(schedule, step, 11) == pytest.approx(want)


def test_weight_decay_is_for_weights(model: GPT) -> None:
    optimizer = build.optimizer_of(sections.AdamW(name="adamw", weight_decay=0.3), model)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decays.pop(id(parameter)) for name, parameter in model.named_parameters()}
    assert decays == {}
    assert {name for name, decay in named.items() if not decay} == {
        name for name in named if name.endswith("bias") or "norm" in name
    }
    assert optimizer.defaults["fused"]


def test_device_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build.device_of("auto") == build.device_of("cpu") == torch.device("cpu")
    with pytest.raises(config.ConfigError, match="needs a GPU, and torch sees none"):
        build.device_of("cuda")


def test_process_without_a_gpu_of_its_own_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(config.ConfigError, match="LOCAL_RANK is 1, and this worker sees 1 GPU: each process needs one"):
        build.device_of("auto")


@pytest.mark.parametrize(("device", "wanted"), [("cpu", "a C\\+\\+ compiler"), ("cuda", "a C compiler")])
def test_missing_compiler_is_one_sentence(
    device: str, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        config.ConfigError, match=rf"compile \(true\) needs {wanted} .* Install one, or write compile: false"
    ):
        build.check_compiler(torch.device(device))
    for name in ("g++", "clang"):
        (tmp_path / name).touch(mode=0o755)
    build.check_compiler(torch.device(device))


def test_uneven_shares_are_asked_for() -> None:
    small = {"task": "digits", "steps": 100, "global_batch": 80, "microbatch": 8}
    asked = config.parse({**small, "strategy": {"name": "data_parallel", "uneven": True}})
    assert build.strategy_of(asked) == strategies.DataParallel(uneven=True)
    assert build.strategy_of(config.parse(small)) == strategies.DataParallel()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (None, None),
        ("bf16", "bf16"),
        ({"name": "powersgd", "rank": 3, "start_step": 5, "min_compression": 4.0}, strategies.PowerSGD(3, 5, 4.0)),
    ],
)
def test_hook_is_asked_for(given: Any, want: Any) -> None:
    small = {"task": "digits", "steps": 100, "global_batch": 80, "microbatch": 8}
    assert build.strategy_of(config.parse({**small, "hook": given})) == strategies.DataParallel(hook=want)


def test_rates_that_follow_the_batch_are_asked_for() -> None:
    small = {"task": "digits", "steps": 100, "batch_per_rank": 80, "microbatch": 8}
    assert build.rate_scaling_of(config.parse(small).rate_scaling) is None
    asked = config.parse({**small, "rate_scaling": {"base_batch": 80, "rule": "sqrt", "warmup_steps": 7}})
    assert build.rate_scaling_of(asked.rate_scaling) == strategies.RateScaling(80, "sqrt", 7)


@pytest.fixture
def mesh_of_one() -> Iterator[Callable[[str], Any]]:
    """Make a mesh of one process, by the name of its dimension."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield lambda name: init_device_mesh("cpu", (1,), mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("is_row", [True, False])
def test_parameters_are_split_again_after_forward_or_stay_whole(
    mesh_of_one: Callable[[str], Any], reshard: bool, is_row: bool
) -> None:
    model = GPT(SHAPE if not is_row else replace(SHAPE, tied=False))
    build.split_parameters(model, mesh_of_one("shard"), reshard=reshard, is_row=is_row)
    assert all(is_split(parameter) for parameter in model.parameters())
    model(torch.zeros(1, 8, dtype=torch.int64))
    for block in model.blocks:
        assert all(is_split(parameter) == reshard for parameter in block.parameters())


def test_experts_are_split_after_they_were_drawn(mesh_of_one: Callable[[str], Any]) -> None:
    shape = replace(SHAPE, experts=4, top_k=2)
    torch.manual_seed(0)
    whole = GPT(shape)
    torch.manual_seed(0)
    split = GPT(shape)
    build.split_experts(split, mesh_of_one("expert"))
    names = {name for name, parameter in split.named_parameters() if is_split(parameter)}
    assert names == {f"block{block}.experts.{name}" for block in range(2) for name in ("up", "down")}
    for wanted, parameter in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor() if is_split(parameter) else parameter, wanted)  # type: ignore[attr-defined]


def _asked_of_a_pipeline(precision: str) -> config.Config:
    return config.parse(
        {
            "task": {"name": "language_model", "tied": False},
            "steps": 100,
            "global_batch": 80,
            "microbatch": 8,
            "mesh": {"pipeline": 2},
            "precision": precision,
        }
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_module_of_a_pipeline_computes_in_the_precision(precision: str) -> None:
    model = build.cut(GPT(replace(SHAPE, tied=False)), _asked_of_a_pipeline(precision))
    assert model(torch.zeros(1, 8, dtype=torch.int64)).dtype == build.DTYPES[precision]


def test_precision_of_a_pipeline_is_that_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, torch.dtype]] = []

    def autocast(device_type: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
        asked.append((device_type, dtype))
        return contextlib.nullcontext()

    monkeypatch.setattr(torch, "autocast", autocast)
    with FakeTensorMode(), torch.device("cuda"):
        model = build.cut(GPT(replace(SHAPE, tied=False)), _asked_of_a_pipeline("bfloat16"))
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert asked == [("cuda", torch.bfloat16)] * len(model._modules)


def test_layers_of_a_shape_are_what_refusals_count() -> None:
    for size, shape in (("tiny", TINY), ("gpt2", GPT2)):
        task = sections.LanguageModel(name="language_model", size=size)  # type: ignore[arg-type]
        with torch.device("meta"):
            row = GPT(replace(shape, tied=False))
        assert (len(row), shape.heads) == (task.parts, task.heads)
    for small in (sections.Digits(name="digits"), sections.Cnn(name="cnn")):
        heavy = [module for module in tasks.build(small).model if next(module.parameters(), None) is not None]
        assert len(heavy) == small.parts
