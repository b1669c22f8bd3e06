"""Sample configurations whose strategy needs several processes: each learns what one process does that has all of the model."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.polling import until
from regroup.protocol import env, local
from regroup.protocol.document import CheckpointRef
from regroup.train.config import load
from tests.long import LONG, only_long
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "train_job.py"
SAMPLES = Path(__file__).parents[2] / "manifests" / "samples" / "train"
STEPS = 3


def compiled_in(directory: Path) -> dict[str, str]:
    """Return the environment in which torch.compile keeps what it has compiled there."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled")}


class TrainJob:
    """Workers of one process each that run a sample, shortened."""

    def __init__(self, directory: Path, zygote: Zygote, sample: str, *changes: str, **environment: str) -> None:
        path = SAMPLES / f"{sample}.yaml"
        config = load(str(path))
        directory.mkdir()
        text = directory / "text"
        text.write_text(SCRIPT.read_text() * 20)
        common = [f"steps={STEPS}", "print_every=1", "schedule.warmup_steps=0"]
        if config.task.name == "language_model":
            common += [f"task.text={text}", "task.length=16"]
            if config.global_batch != config.microbatch:  # one of a single microbatch is about that
                common += ["microbatch=2", "global_batch=8"]
        self.arguments = [str(path), *(word for one in (*common, *changes) for word in ("--set", one))]
        self.config = load(str(path), [*common, *changes])
        self.size = math.prod(self.config.mesh.sizes.values()) if self.config.mesh is not None else 1
        self.ranks = 1
        values = {"TEST_ARGUMENTS": "\n".join(self.arguments), **compiled_in(directory.parent), **environment}
        self.agents = AgentDouble(directory, zygote, SCRIPT, values)

    def place(self, slot: int) -> dict[str, str]:
        """Return the environment of a worker's process."""
        most = {env.MAX_WORLD_SIZE: str(self.ranks)}
        if self.size == 1:
            return most
        place, together = str(slot % self.size), str(self.size)
        return {**most, env.GROUP_PLACE: place, env.WORKERS_PER_GROUP: together, env.LOCAL_WORLD_SIZE: "1"}

    def start(self, ranks: int) -> None:
        self.ranks = ranks
        for slot in range(ranks):
            self.agents.start(slot, **self.place(slot))
        self.agents.wait_attached(*range(ranks))
        self.agents.announce(range(ranks))

    def finish(self, ranks: int) -> str:
        """Wait for the end and return what rank 0 has written."""
        self.agents.wait_finished(*range(ranks))
        self.agents.finish()
        self.agents.wait_exit(*range(ranks))
        return self.agents.workers[0].log


@pytest.fixture
def make(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[..., TrainJob]]:
    jobs: list[TrainJob] = []

    def made(sample: str, *changes: str, **environment: str) -> TrainJob:
        jobs.append(TrainJob(tmp_path / str(len(jobs)), zygote, sample, *changes, **environment))
        return jobs[-1]

    yield made
    for one in jobs:
        one.agents.close()


def _losses(output: str, ranks: int | str) -> list[float]:
    found = re.findall(rf"^step (\d+)  loss (\d+\.\d+) .*generation \d+  ranks {ranks}$", output, re.MULTILINE)
    return [float(loss) for _, loss in found] + [float(x) for x in re.findall(r"held-out loss (\d+\.\d+)", output)]


def _hash(output: str) -> str:
    found = re.search(r"^parameters sha256 (\w{64})$", output, re.MULTILINE)
    assert found, output
    return found[1]


def _row(sample: str, ranks: int, changes: str, without: str, tolerance: float, *, long: bool = True) -> Any:
    """Return a row of the test below. `changes`, `without`: of the sample, and of one process beside it; words."""
    marks = [only_long("other rows have nearly all of it")] if long else []
    return pytest.param(sample, ranks, changes, without, tolerance, id=f"{sample} {changes}".strip(), marks=marks)


