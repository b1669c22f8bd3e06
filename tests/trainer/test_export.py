"""Models that were trained in any split are exported as one safetensors file, and the plain model takes it bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from regroup.protocol import env
from regroup_cli.__main__ import main
from tests.long import only_long
from tests.trainer import replay
from tests.trainer.agent_double import AgentDouble
from tests.trainer.split_kit import SCRIPT, SplitJob
from tests.trainer.split_models import Model
from tests.trainer.test_context_and_experts import SCRIPT as SEQUENCES
from tests.trainer.test_parameter_server import end, launch
from tests.trainer.zygote import Zygote

STEPS = "6"
Train = Callable[..., "dict[str, dict[str, torch.Tensor]]"]


@pytest.fixture
def train(tmp_path: Path, zygote: Zygote) -> Iterator[Train]:
    """Train a job with checkpoints in "saved" to its end, and return its state by parameter. It is ended after the test."""
    jobs: list[SplitJob] = []

    def trained(mesh: str, ranks: int, script: Path = SCRIPT, **environment: str) -> dict[str, dict[str, torch.Tensor]]:
        values = {env.CHECKPOINT_DIR: str(tmp_path / "saved"), env.CHECKPOINT_EVERY_SECONDS: "0", **environment}
        job = SplitJob(tmp_path, zygote, mesh, script, TEST_STEPS=STEPS, TEST_PACE="0", **values)
        jobs.append(job)
        job.start(range(ranks))
        job.agents.announce(range(ranks))
        return job.finish(range(ranks))[1]

    yield trained
    for one in jobs:
        one.close()


def exported(directory: Path, *options: str) -> dict[str, torch.Tensor]:
    """Export the checkpoint of the last step, and return the tensors of the file."""
    file = directory / "model.safetensors"
    assert main(["checkpoint", "export", str(directory / "saved"), "--to", str(file), *options]) == 0
    return load_file(file)


@pytest.mark.parametrize(
    ("mesh", "ranks", "words"),
    [
        ("", 1, "bf16"),
        ("", 2, "tied batchnorm"),
        ("shard=2", 2, "uneven bf16"),
        ("tensor=2", 2, ""),
        ("pipeline=2", 2, ""),
        ("tensor=2 pipeline=2", 4, ""),
        *(
            pytest.param(*one, marks=only_long("each dimension is in a row above"))
            for one in (("shard=2", 4, "tied"), ("shard=2 tensor=2", 4, ""), ("pipeline=2 shard=2", 4, "bf16"))
        ),
    ],
)
def test_the_plain_model_takes_the_file_bit_by_bit(
    train: Train, tmp_path: Path, mesh: str, ranks: int, words: str
) -> None:
    whole = train(mesh, ranks, TEST_MODEL=words)
    model = Model(frozenset(words.split()))
    model.load_state_dict(exported(tmp_path))
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == whole.keys()
    for name, held in whole.items():
        theirs = held.get("parameter", held.get("buffer"))
        assert theirs is not None
        assert theirs.dtype == ours[name].dtype
        assert torch.equal(theirs, ours[name]), name


@pytest.mark.parametrize(
    ("mesh", "asked"), [("expert=2", {"TEST_EXPERTS": "4"}), ("context=2", {}), ("shard=2 context=2", {})]
)
def test_experts_and_long_sequences(train: Train, tmp_path: Path, mesh: str, asked: dict[str, str]) -> None:
    whole = train(mesh, 4 if " " in mesh else 2, SEQUENCES, **asked)
    tensors = exported(tmp_path)
    assert tensors.keys() == whole.keys()
    assert [name for name, held in whole.items() if not torch.equal(held["parameter"], tensors[name])] == []


@pytest.mark.parametrize("mesh", ["", "shard=2", "pipeline=2"])
def test_the_optimizers_state_is_by_the_parameters_names(train: Train, tmp_path: Path, mesh: str) -> None:
    whole = train(mesh, 2)
    file = tmp_path / "optimizer.safetensors"
    exported(tmp_path, "--optimizer", str(file))
    tensors = load_file(file)
    for name, held in whole.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(tensors[f"state.{name}.{key}"], held[key]), (name, key)
    with safe_open(file, "pt") as opened:
        described = json.loads(opened.metadata()["optimizer"])
    model = Model(frozenset())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(numbered(described, tensors))
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], whole[name]["exp_avg"]), name


def numbered(described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state_dict of an optimizer from an exported file. docs/tutorials/load-your-model.md says what is in it."""
    names = [name for group in described["param_groups"] for name in group["params"]]
    state = {
        names.index(name): {
            key: tensors[one["tensor"]] if isinstance(one, dict) else one for key, one in entries.items()
        }
        for name, entries in described["state"].items()
    }
    groups = [
        {**group, "params": [names.index(name) for name in group["params"]]} for group in described["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def test_the_state_of_a_parameter_server(tmp_path: Path, zygote: Zygote) -> None:
    saved = {env.CHECKPOINT_DIR: str(tmp_path / "saved"), env.CHECKPOINT_EVERY_SECONDS: "0.2"}
    job = AgentDouble(tmp_path, zygote, Path(__file__).parent / "served_job.py", {"TEST_STEPS": "20", "TEST_PACE": "0"})
    try:
        for slot in range(3):
            launch(job, slot, "none:none:1", **saved)
        job.wait_attached(*range(3))
        job.announce(range(3))
        ends = end(job, [0, 1, 2])
    finally:
        job.close()
    model, _, _ = replay.make()
    model.load_state_dict(exported(tmp_path, "--step", "20"))
    assert replay.hash_of(model) == ends[0]["parameters"]
