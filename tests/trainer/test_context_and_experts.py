"""Sequences and experts that are split over several ranks, with real processes over gloo: equal to one process, through kills and
resizes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from harness.polling import until
from regroup.protocol import env, local
from regroup.protocol.document import PLANNED
from tests.long import LONG, only_long
from tests.trainer.elastic_kit import Plain
from tests.trainer.split_kit import SplitJob
from tests.trainer.test_model_groups import STEPS, Whole, assert_close, assert_equal
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "sequence_job.py"
Alone = Callable[..., "tuple[dict[str, dict[str, float]], Whole]"]
Make = Callable[..., SplitJob]
OF: dict[str, dict[str, str]] = {"context=2": {}, "expert=2": {"TEST_EXPERTS": "4"}}
"""What the script is asked for, by the mesh of the tests with faults."""
PAIRS: dict[str, dict[str, str]] = {"shard=2 context=2": {}, "shard=2 expert=2": {"TEST_EXPERTS": "4"}}
"""As OF: two groups are eight processes."""
ALL = OF | PAIRS


@pytest.fixture
def make(tmp_path: Path, zygote: Zygote) -> Iterator[Make]:
    """Make a job by its mesh. It is ended after the test."""
    jobs: list[SplitJob] = []

    def made(mesh: str, **environment: str) -> SplitJob:
        values = {"TEST_STEPS": STEPS, **environment}
        jobs.append(SplitJob(tmp_path / str(len(jobs)), zygote, mesh, SCRIPT, **values))
        return jobs[-1]

    yield made
    for one in jobs:
        one.close()


def undisturbed(
    directory: Path, zygote: Zygote, mesh: str, ranks: int, **environment: str
) -> tuple[dict[str, dict[str, float]], Whole]:
    """Return the last line of rank 0, and the state, after 20 steps that nothing happens in."""
    values = {"TEST_STEPS": STEPS, "TEST_PACE": "0", **environment}
    job = SplitJob(directory, zygote, mesh, SCRIPT, **values)
    try:
        job.start(range(ranks))
        job.agents.announce(range(ranks))
        ends, whole = job.finish(range(ranks))
    finally:
        job.close()
    return ends[0], whole


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Alone:
    """`undisturbed` of one process that has all of the model, by what its script is asked for."""
    found: dict[str, tuple[dict[str, dict[str, float]], Whole]] = {}

    def run(**environment: str) -> tuple[dict[str, dict[str, float]], Whole]:
        key = str(sorted(environment.items()))
        if key not in found:
            found[key] = undisturbed(tmp_path_factory.mktemp("alone"), zygote, "", 1, **environment)
        return found[key]

    return run


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"] if LONG else ["sgd"])  # AdamW would hide a factor
@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("context=2", 2),
        ("context=2", 4),
        ("context=4", 4),
        ("shard=2 context=2", 4),
        pytest.param("context=2 tensor=2", 4, marks=only_long("its checkpoint is read at another split")),
    ],
)
def test_split_sequences_teach_what_whole_ones_do(
    make: Make, alone: Alone, mesh: str, ranks: int, optimizer: str
) -> None:
    learns_as_alone(make(mesh, TEST_OPTIMIZER=optimizer, TEST_PACE="0"), ranks, *alone(TEST_OPTIMIZER=optimizer))


@pytest.mark.parametrize(
    ("mesh", "ranks", "device"),
    [
        ("context=4", 4, {}),
        pytest.param("context=2", 2, {}, marks=only_long("as four")),
        pytest.param("context=4", 4, {"TEST_NCCL": "1"}, marks=pytest.mark.slow),
        pytest.param("shard=2 context=2", 4, {}, marks=pytest.mark.slow),
    ],
)
def test_keys_that_go_round_teach_what_whole_sequences_do(
    make: Make, alone: Alone, mesh: str, ranks: int, device: dict[str, str]
) -> None:
    job = make(mesh, TEST_OPTIMIZER="sgd", TEST_PACE="0", TEST_ATTENTION="ring", **device)
    learns_as_alone(job, ranks, *alone(TEST_OPTIMIZER="sgd"))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"] if LONG else ["sgd"])  # AdamW would hide a factor
@pytest.mark.parametrize(
    ("mesh", "ranks", "asked"),
    [
        ("expert=2", 2, {"TEST_EXPERTS": "4", "TEST_TOP_K": "2"}),
        ("expert=2", 4, {"TEST_EXPERTS": "4"}),
        ("expert=4", 4, {"TEST_EXPERTS": "4"}),
        ("shard=2 expert=2", 4, {"TEST_EXPERTS": "4"}),
        ("shard=2 expert=2", 4, {"TEST_EXPERTS": "4", "TEST_PARTLY": "blocks"}),
        ("shard=2 expert=2", 4, {"TEST_EXPERTS": "4", "TEST_PARTLY": "head"}),
    ],
)
def test_split_experts_learn_what_whole_ones_do(
    make: Make, alone: Alone, mesh: str, ranks: int, asked: dict[str, str], optimizer: str
) -> None:
    asked = {**asked, "TEST_OPTIMIZER": optimizer}
    reference = alone(**{key: value for key, value in asked.items() if key != "TEST_PARTLY"})
    learns_as_alone(make(mesh, TEST_PACE="0", **asked), ranks, *reference)


def learns_as_alone(job: SplitJob, ranks: int, alone: dict[str, dict[str, float]], reference: Whole) -> None:
    job.start(range(ranks))
    job.agents.announce(range(ranks))
    ends, whole = job.finish(range(ranks))
    for end in ends:
        assert end["same_model"]
        assert list(end["losses"].values()) == pytest.approx(list(alone["losses"].values()), abs=1e-5)
        assert list(end["norms"].values()) == pytest.approx(list(alone["norms"].values()), rel=1e-4)
        assert end["losses"] == ends[0]["losses"]
    assert_close(whole, reference)


def test_parts_of_a_sequence_draw_numbers_of_their_own(make: Make) -> None:
    """Dropout would else drop the same tokens of each part. Ranks that compute the same tokens draw the same."""
    job = make("context=2 tensor=2", TEST_STEPS="1", TEST_PACE="0")
    job.start(range(4))
    job.agents.announce(range(4))
    ends, _ = job.finish(range(4))
    drawn = {end["rank"]: end["drawn"][0] for end in ends}
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


EXCHANGES = """
import os, torch, regroup
from torch.distributed.tensor import Shard, distribute_tensor