BATCH_OF_TWO = "batch_per_rank=null rate_scaling=null global_batch=80 optimizer.learning_rate=0.1"
AGAIN = "precision=bfloat16 activation_checkpointing=selective"
SAME_BITS = {"pipeline-gpipe"}
"""Samples in which one model group adds everything up in the order in which one process does."""


@pytest.mark.parametrize(
    ("sample", "ranks", "changes", "without", "tolerance"),
    [
        _row("hook-fp16", 2, "", "hook=null", 5e-4, long=False),
        _row("hook-bf16", 2, "", "hook=null", 2e-3, long=False),
        _row("ring", 3, "", "strategy=data_parallel", 2e-4, long=False),
        _row("uneven", 2, "", "strategy=data_parallel", 2e-4, long=False),
        _row("batch-per-rank", 2, "rate_scaling.warmup_steps=0", BATCH_OF_TWO, 2e-4, long=False),
        _row("fsdp", 4, "", "mesh=null", 2e-4, long=False),
        _row("zero1", 2, "", "mesh=null", 2e-4, long=False),
        _row("tensor", 2, "", "mesh=null", 2e-4, long=False),
        _row("fsdp-tensor", 4, "", "mesh=null", 5e-3, long=False),  # in bfloat16
        _row("pipeline", 2, "", "mesh=null", 2e-4, long=False),
        _row("pipeline-fsdp", 4, "", "mesh=null", 5e-3, long=False),  # in bfloat16
        _row("context", 2, "", "mesh=null", 2e-4, long=False),
        _row("context-ring", 2, "activation_checkpointing=selective", "mesh=null", 5e-3, long=False),
        _row("experts", 2, "", "mesh=null", 2e-4, long=False),
        _row("pipeline-gpipe", 2, "", "mesh=null", 2e-4),
        _row("pipeline-gpipe", 3, "mesh.pipeline=3 task=cnn", "mesh=null", 2e-4),
        _row("pipeline-interleaved", 4, "", "mesh=null", 2e-4),
        _row("pipeline-zero-bubble", 4, "", "mesh=null", 2e-4),
        _row("pipeline-zero-bubble", 2, "precision=bfloat16 activation_checkpointing=full", "mesh=null", 5e-3),
        _row("pipeline-tensor", 4, "", "mesh=null", 2e-4),
        _row("model-parallel", 2, "", "mesh=null", 2e-4),
        _row("fsdp", 4, "mesh.shard=4", "mesh=null", 2e-4),
        _row("fsdp", 4, "mesh.context=2", "mesh=null", 2e-4),
        _row("tensor", 4, "mesh.context=2", "mesh=null", 2e-4),
        _row("tensor", 4, "mesh.context=2 mesh.attention=ring", "mesh=null", 2e-4),
        _row("context", 2, AGAIN, "mesh=null", 5e-3),
        _row("experts", 4, "mesh.shard=2", "mesh=null", 2e-4),
        _row("experts", 2, AGAIN, "mesh=null", 5e-3),
    ],
)  # fmt: skip
def test_sample_learns_what_one_process_does(
    make: Callable[..., TrainJob],
    tmp_path: Path,
    zygote: Zygote,
    sample: str,
    ranks: int,
    changes: str,
    without: str,
    tolerance: float,
) -> None:
    job = make(sample, *changes.split())
    others = [word for one in without.split() for word in ("--set", one)]
    alone = Plain(zygote, tmp_path / "alone", SCRIPT, *job.arguments, *others)
    job.start(ranks)
    got, want = job.finish(ranks), alone.wait()
    assert len(_losses(want, 1)) == STEPS + 1, want
    assert _losses(got, ranks) == pytest.approx(_losses(want, 1), abs=tolerance), got
    # Sums of another order, or rounded, have other bits.
    assert (_hash(got) == _hash(want)) == (sample in SAME_BITS), (got, want)


