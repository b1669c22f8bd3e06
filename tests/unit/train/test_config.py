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
from regroup.train.config import Config, ConfigError, Mesh, as_yaml, load, parse, sections

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "train.md").read_text()
SAMPLES = sorted((ROOT / "manifests" / "samples" / "train").glob("*.yaml"))
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
                ("compile", True, "true"),
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
    ],
    ids=["parameters split", "layers and parameters split", "nothing split"],
)
def test_what_goes_with_a_mesh_is_taken(change: dict[str, Any]) -> None:
    parse({**SMALL, **change})


def test_set_of_a_dimension_makes_the_mesh(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{task: digits, steps: 100, global_batch: 80, microbatch: 8}")
    changed = load(str(path), ["mesh.tensor=2", "mesh.shard=1"])
    assert changed.mesh is not None
    assert changed.mesh.sizes == {"tensor": 2}


def test_each_of_several_mistakes_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"task": "digits", "steps": -1, "global_batch": 8, "seeds": 3})
    assert str(caught.value).splitlines() == [
        "steps (-1) must be at least 1. Correct it.",
        "microbatch is missing. Add it: Samples in a forward pass. It divides `global_batch`, at least as often as there may be "
        "processes.",
        "seeds (3) is no field of the configuration. Did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        pytest.param("steps: [", [], "is no YAML in line 1", id="no YAML"),
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
    assert _rows("### mesh") == {field: _default(info) for field, info in Mesh.model_fields.items()}


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