mesh = regroup.mesh(expert=2)["expert"]
torch.manual_seed(0)
model = torch.nn.Module()
whole = torch.randn(4, 3, 5)
model.experts = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
draw = torch.Generator().manual_seed(1)
both = torch.randn(2, 6, 3, generator=draw)
CASES = {
    "random": torch.randint(4, (2, 6, 2), generator=draw),
    "all to the first": torch.zeros(2, 6, 1, dtype=torch.int64),
    "all to the last": torch.full((2, 6, 1), 3),
    "each to the other rank": torch.tensor([3, 0]).view(2, 1, 1).expand(2, 6, 1),
    "the second rank has none": torch.randint(4, (2, 6, 1), generator=draw),
    "nobody has any": torch.zeros(2, 0, 1, dtype=torch.int64),
}

def compute(rows, counts):
    parts = zip(torch.split(rows, counts), model.experts.to_local())
    return torch.cat([some @ one for some, one in parts])

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with regroup.session(model=model, optimizer=optimizer, data=torch.zeros(4, 1), global_batch=2, microbatch=1) as job:
    for step in job.steps(1):
        with step:
            for _ in step.microbatches():
                for name, chosen in CASES.items():
                    counts = (0, 0) if name == "nobody has any" else (6, 0) if name == "the second rank has none" else (6, 6)
                    tokens = [both[rank, :count].clone().requires_grad_() for rank, count in enumerate(counts)]
                    wanted = [chosen[rank, :count] for rank, count in enumerate(counts)]
                    leaf = whole.clone().requires_grad_()
                    want = [torch.einsum("tw,tkwh->tkh", one, leaf[some]) for one, some in zip(tokens, wanted)]
                    sum(one.pow(2).sum() for one in want).backward()
                    at = job.rank
                    mine = tokens[at].detach().clone().requires_grad_()
                    got = regroup.through_experts(mine, wanted[at], 4, compute, mesh)
                    gradients = torch.autograd.grad(got.pow(2).sum(), [mine, model.experts])
                    torch.testing.assert_close(got, want[at])
                    torch.testing.assert_close(gradients[0], tokens[at].grad)
                    torch.testing.assert_close(gradients[1].to_local(), leaf.grad[2 * at : 2 * at + 2])
                    print(name, flush=True)
                step.backward(sum=model.experts.to_local().sum(), weight=1)
            step.commit()
