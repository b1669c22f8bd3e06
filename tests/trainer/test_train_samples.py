"""Sample configurations whose strategy needs several processes: each learns what one process does that has all of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regroup.protocol import env
from regroup.train.config import load
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "train_job.py"
SAMPLES = Path(__file__).parents[2] / "manifests" / "samples" / "train"
STEPS = 3


class TrainJob:
    """Workers of one process each that run a sample, shortened."""

    def __init__(self, directory: Path, zygote: Zygote, sample: str, *changes: str) -> None:
        path = SAMPLES / f"{sample}.yaml"
        config = load(str(path))
        self.size = 1
        for size in (config.mesh.sizes if config.mesh is not None else {}).values():
            self.size *= size
        directory.mkdir()
        text = directory / "text"
        text.write_text(SCRIPT.read_text() * 20)
        common = [f"steps={STEPS}", "print_every=1", "schedule.warmup_steps=0"]
        if config.task.name == "language_model":
            common += [f"task.text={text}", "task.length=16", "microbatch=2", "global_batch=8"]
        self.arguments = [str(path), *(word for one in (*common, *changes) for word in ("--set", one))]
        self.agents = AgentDouble(directory, zygote, SCRIPT, {"TEST_ARGUMENTS": "\n".join(self.arguments)})

    def place(self, slot: int) -> dict[str, str]:
        values = {
            env.GROUP_PLACE: str(slot % self.size),
            env.WORKERS_PER_GROUP: str(self.size),
            env.LOCAL_WORLD_SIZE: "1",
        }
        return values if self.size > 1 else {}

    def start(self, ranks: int) -> None:
        for slot in range(ranks):
            self.agents.start(slot, **self.place(slot))
        self.agents.wait_attached(*range(ranks))
        self.agents.announce(range(ranks))

    def finish(self, ranks: int) -> str:
        """Wait for the end and return what rank 0 has written."""
        self.agents.wait_finished(*range(ranks))
        self.agents.stop()
        self.agents.wait_exit(*range(ranks))
        return self.agents.workers[0].log


@pytest.fixture
def make(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[..., TrainJob]]:
    jobs: list[TrainJob] = []

    def made(sample: str, *changes: str) -> TrainJob:
        jobs.append(TrainJob(tmp_path / str(len(jobs)), zygote, sample, *changes))
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


@pytest.mark.parametrize(
    ("sample", "ranks", "without", "tolerance"),
    [
        ("hook-fp16", 2, "hook=null", 5e-4),
        ("hook-bf16", 2, "hook=null", 2e-3),
        ("ring", 3, "strategy=data_parallel", 2e-4),
        ("fsdp", 4, "mesh=null", 2e-4),
        ("tensor", 2, "mesh=null", 2e-4),
        ("fsdp-tensor", 4, "mesh=null", 5e-3),  # in bfloat16
    ],
)
def test_sample_learns_what_one_process_does(
    make: Callable[..., TrainJob],
    tmp_path: Path,
    zygote: Zygote,
    sample: str,
    ranks: int,
    without: str,
    tolerance: float,
) -> None:
    job = make(sample)
    alone = Plain(zygote, tmp_path / "alone", SCRIPT, *job.arguments, "--set", without)
    job.start(ranks)
    got, want = job.finish(ranks), alone.wait()
    assert len(_losses(want, 1)) == STEPS + 1, want
    assert _losses(got, ranks) == pytest.approx(_losses(want, 1), abs=tolerance), got
    assert _hash(got) != _hash(want), "sums of another order, or rounded, have other bits"


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
    job.agents.stop()
    job.agents.wait_exit(1, 2)
    output = job.agents.workers[0].log + job.agents.workers[1].log
    found = re.findall(r"^step (\d+)  loss .*generation (\d+)  ranks (\d)$", output, re.MULTILINE)
    assert [int(step) // 50 for step, _, _ in found] == [1, 2, 3], output
    assert found[-1] == ("150", "2", "2")
    losses = [float(x) for x in re.findall(r"held-out loss (\d+\.\d+)", output)]
    assert len(losses) == 3, output
    assert losses[-1] < 1.5, "of ten classes, where guessing has 2.3"
    _hash(output)


def test_killed_process_of_a_split_model_is_replaced_and_nothing_is_lost(
    make: Callable[..., TrainJob], tmp_path: Path, zygote: Zygote
) -> None:
    job = make("fsdp", "steps=20", "evaluate_every=8")
    alone = Plain(zygote, tmp_path / "alone", SCRIPT, *job.arguments, "--set", "mesh=null")
    job.start(4)
    job.agents.wait_step(1, 3, range(4))
    job.agents.kill(3)
    job.agents.run(3, **job.place(3))
    job.agents.wait_attached(3)
    job.agents.announce(range(4))
    got, want = job.finish(4), alone.wait()
    assert "generation 2  ranks 4" in got, got
    final = [re.findall(r"^step 20  (?:held-out )?loss (\d+\.\d+)", one, re.MULTILINE) for one in (got, want)]
    assert [float(x) for x in final[0]] == pytest.approx([float(x) for x in final[1]], abs=2e-3), got
