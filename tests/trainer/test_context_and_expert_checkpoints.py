"""Checkpoints of models whose sequences or experts are split, with real processes: any other split reads them, and so does one
process without a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from regroup.protocol import env, local
from tests.long import only_long
from tests.trainer.split_kit import SplitJob
from tests.trainer.test_context_and_experts import SCRIPT, undisturbed
from tests.trainer.test_model_groups import Whole, assert_close
from tests.trainer.test_split_checkpoints import begin_again, saved
from tests.trainer.zygote import Zygote

STEPS = "16"
DENSE: dict[str, str] = {}
EXPERTS = {"TEST_EXPERTS": "4"}


@pytest.fixture
def make(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[..., SplitJob]]:
    """Make a job by its mesh that saves as often as it can. It is ended after the test."""
    jobs: list[SplitJob] = []

    def made(mesh: str, **environment: str) -> SplitJob:
        values = {
            env.CHECKPOINT_DIR: str(tmp_path / "saved"),
            env.CHECKPOINT_EVERY_SECONDS: "0",
            "TEST_STEPS": STEPS,
            "TEST_PACE": "0.1",
            **environment,
        }
        jobs.append(SplitJob(tmp_path, zygote, mesh, SCRIPT, **values))
        return jobs[-1]

    yield made
    for one in jobs:
        one.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Callable[..., Whole]:
    """The state of one process after as many steps, by what its script is asked for."""
    found: dict[str, Whole] = {}

    def run(**asked: str) -> Whole:
        key = str(sorted(asked.items()))
        if key not in found:
            found[key] = undisturbed(tmp_path_factory.mktemp("alone"), zygote, "", 1, TEST_STEPS=STEPS, **asked)[1]
        return found[key]

    return run


@pytest.mark.parametrize(
    ("asked", "mesh", "ranks", "then", "then_ranks"),
    [
        (DENSE, "context=2", 4, "shard=2 context=2", 4),
        (DENSE, "context=2 tensor=2", 4, "context=2", 2),
        (EXPERTS, "expert=2", 2, "", 1),
        (EXPERTS, "", 1, "expert=2", 4),
        (EXPERTS, "expert=2", 4, "expert=4", 4),
        (EXPERTS, "shard=2 expert=2", 4, "expert=2", 2),
        *(
            pytest.param(*one, marks=only_long("each of the two splits is written and read in the rows above"))
            for one in (
                (DENSE, "context=2", 2, "", 1),
                (DENSE, "", 1, "context=2", 4),
                (EXPERTS, "expert=2", 2, "shard=2 expert=2", 4),
            )
        ),
    ],
)
@pytest.mark.slow
def test_a_checkpoint_is_read_at_any_split(
    make: Callable[..., SplitJob],
    alone: Callable[..., Whole],
    asked: dict[str, str],
    mesh: str,
    ranks: int,
    then: str,
    then_ranks: int,
) -> None:
    job = make(mesh, **asked)
    job.start(range(ranks))
    job.agents.announce(range(ranks))
    newest = saved(job, [0], 3)
    begin_again(job, then_ranks, then, newest)
    job.agents.wait_step(2, 0, range(then_ranks))
    for slot in range(then_ranks):
        (adopted,) = job.agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert (adopted.source, adopted.start_step >= newest.step) == ("disk", True)
    _, whole = job.finish(range(then_ranks))
    assert_close(whole, alone(**asked))


@pytest.mark.parametrize(("asked", "mesh", "both_write"), [(DENSE, "context=2", False), (EXPERTS, "expert=2", True)])
def test_a_checkpoint_is_read_without_regroup(
    make: Callable[..., SplitJob], tmp_path: Path, asked: dict[str, str], mesh: str, both_write: bool
) -> None:
    """What every rank has whole is written once: of context=2 the second rank's part is empty."""
    job = make(mesh, TEST_PACE="0", **asked)
    job.start([0, 1])
    job.agents.announce([0, 1])
    _, whole = job.finish([0, 1])
    (directory,) = (tmp_path / "saved").glob(f"step-{STEPS}.*")
    assert ((directory / "__1_0.distcp").stat().st_size > 0) is both_write
    dcp_to_torch_save(directory, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    for name, held in whole.items():
        assert torch.equal(plain["model"][name], held["parameter"]), name