print("all are equal", flush=True)
"""


RING = """
import itertools, os, torch, regroup
from torch.nn.functional import scaled_dot_product_attention

mesh = regroup.mesh(context=4)["context"]
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def attended(whole, attend):
    leaves = [one.detach().clone().requires_grad_() for one in whole[:3]]
    mixed = attend(*leaves)
    return [mixed, *torch.autograd.grad(mixed, leaves, whole[3])]

def compare(heads, fewer, size, dtype, causal):
    draw = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, h, 24, size, generator=draw).to(dtype) for h in (heads, fewer, fewer, heads)]
    want = attended(whole, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))
    mine = [one.chunk(4, dim=2)[job.rank] for one in whole]
    tolerance = 3e-6 if dtype == torch.float32 else 0.06
    for algorithm in ("ring", "ulysses") if fewer % 4 == 0 else ("ring",):
        got = attended(mine, lambda q, k, v: regroup.attention(q, k, v, mesh, causal=causal, algorithm=algorithm))
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other.chunk(4, dim=2)[job.rank], rtol=tolerance, atol=tolerance)

with regroup.session(model=model, optimizer=optimizer, data=torch.zeros(4, 1), global_batch=2, microbatch=2) as job:
    for step in job.steps(1):
        with step:
            for batch in step.microbatches():
                for heads, dtype, causal in itertools.product(
                    ((8, 4), (6, 2), (5, 1)), (torch.float32, torch.bfloat16), (True, False)
                ):
                    for size in (8, 6):
                        compare(*heads, size, dtype, causal)
                step.backward(sum=model(batch).sum(), weight=1)
            step.commit()
