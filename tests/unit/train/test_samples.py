"""The sample job of the loop: a job that the operator takes, whose configuration is one of the samples in the image."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from _regroup_agent.launch.command import is_library_module, python_command
from regroup.train.config import load
from regroup_cli.__main__ import parser
from regroup_cli.run import fill_counts, trainer_command
from regroup_operator.api import SpecError, parse_job

ROOT = Path(__file__).parents[3]
MANIFEST = ROOT / "manifests" / "samples" / "train.yaml"


def test_sample_job_runs_a_configuration_of_the_image() -> None:
    (raw,) = (d for d in yaml.safe_load_all(MANIFEST.read_text()) if d["kind"] == "DistributedTrainingJob")
    raw["metadata"] |= {"namespace": "default", "uid": "u", "resourceVersion": "1", "generation": 1}
    job = parse_job(raw)
    (container,) = raw["spec"]["template"]["spec"]["containers"]
    python = python_command([*container["command"], *container["args"]])
    assert python is not None
    assert is_library_module(python.module)
    path, option, change = python.args
    assert option == "--set"
    copied = re.findall(r"^COPY (\S+) (/regroup-samples/train)$", (ROOT / "trainer-image/Dockerfile").read_text(), re.M)
    assert copied == [("manifests/samples/train", "/regroup-samples/train")]
    config = load(str(ROOT / path.replace("/regroup-samples/train", "manifests/samples/train")), [change])
    assert config.most_processes is not None
    assert config.most_processes >= job.max_replicas


def test_image_for_gpus_has_the_compiler_that_compile_needs() -> None:
    """`compile: true` is refused on a GPU where neither is found; the image for CPUs only needs no packages of Debian."""
    text = (ROOT / "trainer-image/Dockerfile").read_text().replace("\\\n", " ")
    (run,) = re.findall(r"^RUN .*apt-get install.*$", text, re.M)
    assert 'if [ "${CPU_ONLY}" != 1 ]' in run
    assert {"gcc", "libc6-dev"} <= set(run.split())


def _command(words: list[str]) -> list[str]:
    args = parser().parse_args(words)
    fill_counts(args, {})
    return trainer_command(args)


def test_regroup_run_of_a_configuration_runs_the_loop() -> None:
    sample = str(ROOT / "manifests/samples/train/digits.yaml")
    command = _command(["run", "--workers", "2", sample, "--set", "steps=5"])
    assert command[1:] == ["-m", "regroup.train", sample, "--set", "steps=5"]


@pytest.mark.parametrize(
    ("sample", "workers"),
    [("pipeline-gpipe", 20), ("batch-per-rank", 100), ("context", 16)],
)
def test_processes_that_compute_the_same_samples_need_one_microbatch(sample: str, workers: int) -> None:
    path = str(ROOT / f"manifests/samples/train/{sample}.yaml")
    args = ["run", "--workers", str(workers), path]
    assert _command(args)[3] == path
    if sample == "batch-per-rank":
        return
    args[2] = str(workers + 2)
    with pytest.raises(SpecError, match=rf"each for 2 processes together, is less than .* \({workers + 2}\)\. Raise"):
        _command(args)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (["--workers", "3"], 3),
        (["--workers", "1", "--max", "4"], 4),
        (["--workers", "2", "--processes-per-worker", "2"], 4),
    ],
)
def test_more_processes_than_microbatches_are_refused_before_any_starts(options: list[str], most: int) -> None:
    sample = str(ROOT / "manifests/samples/train/digits.yaml")
    with pytest.raises(SpecError) as caught:
        _command(["run", *options, sample, "--set", "microbatch=40"])
    assert str(caught.value) == (
        "global_batch / microbatch (80 / 40 = 2) is less than the largest number of processes "
        f"({most}). Raise global_batch, or lower microbatch, --workers or --max."
    )


@pytest.mark.parametrize(
    ("mesh", "workers", "refused"),
    [
        pytest.param(["mesh.tensor=2"], 4, None, id="two processes compute the same samples"),
        pytest.param(["mesh.tensor=2"], 5, None, id="a process without a whole model group does not count"),
        pytest.param(["mesh.tensor=2"], 6, "for 2 processes together, is less than", id="more model groups"),
        pytest.param(["mesh.shard=2"], 3, None, id="one model group"),
        pytest.param(["mesh.shard=2"], 4, "number of processes (4)", id="each process computes its own samples"),
        pytest.param(["mesh.shard=2", "mesh.tensor=2"], 4, None, id="one model group of two dimensions"),
        pytest.param(["mesh.shard=2", "mesh.tensor=2"], 8, "for 2 processes together, is less than", id="two of them"),
    ],
)  # fmt: skip
def test_processes_that_compute_the_same_samples_need_no_more_microbatches(
    mesh: list[str], workers: int, refused: str | None
) -> None:
    sample = str(ROOT / "manifests/samples/train/digits.yaml")
    changes = [word for change in ["microbatch=40", *mesh] for word in ("--set", change)]
    args = parser().parse_args(["run", "--workers", "1", "--processes-per-worker", str(workers), sample, *changes])
    if refused is None:
        assert trainer_command(args)[-len(changes) :] == changes
        return
    with pytest.raises(SpecError) as caught:
        trainer_command(args)
    assert refused in str(caught.value)