@pytest.mark.parametrize(
    ("sample", "ranks", "tolerance"),
    [
        pytest.param("pipeline-fsdp", 4, 5e-3),  # in bfloat16
        pytest.param("tensor", 2, 2e-4, marks=only_long("tests of model groups have its collectives")),
        pytest.param("context", 2, 2e-4, marks=only_long("tests of sequences have its collectives")),
        pytest.param("experts", 2, 2e-4, marks=only_long("tests of experts have its collectives")),
    ],
)
def test_sample_learns_the_same_with_gloo_in_place_of_nccl(
    make: Callable[..., TrainJob], tmp_path: Path, zygote: Zygote, sample: str, ranks: int, tolerance: float
) -> None:
    """It trains, evaluates and hashes its parameters the way that it does on GPUs."""
    job = make(sample, TEST_NCCL="1")
    alone = Plain(zygote, tmp_path / "alone", SCRIPT, *job.arguments, "--set", "mesh=null")
    job.start(ranks)
    got, want = job.finish(ranks), alone.wait()
    assert len(_losses(got, ranks)) == STEPS + 1, got
    assert _losses(got, ranks) == pytest.approx(_losses(want, 1), abs=tolerance), got
    _hash(got)


@pytest.mark.parametrize(
    "split",
    ["", pytest.param("tensor: 2", marks=only_long("as without a split"))],
)
def test_hash_of_the_parameters_is_the_same_wherever_the_layers_lie(make: Callable[..., TrainJob], split: str) -> None:
    """Two model groups add up what two groups without a pipeline do, in the same order."""
    found = []
    for mesh in (f"mesh={{pipeline: 2, {split}}}", f"mesh={{{split}}}"):
        job = make("pipeline-gpipe", mesh)
        job.start(2 * job.size)
        found.append(_hash(job.finish(2 * job.size)))
    assert found[0] == found[1]


def test_sample_of_powersgd_learns_from_approximations(make: Callable[..., TrainJob]) -> None:
    found = []
    for hook in ("hook.start_step=0", "hook=null"):
        job = make("powersgd", hook, "steps=40", "print_every=10")
        job.start(2)
        found.append(job.finish(2))
    approximated, whole = found
    assert _losses(approximated, 2)[-1] < _losses(approximated, 2)[0] - 0.3, approximated
    assert _hash(approximated) != _hash(whole), "gradients were summed as they are"


@pytest.mark.skipif(not LONG or shutil.which("g++") is None, reason="REGROUP_LONG, and a C++ compiler")
@pytest.mark.parametrize("sample", ["compile", "fsdp", "tensor", "pipeline"])
def test_compiled_sample_learns_what_one_process_does(
    make: Callable[..., TrainJob], tmp_path: Path, zygote: Zygote, sample: str
) -> None:
    job = make(sample, "compile=true")
    arguments = [*job.arguments, "--set", "mesh=null"]
    # It compiles for everybody: no timed wait contains that.
    want = Plain(zygote, tmp_path / "alone", SCRIPT, *arguments, **compiled_in(tmp_path)).wait()
    job.start(2)
    got = job.finish(2)
    assert len(_losses(want, 1)) == STEPS + 1, want
    assert _losses(got, 2) == pytest.approx(_losses(want, 1), abs=2e-4), got


@pytest.mark.parametrize("sample", ["local-sgd", "diloco"])
def test_sample_of_inner_steps_learns(make: Callable[..., TrainJob], sample: str) -> None:
    job = make(sample)
    job.start(2)
    output = job.finish(2)
    losses = _losses(output, 2)
    assert len(losses) == STEPS + 1, output
    assert losses[-1] < losses[0] - 0.1, output
    _hash(output)