print("all are equal", flush=True)
"""


@pytest.mark.parametrize(
    ("mesh", "text"),
    [pytest.param("expert=2", EXCHANGES, id="tokens to experts"), pytest.param("context=4", RING, id="ring")],
)
def test_what_is_exchanged_gives_what_one_process_computes(
    tmp_path: Path, zygote: Zygote, mesh: str, text: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    job = SplitJob(tmp_path / "job", zygote, mesh, script)
    slots = range(job.size)
    try:
        job.start(slots)
        job.agents.announce(slots)
        job.agents.wait_finished(*slots)
        job.agents.finish()
        job.agents.wait_exit(*slots)
        for slot in slots:
            assert job.agents.workers[slot].log.strip().endswith("all are equal")
    finally:
        job.close()


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Alone:
    """`undisturbed` of two groups, by mesh and by what else its script is asked for."""
    found: dict[str, tuple[dict[str, dict[str, float]], Whole]] = {}

    def run(mesh: str, **more: str) -> tuple[dict[str, dict[str, float]], Whole]:
        key, asked = f"{mesh} {more}", {**ALL[mesh], **more}
        if key not in found:
            found[key] = undisturbed(tmp_path_factory.mktemp("two"), zygote, mesh, in_two_groups(mesh), **asked)
        return found[key]

    return run


def in_two_groups(mesh: str) -> int:
    """Return the number of processes of two model groups."""
    return 2 * math.prod(int(one.partition("=")[2]) for one in mesh.split())


@pytest.mark.parametrize("phase", ["forward", "backward", "sum"])
@pytest.mark.parametrize("victim", [0, -1] if LONG else [-1], ids=lambda slot: "last" if slot else "first")
@pytest.mark.parametrize("mesh", ALL if LONG else OF)
def test_a_killed_rank_is_replaced_and_no_bit_differs(
    make: Make, two_groups: Alone, mesh: str, victim: int, phase: str
) -> None:
    slots = range(in_two_groups(mesh))
    job = make(mesh, TEST_PACE="0", **ALL[mesh])
    assert_equal(survives(job, slots, slots[victim], f"dies-in-{phase}:4"), two_groups(mesh)[1])


def survives(job: SplitJob, slots: range, victim: int, fault: str) -> Whole:
    """Let a slot die in step 4, and start it again; return the state in the end."""
    agents = job.agents
    survivors = [slot for slot in slots if slot != victim]
    job.start(survivors)
    job.start([victim], TEST_FAULT=fault)
    agents.announce(slots)
    for slot in survivors:
        agents.wait_left(slot)
    job.restart(victim)
    agents.announce(slots)
    agents.wait_step(2, 0, slots)
    for slot in slots:
        (adopted,) = agents.workers[slot].messages(local.AdoptedLocally, 2)
        assert adopted.start_step == 4
        assert (adopted.source == "self") == (slot != victim)
    ends, whole = job.finish(slots)
    assert all(end["same_model"] for end in ends)
    return whole


@pytest.mark.parametrize(
    ("phase", "device"),
    [
        ("forward", {}),
        ("backward", {"TEST_NCCL": "1"}),
        pytest.param("forward", {"TEST_NCCL": "1"}, marks=pytest.mark.slow),
        pytest.param("backward", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_in_a_turn_of_a_ring_holds_nobody(
    make: Make, two_groups: Alone, phase: str, device: dict[str, str]
) -> None:
    """With TEST_NCCL the host runs ahead of the turns, as on a GPU."""
    victim = {"forward": 1, "backward": 2}[phase]
    job = make("context=2", TEST_PACE="0", TEST_ATTENTION="ring", **device)
    whole = survives(job, range(4), victim, f"dies-in-ring-{phase}:4")
    assert_equal(whole, two_groups("context=2", TEST_ATTENTION="ring")[1])


@pytest.mark.parametrize("mesh", OF)
def test_a_rank_that_hangs_in_an_exchange_holds_nobody(make: Make, two_groups: Alone, mesh: str) -> None:
    """No connection ends, so only the next generation can end the others' waits."""
    job = make(mesh, TEST_PACE="0", **OF[mesh])
    agents = job.agents
    job.start(range(3))
    job.start([3], TEST_FAULT="hangs-in-backward:4")
    agents.announce(range(4))
    agents.wait_step(1, 4, range(4))
    agents.wait(lambda: stopped(agents.workers[3].pid), "the hang")
    agents.announce(range(4))
    for slot in range(3):
        agents.wait(
            partial(agents.workers[slot].messages, local.Entering, 2), f"slot {slot} enters the next generation"
        )
    agents.kill(3)
    job.restart(3)
    agents.announce(range(4), older=[1, 2])
    _, whole = job.finish(range(4))
    assert_equal(whole, two_groups(mesh)[1])


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("lose", [[2], [1, 2], [1, 2, 3]] if LONG else [[1, 2]], ids=str)
@pytest.mark.parametrize("mesh", OF)
def test_ranks_without_the_rows_follow_with_what_they_have_reduced(
    make: Make, two_groups: Alone, mesh: str, lose: list[int]
) -> None:
    job = make(mesh, **OF[mesh])
    agents = job.agents
    job.start([slot for slot in range(4) if slot not in lose])
    job.start(lose, TEST_FAULT="rows-lost:4")
    agents.announce(range(4))
    for slot in range(4):
        agents.wait_left(slot)
    agents.kill(0)
    job.restart(0)
    agents.announce(range(4))
    agents.wait_step(2, 0, range(4))
    (adopted,) = agents.workers[lose[-1]].messages(local.AdoptedLocally, 2)
    assert (adopted.state.step, adopted.source) == (5 if len(lose) < 3 else 4, "self")
    _, whole = job.finish(range(4))
    assert_equal(whole, two_groups(mesh)[1])


