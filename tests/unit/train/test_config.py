"""The configuration of the loop: what it takes, and the sentence for each mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from regroup.train import command
from regroup.train.config import Config, ConfigError, as_yaml, load, parse, sections
from regroup.train.sections import Mesh, RateScaling

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "train.md").read_text()
SAMPLES = sorted((ROOT / "manifests" / "samples" / "train").glob("*.yaml"))
TINY = {"name": "language_model", "tied": False}
SMALL: dict[str, Any] = {"task": "digits", "steps": 100, "global_batch": 80, "microbatch": 8}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({"steps": 0}, "steps (0) must be at least 1. Correct it.", id="a bound"),
        pytest.param({"steps": "many"}, "steps ('many') must be a whole number. Correct it.", id="another type"),
        pytest.param({"steps": 1.5}, "steps (1.5) must be a whole number. Correct it.", id="a fraction of a step"),
        pytest.param({"steps": True}, "steps (True) must be a whole number. Correct it.", id="nothing is converted"),
        pytest.param(
            {"seed": 1 << 64},
            "seed (18446744073709551616) must be below 18446744073709551616. Correct it.",
            id="a seed that torch cannot take",
        ),
        pytest.param({"max_norm": float("inf")}, "max_norm (inf) must be a finite number. Correct it.", id="an infinite bound"),
        pytest.param(
            {"precision": "fp8"},
            "precision ('fp8') must be float32, bfloat16 or float16. Choose one of them.",
            id="no such choice",
        ),
        pytest.param(
            {"step": 3}, "step (3) is no field of the configuration. Did you mean steps?", id="a field misspelt"
        ),
        pytest.param(
            {"optimizer": {"name": "adamw", "momentum": 0.9}},
            "optimizer.momentum (0.9) is no field of the configuration of optimizer adamw. Choose from name, learning_rate, "
            "beta1, beta2, weight_decay, or remove it.",
            id="a field of another choice",
        ),
        pytest.param(
            {"optimizer": "lion"}, "optimizer.name ('lion') must be one of sgd, adamw. Choose one of them.", id="no optimizer"
        ),
        pytest.param(
            {"task": {"size": "tiny"}},
            "task has no name. Add one of digits, cnn, language_model, such as task: digits.",
            id="a section without name",
        ),
        pytest.param({"task": 5}, "task (5) must be a name, or a mapping of fields. Correct it.", id="a number as section"),
        pytest.param(
            {"task": {"name": "cnn", "width": 12}}, "task.width (12) must be a multiple of 8. Correct it.", id="a multiple"
        ),
        pytest.param(
            {"hook": "bf16", "reduction": "exact"},
            "hook ('bf16') rounds gradients, and reduction is exact. Leave one of them out.",
            id="rounded and exact",
        ),
        pytest.param(
            {"microbatch": 7},
            "global_batch (80) is not a multiple of microbatch (7). Write global_batch: 77, or a microbatch that divides it.",
            id="batches that do not fit",
        ),
        pytest.param(
            {"schedule": {"name": "cosine", "warmup_steps": 100}},
            "schedule.warmup_steps (100) must be less than steps (100). Lower it, or raise steps.",
            id="warm-up to the end",
        ),
        pytest.param(
            {"strategy": {"name": "diloco", "inner_steps": 11}},
            "strategy.inner_steps (11) is more than the microbatches of a step (global_batch / microbatch: 10). Lower it, or raise "
            "global_batch: it counts the samples of all inner steps.",
            id="more inner steps than microbatches",
        ),
        pytest.param(
            {"strategy": {"name": "parameter_server", "shares_per_version": 11}},
            "strategy.shares_per_version (11) is more than the microbatches of a batch (global_batch / microbatch: 10). Lower it, "
            "or raise global_batch.",
            id="more gradients in a version than microbatches",
        ),
        pytest.param(
            {"strategy": "parameter_server", "hook": "fp16"},
            "hook ('fp16') cannot be used with strategy parameter_server. Leave one of them out.",
            id="a parameter server and a hook",
        ),
        pytest.param(
            {"strategy": "local_sgd", "reduction": "exact"},
            "reduction (exact) cannot be used with strategy local_sgd. Choose another reduction.",
            id="an exact sum of steps of one's own",
        ),
        pytest.param(
            {"strategy": {"name": "data_parallel", "uneven": True}, "reduction": "exact"},
            "strategy.uneven cannot be used with reduction exact, whose bits must not depend on times. Leave one of them out.",
            id="exact shares that follow times",
        ),
        pytest.param(
            {"noise_scale": True, "strategy": "diloco"},
            "noise_scale cannot be measured with strategy diloco. Leave one of them out.",
            id="the noise of gradients that nobody sums",
        ),
        pytest.param(
            {"mesh": {"shards": 2}},
            "mesh.shards (2) is no field of the configuration of mesh. Did you mean shard?",
            id="a dimension misspelt",
        ),
        pytest.param({"mesh": {"shard": 0}}, "mesh.shard (0) must be at least 1. Correct it.", id="a mesh of nobody"),
        pytest.param({"mesh": 2}, "mesh (2) must be a mapping of fields, such as mesh: {shard: 2}. Correct it.", id="no mesh"),
        pytest.param(
            {"mesh": {"shard": 3}},
            "mesh.shard (3) does not divide the microbatches of a step (global_batch / microbatch: 10). Change one of them.",
            id="microbatches that a mesh does not share out",
        ),
        pytest.param(
            {"task": "cnn", "mesh": {"tensor": 2}},
            "mesh.tensor (2) cannot be used with task cnn, whose layers are not split. Use mesh.shard.",
            id="convolutions are not split",
        ),
        pytest.param(
            {"task": "language_model", "mesh": {"tensor": 3}},
            "mesh.tensor (3) does not divide the attention heads (4) of task language_model. Choose a size that divides it.",
            id="a part of a head",
        ),
        pytest.param(
            {"mesh": {"tensor": 3}},
            "mesh.tensor (3) does not divide task.width (128) of task digits. Choose a size that divides it.",
            id="a part of a feature",
        ),
        *[
            pytest.param(
                {"mesh": {"shard": 2, "tensor": 2}, field.partition(".")[0]: given, "tensorboard": "runs"},
                f"{field} ({said}) cannot be used with mesh (shard: 2, tensor: 2). Leave one of them out.",
                id=f"a mesh and {field} {said}",
            )
            for field, given, said in (
                ("strategy", "local_sgd", "local_sgd"),
                ("strategy", "diloco", "diloco"),
                ("strategy", "parameter_server", "parameter_server"),
                ("strategy.algorithm", {"name": "data_parallel", "algorithm": "ring"}, "ring"),
                ("hook", "fp16", "fp16"),
                ("reduction", "exact", "exact"),
                ("precision", "float16", "float16"),
                ("histograms_every", 5, "5"),
                ("noise_scale", True, "true"),
                ("strategy.uneven", {"name": "data_parallel", "uneven": True}, "true"),
            )
        ],
        pytest.param(
            {"mesh": {"shard": 2}, "global_batch": None, "batch_per_rank": 16},
            "batch_per_rank (16) cannot be used with mesh (shard: 2). Leave one of them out.",
            id="a mesh and a batch that follows the processes",
        ),
        *[
            pytest.param({"task": TINY, "compile": True, "mesh": {dim: 2}},
                         f"compile (true) cannot be used with mesh ({dim}: 2). Leave one of them out.", id=f"compiled {dim}")
            for dim in ("context", "expert")
        ],
        *[
            pytest.param(
                {"task": TINY, "mesh": dict.fromkeys(dims, 2)},
                f"mesh ({', '.join(f'{dim}: 2' for dim in dims)}) has dimensions that do not work together. Choose one, or shard "
                "with tensor, shard with context, tensor with context, shard with expert, shard with pipeline, tensor with "
                "pipeline.",
                id=" and ".join(dims),
            )
            for dims in (("context", "expert"), ("tensor", "expert"), ("pipeline", "context"), ("pipeline", "expert"),
                         ("shard", "tensor", "context"))
        ],
        pytest.param(
            {"task": {**TINY, "experts": 4}, "microbatch": 10, "mesh": {"shard": 2, "expert": 3}},
            "mesh.shard x mesh.expert (6) does not divide the microbatches of a step (global_batch / microbatch: 8). Change one of "
            "them.",
            id="microbatches that two dimensions do not share out",
        ),
        pytest.param(
            {"mesh": {"schedule": "gpipe"}},
            "mesh.schedule (gpipe) needs mesh.pipeline above 1. Add it, or remove schedule.",
            id="an order of nothing",
        ),
        pytest.param(
            {"mesh": {"tensor": 2, "reshard": False}},
            "mesh.reshard (false) needs mesh.shard above 1. Add it, or remove reshard.",
            id="parameters that are not split",
        ),
        pytest.param(
            {"task": "language_model", "mesh": {"tensor": 2, "attention": "ring"}},
            "mesh.attention (ring) needs mesh.context above 1. Add it, or remove attention.",
            id="a ring of one",
        ),
        pytest.param(
            {"mesh": {"pipeline": 2, "shard": 2, "reshard": False}},
            "mesh.reshard (false) cannot be used with mesh (pipeline: 2, shard: 2). Leave it out.",
            id="whole parameters in a pipeline",
        ),
        *[
            pytest.param(
                {"mesh": {"pipeline": 2, dim: 2, "schedule": "zero_bubble"}},
                f"mesh.schedule (zero_bubble) cannot be used with mesh (pipeline: 2, {dim}: 2). Choose gpipe, 1f1b or interleaved.",
                id=f"zero bubble and {dim}",
            )
            for dim in ("shard", "tensor")
        ],
        pytest.param(
            {"mesh": {"pipeline": 2, "schedule": "zero_bubble"}, "activation_checkpointing": "selective"},
            "activation_checkpointing (selective) cannot be used with mesh.schedule (zero_bubble), which cuts backward in two. "
            "Choose full, or another schedule.",
            id="what is kept for one backward",
        ),
        pytest.param(
            {"mesh": {"pipeline": 4}},
            "mesh.pipeline (4) with schedule 1f1b cuts the model into 4 parts, and task digits can be cut into 3 at most. Choose a "
            "smaller pipeline.",
            id="more stages than layers",
        ),
        pytest.param(
            {"task": "cnn", "mesh": {"pipeline": 3, "schedule": "interleaved"}},
            "mesh.pipeline (3) with schedule interleaved cuts the model into 6 parts, and task cnn can be cut into 4 at most. "
            "Choose a smaller pipeline.",
            id="two stages on each process",
        ),
        pytest.param(
            {"task": "language_model", "mesh": {"pipeline": 2}},
            "mesh.pipeline (2) cannot be used with task.tied (true): the first and the last process would share a parameter. Write "
            "tied: false.",
            id="a parameter of two stages",
        ),
        pytest.param(
            {"mesh": {"context": 2}},
            "mesh.context (2) cannot be used with task digits, whose samples are no sequences. Use mesh.shard.",
            id="no sequences",
        ),
        pytest.param(
            {"task": "language_model", "mesh": {"context": 3}},
            "mesh.context (3) does not divide the attention heads (4) of task language_model. Choose a size that divides it.",
            id="heads that are not shared out",
        ),
        pytest.param(
            {"task": "language_model", "mesh": {"context": 4, "tensor": 2}},
            "mesh.context x mesh.tensor (8) does not divide the attention heads (4) of task language_model. Choose a size that "
            "divides it.",
            id="heads that two dimensions do not share out",
        ),
        pytest.param(
            {"task": {"name": "language_model", "length": 30}, "mesh": {"context": 4}},
            "mesh.context (4) does not divide the tokens of a sample (task.length) (30) of task language_model. Choose a size that "
            "divides it.",
            id="a part of a token",
        ),
        pytest.param(
            {"task": {"name": "language_model", "length": 30}, "mesh": {"context": 4, "attention": "ring"}},
            "mesh.context (4) does not divide the tokens of a sample (task.length) (30) of task language_model. Choose a size that "
            "divides it.",
            id="a part of a token in a ring",
        ),
        pytest.param(
            {"task": {"name": "language_model", "length": 96}, "mesh": {"context": 3, "tensor": 3, "attention": "ring"}},
            "mesh.tensor (3) does not divide the attention heads (4) of task language_model. Choose a size that divides it.",
            id="heads of a ring that tensor does not share out",
        ),
        pytest.param(
            {"mesh": {"expert": 2}},
            "mesh.expert (2) cannot be used with task digits, which has no experts. Use mesh.shard.",
            id="no mixture",
        ),
        pytest.param(
            {"task": "language_model", "mesh": {"expert": 2}},
            "mesh.expert (2) needs task.experts. Write task: {name: language_model, experts: 4}.",
            id="no experts",
        ),
        pytest.param(
            {"task": {"name": "language_model", "experts": 3}, "mesh": {"expert": 2}},
            "mesh.expert (2) does not divide task.experts (3) of task language_model. Choose a size that divides it.",
            id="half an expert",
        ),
        *[
            pytest.param(
                {"task": {**TINY, "experts": 4}, "mesh": {dim: 2}},
                f"task.experts (4) cannot be used with mesh.{dim} (2). Use mesh.expert.",
                id=f"experts and {dim}",
            )
            for dim in ("tensor", "context", "pipeline")
        ],
        pytest.param(
            {"task": {"name": "language_model", "experts": 4}, "compile": True},
            "compile (true) cannot be used with task.experts (4). Leave one of them out.",
            id="compiled experts",
        ),
        pytest.param(
            {"task": {"name": "language_model", "experts": 2, "top_k": 3}},
            "task.top_k (3) is more than task.experts (2). Lower it.",
            id="more experts than there are",
        ),
        pytest.param(
            {"task": {"name": "language_model", "top_k": 2}},
            "task.top_k (2) needs task.experts. Add it, or remove top_k.",
            id="a choice of one",
        ),
        pytest.param(
            {"hook": "fp8"}, "hook.name ('fp8') must be one of fp16, bf16, powersgd. Choose one of them.", id="no hook"
        ),
        pytest.param(
            {"hook": {"name": "powersgd", "rank": 0}}, "hook.rank (0) must be at least 1. Correct it.", id="a rank of nothing"
        ),
        pytest.param(
            {"hook": {"name": "bf16", "rank": 2}},
            "hook.rank (2) is no field of the configuration of hook bf16. Choose from name, or remove it.",
            id="a rank of what is rounded",
        ),
        pytest.param(
            {"hook": "powersgd", "reduction": "exact"},
            "hook ('powersgd') approximates gradients, and reduction is exact. Leave one of them out.",
            id="approximated and exact",
        ),
        pytest.param(
            {"hook": "powersgd", "precision": "float16"},
            "hook ('powersgd') cannot be used with precision float16, whose scale changes between steps. Use bfloat16, or another "
            "hook.",
            id="a rest of another scale",
        ),
        pytest.param(
            {"hook": "powersgd", "noise_scale": True},
            "noise_scale cannot be measured with hook powersgd. Leave one of them out.",
            id="the noise of approximations",
        ),
        pytest.param(
            {"hook": "powersgd", "strategy": "local_sgd"},
            "hook ('powersgd') cannot be used with strategy local_sgd. Leave one of them out.",
            id="approximations that nobody sums",
        ),
        pytest.param(
            {"global_batch": None},
            "global_batch is missing. Add it: samples in a step over all processes; or batch_per_rank, for each process.",
            id="no batch",
        ),
        pytest.param(
            {"batch_per_rank": 16},
            "global_batch (80) cannot be used with batch_per_rank (16). Leave one of them out.",
            id="two batches",
        ),
        pytest.param(
            {"global_batch": None, "batch_per_rank": 20},
            "batch_per_rank (20) is not a multiple of microbatch (8). Write batch_per_rank: 16, or a microbatch that divides it.",
            id="a batch of a process that does not fit",
        ),
        pytest.param(
            {"rate_scaling": {"base_batch": 80}},
            "rate_scaling needs batch_per_rank, because global_batch never changes. Leave it out, or write batch_per_rank.",
            id="rates that follow nothing",
        ),
        pytest.param(
            {"global_batch": None, "batch_per_rank": 16, "rate_scaling": {"base_batch": 80, "rule": "square"}},
            "rate_scaling.rule ('square') must be linear or sqrt. Choose one of them.",
            id="no rule",
        ),
        pytest.param(
            {"rate_scaling": "linear"},
            "rate_scaling ('linear') must be a mapping of fields, such as rate_scaling: {base_batch: 2}. Correct it.",
            id="a rule alone",
        ),
        *[
            pytest.param(
                {"global_batch": None, "batch_per_rank": 16, field.partition(".")[0]: given},
                f"batch_per_rank (16) cannot be used with {field} ({said}). Write global_batch, or change {field}.",
                id=f"a batch that follows and {field} {said}",
            )
            for field, given, said in (
                ("strategy", {"name": "local_sgd", "inner_steps": 2}, "local_sgd"),
                ("strategy", {"name": "diloco", "inner_steps": 2}, "diloco"),
                ("strategy.uneven", {"name": "data_parallel", "uneven": True}, "true"),
                ("reduction", "exact", "exact"),
            )
        ],
        pytest.param(
            {"hook": "bf16", "strategy": {"name": "data_parallel", "algorithm": "ring"}},
            "strategy.algorithm ('ring') cannot be used with hook (bf16). Leave one of them out.",
            id="a ring of rounded gradients",
        ),
        pytest.param(
            {"reduction": "exact", "strategy": {"name": "data_parallel", "algorithm": "ring"}},
            "strategy.algorithm ('ring') cannot be used with reduction (exact). Leave one of them out.",
            id="a ring whose bits depend on the ranks",
        ),
        pytest.param(
            {"profile_at": 5},
            "profile_at (5) needs tensorboard. Add tensorboard: DIRECTORY, or remove profile_at.",
            id="a trace without a directory",
        ),
        pytest.param(
            {"tensorboard": "a\0b"},
            "tensorboard ('a\\x00b') must not have a NUL character: it is a path. Correct it.",
            id="no path",
        ),
        pytest.param(
            {"task": {**TINY, "text": "\0"}},
            "task.text ('\\x00') must not have a NUL character: it is a path. Correct it.",
            id="no path of a text",
        ),
    ],
)  # fmt: skip
def test_wrong_field_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**SMALL, **change})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": {"shard": 2}, "compile": True, "activation_checkpointing": "full", "precision": "bfloat16"},
        {"mesh": {"shard": 5, "tensor": 2}, "activation_checkpointing": "selective", "max_norm": 1.0},
        {"mesh": {"shard": 1}, "reduction": "exact", "task": "cnn"},
        {"mesh": {"pipeline": 3}, "task": "cnn"},
        {"mesh": {"shard": 2, "tensor": 2}, "compile": True},
        {"mesh": {"pipeline": 2}, "compile": True, "task": TINY},
        {"mesh": {"pipeline": 3, "schedule": "interleaved"}, "task": TINY},
        {"mesh": {"context": 2, "tensor": 2}, "task": TINY, "precision": "bfloat16"},
        {"mesh": {"context": 3, "tensor": 4, "attention": "ring"}, "task": {**TINY, "length": 96}},
        {"mesh": {"shard": 5, "expert": 2, "reshard": False}, "task": {**TINY, "experts": 4, "top_k": 4}},
    ],
    ids=[
        "parameters split",
        "layers and parameters split",
        "nothing split",
        "as many stages as there can be",
        "compiled layers that are split",
        "compiled stages",
        "two stages for each of three processes",
        "tokens and layers split",
        "tokens for which heads are not shared out",
        "experts and parameters split",
    ],
)
def test_what_goes_with_a_mesh_is_taken(change: dict[str, Any]) -> None:
    parse({**SMALL, **change})


def test_set_of_a_dimension_makes_the_mesh(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{task: digits, steps: 100, global_batch: 80, microbatch: 8}")
    changed = load(str(path), ["mesh.tensor=2", "mesh.shard=1"])
    assert changed.mesh is not None
    assert changed.mesh.sizes == {"tensor": 2}


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, 10),
        ({"global_batch": None, "batch_per_rank": 16}, None),
        ({"mesh": {"shard": 2}}, 10),
        ({"mesh": {"pipeline": 2}}, 20),
        ({"mesh": {"pipeline": 2, "shard": 5}}, 20),
        ({"mesh": {"context": 4}, "task": "language_model"}, 40),
    ],
)
def test_processes_that_a_step_has_work_for(change: dict[str, Any], want: int | None) -> None:
    assert parse({**SMALL, **change}).most_processes == want


def test_each_of_several_mistakes_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"task": "digits", "steps": -1, "global_batch": 8, "seeds": 3})
    assert str(caught.value).splitlines() == [
        "steps (-1) must be at least 1. Correct it.",
        "microbatch is missing. Add it: Samples in a forward pass. `global_batch` is a multiple of it, with at least one "
        "microbatch for each process.",
        "seeds (3) is no field of the configuration. Did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        pytest.param("steps: [", [], "is no YAML in line 1", id="no YAML"),
        pytest.param("steps: 2026-99-99", [], "has a value that cannot be read (month must be in 1..12). Correct", id="no date"),
        pytest.param("steps: !!int ''", [], "has a value that cannot be read (string index out of range)", id="no number"),
        pytest.param("steps: !!bool x", [], "has a value that cannot be read ('x')", id="neither true nor false"),
        pytest.param("steps: " + "1" * 5000, [], "has a value that cannot be read (Exceeds the limit", id="too many digits"),
        pytest.param("[" * 20_000, [], "has a value that cannot be read (maximum recursion depth exceeded", id="nested too deeply"),
        pytest.param("steps: 1", ["steps=2026-99-99"], "--set (steps=2026-99-99) has a value that cannot be read",
                     id="no date in a change"),
        pytest.param("steps: 1\nsteps: 2", [], "field steps comes twice. Correct it.", id="a field twice"),
        pytest.param("- steps", [], "is no mapping of fields to values", id="a list"),
        pytest.param("", [], "is no mapping of fields to values", id="an empty file"),
        pytest.param("steps: 1", ["steps"], "--set (steps) is not FIELD=VALUE.", id="a change without value"),
        pytest.param("steps: 1", ["steps.x=1"], "--set (steps.x=1) needs steps to have fields, and it is 1.", id="no section"),
    ],
)  # fmt: skip
def test_file_that_cannot_be_used_is_one_sentence(text: str, changes: list[str], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path), changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_set_of_a_section_that_the_file_leaves_out_keeps_its_default_choice(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{task: digits, steps: 100, global_batch: 80, microbatch: 8}")
    changed = load(str(path), ["schedule.warmup_steps=3", "optimizer.beta2=0.5"])
    assert (changed.schedule.name, changed.schedule.warmup_steps, changed.optimizer.name) == ("constant", 3, "adamw")


def test_set_changes_single_fields(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{task: digits, steps: 100, global_batch: 80, microbatch: 8, optimizer: sgd}")
    changed = load(
        str(path), ["steps=7", "optimizer.learning_rate=3e-4", "task.width=16", "max_norm=1", "schedule=linear"]
    )
    assert (changed.steps, changed.optimizer.name, changed.optimizer.learning_rate) == (7, "sgd", 3e-4)
    assert (changed.task.width, changed.max_norm, changed.schedule.name) == (16, 1.0, "linear")  # type: ignore[union-attr]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_printed_configuration_is_the_same_again(sample: Path, tmp_path: Path) -> None:
    config = load(str(sample))
    (tmp_path / "printed.yaml").write_text(as_yaml(config))
    assert load(str(tmp_path / "printed.yaml")) == config


def _rows(heading: str) -> dict[str, str]:
    """Return {field: default} of the table below a heading of the page."""
    section = re.split(r"^##+ ", PAGE.split(f"\n{heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "absent"
    value = getattr(field.default, "name", field.default)
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def test_page_has_every_field_with_its_default() -> None:
    assert _rows("## Fields") == {name: _default(field) for name, field in Config.model_fields.items()}
    for section, name, model in sections():
        fields = {field: _default(info) for field, info in model.model_fields.items() if field != "name"}
        assert _rows(f"### {section}: {name}") == fields
    for name, nameless in (("mesh", Mesh), ("rate_scaling", RateScaling)):
        assert _rows(f"### {name}") == {field: _default(info) for field, info in nameless.model_fields.items()}


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "regroup.train.config")
    # As where it is not installed, but for the name of the exception's class.
    monkeypatch.setitem(sys.modules, "yaml", None)
    error = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    with pytest.raises(ModuleNotFoundError) as caught:
        import regroup.train.config  # noqa: F401
    assert caught.value.name == error.name
    assert command.main(["config.yaml"]) == 2
    assert capsys.readouterr().err == (
        "regroup: regroup.train needs the package pyyaml, which is not installed. Install it.\n"
    )


def test_library_needs_none_of_the_loops_packages() -> None:
    """Only `regroup.train` imports them: a training image without them runs scripts as before."""
    code = (
        "import sys\nfor name in ('pydantic', 'yaml', 'sklearn'): sys.modules[name] = None\n"
        "import regroup; regroup.session; import regroup.train.command"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mistake_in_a_configuration_ends_with_2_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(SAMPLES[0]), "--set", "steps=none", "--set", "sed=1"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "regroup: steps ('none') must be a whole number. Correct it.\n"
        "regroup: sed (1) is no field of the configuration. Did you mean seed?\n"
    )
