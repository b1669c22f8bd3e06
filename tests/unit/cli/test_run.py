"""What `regroup run` makes of its arguments: a job as one would write it, or one sentence."""

from __future__ import annotations

import pytest

from regroup_cli.__main__ import parser
from regroup_cli.run import job_object
from regroup_operator.api import SpecError, parse_job


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        pytest.param(["--workers", "3"], None, id="without bounds the size is fixed"),
        pytest.param(["--workers", "3", "--min", "2"], (2, 3), id="the most are those wanted"),
        pytest.param(["--workers", "3", "--max", "5"], (1, 5), id="the fewest are one"),
        pytest.param(["--workers", "3", "--min", "2", "--max", "5"], (2, 5), id="both bounds"),
    ],
)
def test_bounds_make_a_job_elastic(arguments: list[str], policy: tuple[int, int] | None) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "train"])))
    assert job.elastic == (policy is not None)
    assert (job.min_replicas, job.max_replicas) == (policy or (3, 3))


@pytest.mark.parametrize(("arguments", "seconds"), [([], None), (["--hang-seconds", "60"], 60)])
def test_bound_of_a_hang_is_passed_on(arguments: list[str], seconds: int | None) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "train"])))
    assert job.spec.recovery.hang_seconds == seconds


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--max", "0"], "spec.elasticPolicy.maxReplicas (0)", id="no workers at most"),
        pytest.param(["--min", "0"], "spec.elasticPolicy.minReplicas (0)", id="no workers at least"),
        pytest.param(["--workers", "0"], "spec.replicas (0)", id="no workers"),
        pytest.param(["--min", "3", "--max", "2"], "minReplicas (3) is greater than", id="bounds the wrong way round"),
        pytest.param(["--workers", "1", "--min", "2"], "spec.replicas (1) is outside", id="fewer than the fewest"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(arguments: list[str], sentence: str) -> None:
    raw = job_object(parser().parse_args(["run", *arguments, "train"]))
    with pytest.raises(SpecError) as caught:
        parse_job(raw)
    assert sentence in str(caught.value)