def test_sample_of_a_parameter_server_learns_through_the_loss_of_the_server(make: Callable[..., TrainJob]) -> None:
    job = make("parameter-server", "steps=150", "print_every=50", "evaluate_every=70")
    job.start(3)
    job.agents.wait_step(1, 20, [0, 1, 2])
    job.agents.kill(0)
    job.agents.announce([1, 2], lost=[job.agents.workers[0].pod_uid])
    job.agents.wait_finished(1, 2)
    job.agents.finish()
    job.agents.wait_exit(1, 2)
    output = job.agents.workers[0].log + job.agents.workers[1].log
    found = re.findall(r"^step (\d+)  loss .*generation (\d+)  ranks (\d)$", output, re.MULTILINE)
    assert [int(step) // 50 for step, _, _ in found] == [1, 2, 3], output
    assert found[-1] == ("150", "2", "2")
    losses = [float(x) for x in re.findall(r"held-out loss (\d+\.\d+)", output)]
    assert len(losses) == 3, output
    assert losses[-1] < 1.5, "of ten classes, where guessing has 2.3"
    _hash(output)


@pytest.mark.parametrize(
    "sample",
    [
        "fsdp",
        "pipeline",
        *[
            pytest.param(sample, marks=only_long("test_context_and_experts.py kills in each phase"))
            for sample in ("context", "experts")
        ],
        *[
            pytest.param(sample, marks=only_long("as the samples above"))
            for sample in (
                "zero1",
                "tensor",
                "fsdp-tensor",
                "pipeline-gpipe",
                "pipeline-interleaved",
                "pipeline-zero-bubble",
                "pipeline-fsdp",
                "pipeline-tensor",
            )
        ],
    ],
)
def test_killed_process_of_a_split_model_is_replaced_and_nothing_is_lost(
    make: Callable[..., TrainJob], tmp_path: Path, zygote: Zygote, sample: str
) -> None:
    job = make(sample, "steps=20", "evaluate_every=8")
    alone = Plain(zygote, tmp_path / "alone", SCRIPT, *job.arguments, "--set", "mesh=null")
    ranks = 2 * job.size
    last = ranks - 1
    job.start(ranks)
    job.agents.wait_step(1, 3, range(ranks))
    job.agents.kill(last)
    job.agents.run(last, **job.place(last))
    job.agents.wait_attached(last)
    job.agents.announce(range(ranks))
    got, want = job.finish(ranks), alone.wait()
    for slot in range(last):
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert not adopted.rolled_back
    assert f"generation 2  ranks {ranks}" in got, got
    final = [re.findall(r"^step 20  (?:held-out )?loss (\d+\.\d+)", one, re.MULTILINE) for one in (got, want)]
    tolerance = 2e-2 if job.config.precision == "bfloat16" else 2e-3
    assert [float(x) for x in final[0]] == pytest.approx([float(x) for x in final[1]], abs=tolerance), got


@only_long("test_split_checkpoints.py reads at any split")
def test_checkpoint_of_a_pipeline_is_read_without_one(
    make: Callable[..., TrainJob], tmp_path: Path, zygote: Zygote
) -> None:
    """All workers are lost, and the job goes on with one process that has all layers: to the same bits."""
    saved = {env.CHECKPOINT_DIR: str(tmp_path / "saved"), env.CHECKPOINT_EVERY_SECONDS: "0"}
    changes = ["steps=600", "print_every=600"]
    job = make("pipeline-gpipe", *changes, **saved)
    whole = make("pipeline-gpipe", *changes, "mesh=null")
    alone = Plain(zygote, tmp_path / "alone", SCRIPT, *whole.arguments)
    job.start(2)

    def newest() -> CheckpointRef | None:
        reports = [one.checkpoint for one in job.agents.workers[0].messages(local.Committed) if one.checkpoint]
        return CheckpointRef(**reports[-1]) if reports else None

    checkpoint = until(newest, "a checkpoint", details=lambda: job.agents.workers[0].log)
    pods = [job.agents.workers[slot].pod_uid for slot in range(2)]
    for slot in range(2):
        job.agents.kill(slot)
        del job.agents.workers[slot]
    job.agents.start(0, **{"TEST_ARGUMENTS": "\n".join(whole.arguments)})
    job.agents.wait_attached(0)
    job.agents.announce([0], lost=pods, checkpoint=checkpoint)
    output = job.finish(1)
    (adopted,) = job.agents.workers[0].messages(local.AdoptedLocally, 2)
    assert adopted.source == "disk"
    assert adopted.start_step >= checkpoint.step
    assert _hash(output) == _hash(alone.wait())