@pytest.mark.parametrize("mesh", ["context=2", pytest.param("expert=2", marks=only_long("as context=2"))])
@pytest.mark.slow
def test_a_job_that_grows_learns_the_same_with_a_kill_and_without(make: Make, alone: Alone, mesh: str) -> None:
    """From one group to two after step 6. Sums over other groups have other bits, so the run to compare with grows, too."""
    wholes = []
    for victim in (None, 1, 2) if LONG else (None, 2):  # slot 1 is there from the beginning, as in the tests above
        job = make(mesh, TEST_RESIZE_AT="5", TEST_PACE="0.03", **OF[mesh])
        agents = job.agents
        job.start(range(4))
        agents.announce([0, 1])
        agents.wait_step(1, 5, [0, 1])
        agents.announce(range(4), PLANNED)
        agents.wait_step(2, 8, range(4))
        for slot in range(4):
            (adopted,) = agents.workers[slot].messages(local.AdoptedLocally, 2)
            assert (adopted.start_step, adopted.source == "self") == (6, slot < 2)
        if victim is not None:
            agents.kill(victim)
            job.restart(victim)
            agents.announce(range(4))
            agents.wait_step(3, 0, range(4))
        wholes.append(job.finish(range(4))[1])
    assert_close(wholes[0], alone(**OF[mesh])[1])
    for whole in wholes[1:]:
        assert_equal(whole, wholes[0])


def test_a_mean_over_nothing_is_refused_where_others_wait(make: Make) -> None:
    job = make("context=2", TEST_MEAN="1", TEST_PACE="0")
    job.start(range(2))
    job.agents.announce(range(2))
    said = "mean= and weight=0, and the ranks of regroup.mesh(context=2) make their backward passes together"
    until(lambda: said in job.agents.workers[1].log, "the refusal", details=lambda: job.agents.workers[1].log)


BEGIN = """
import torch, regroup
mesh = regroup.mesh({mesh})
model = torch.nn.Linear(4, 4)
"""
TRAIN = """
data = torch.randn(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with regroup.session(model=model, optimizer=optimizer, data=(data, data), global_batch=4, microbatch=2) as job:
    for step in job.steps(1):
        with step:
            step.commit()
"""


@pytest.mark.parametrize(
    ("mesh", "script", "said"),
    [
        pytest.param(
            "context=2",
            """
from torch.distributed.tensor import Replicate, distribute_tensor
model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh["context"], [Replicate()]))
"""
            + TRAIN,
            "Parameter weight is a DTensor over a mesh with the dimension context, whose ranks have parts of a sequence",
            id="parameter over context",
        ),
        pytest.param(
            "context=2",
            "regroup.split_sequence(torch.zeros(2, 5), mesh['context'])",
            "A sequence of 5 tokens cannot be split evenly over context=2. Pad it to 6 tokens",
            id="odd length",
        ),
        pytest.param(
            "context=2",
            "regroup.attention(*[torch.zeros(1, 3, 4, 8)] * 3, mesh['context'], causal=True)",
            "query of regroup.attention() has shape [1, 3, 4, 8]; it must be [batch, heads, tokens, size], with a ",
            id="odd heads",
        ),
    ],
)
def test_what_does_not_work_is_refused_in_one_sentence(
    tmp_path: Path, zygote: Zygote, mesh: str, script: str, said: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(BEGIN.format(mesh=mesh) + script)
    written = Plain(zygote, tmp_path / "log", path, **{env.LOCAL_WORLD_SIZE: "2"}).wait()
    last = written.strip().splitlines()[-1]
    assert last.startswith("regroup.errors.UsageError: "), written
    assert said in last


@pytest.mark.parametrize("mesh", OF)
@only_long("a rank is killed in each phase above")
def test_kills_at_random_moments_change_no_bit(make: Make, tmp_path: Path, zygote: Zygote, mesh: str) -> None:
    kills, steps = 30, "300"
    job = make(mesh, TEST_STEPS=steps, TEST_PACE="0.02", **OF[mesh])
    agents = job.agents
    job.start(range(4))
    agents.announce(range(4))
    draw = random.Random(mesh)
    for generation in range(1, kills + 1):
        agents.wait_step(generation, 0, range(4))
        time.sleep(draw.uniform(0, 0.3))  # the moment, in steps of about 0.06 s
        victim = draw.randrange(4)
        agents.kill(victim)
        job.restart(victim)
        agents.announce(range(4))
    agents.wait_step(kills + 1, 0, range(4))
    starts = [adopted.start_step for adopted in agents.workers[0].messages(local.AdoptedLocally)]
    print(f"{mesh}: {kills} kills, generations began at steps {starts}")
    assert starts == sorted(starts), "a step was lost"
    _, whole = job.finish(range(4))
    _, reference = undisturbed(tmp_path / "undisturbed", zygote, mesh, 4, **{"TEST_STEPS": steps, **OF[mesh]})
    assert_equal(whole, reference)
