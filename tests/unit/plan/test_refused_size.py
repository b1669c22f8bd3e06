"""When a script refuses a size, and for how long. Ids are sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup_operator.api.spec import ElasticPolicy, ExitCodes, ExitRule
from regroup_operator.api.status import EarlierRefusal, Growth, JobStatus, RefusedSize
from regroup_operator.model.plan import Clock, Crash, Failure, timestamp
from regroup_operator.model.records import ProcessExit
from regroup_operator.model.worker import Standing, Wait, Worker
from regroup_operator.plan.facts.size import Size, decide_size, standing_refusal, tried_sizes, with_refusal
from regroup_operator.plan.failures.crashes import place_of
from regroup_operator.plan.failures.refused_size import (
    AGAIN_S,
    HOLD_S,
    SETTLE_S,
    Trial,
    judge_trial,
    may_go_back,
    refused_words,
    steady_at_s,
)
from tests.builders.plan import make_current, make_job, make_session, make_status, make_worker

WALL = 1_800_000_000.0
CLOCK = Clock(100.0, WALL)
LINE = "AssertionError"
TAIL = 'Traceback (most recent call last):\n  File "/app/train.py", line 95, in <module>\nAssertionError'
TORN = 'File "/app/train.py", line 9, in <module>\nEOFError: Ran out of input'
PEER = 'Traceback (most recent call last):\n  File "/torch/distributed.py", line 2, in all_reduce\nRuntimeError'


def member(slot: int, *ends: ProcessExit, standing: str = Standing.DIED, **changes: Any) -> Worker:
    session = make_session(slot, Phase.READY, 2, session=False, exits=ends, num_exits=len(ends))
    return make_worker(slot, standing, session=session, **changes)


def ended(code: int = 1, at_s: float = 99.0, tail: str = TAIL, generation: int = 2, **changes: Any) -> ProcessExit:
    values = {"last_line": tail.rpartition("\n")[2], "tail": tail} | changes
    return ProcessExit(at_s, 1, 0, code, generation=generation, **values)


def raised(slot: int, **changes: Any) -> Worker:
    return member(slot, ended(**changes))


def runs(slot: int) -> Worker:
    return member(slot, standing=Standing.STARTING)


def judge(*members: Worker, good: int = 2, **changes: Any) -> str:
    """Return what a table compares: refused, open, or counts."""
    got = judge_trial(trial(*members, good=good, **changes))
    if got.refused is not None:
        assert got.spared == {2}
        assert not got.undecided
        assert isinstance(got.wait, Wait)
        assert got.wait.until == CLOCK.now_s + AGAIN_S
        return "refused"
    assert not got.spared
    assert (got.undecided == 2) == (got.wait is not None)
    return "open" if got.wait is not None else "counts"


def trial(*members: Worker, good: int = 2, **changes: Any) -> Trial:
    current = make_current(range(len(members)), number=2, announced_at_s=90.0)
    return Trial(current=current, members=members, good=good, clock=CLOCK, **{"wanted": 3} | changes)


def before(tail: str = TAIL, generation: int = 1) -> Crash:
    """A crash of an earlier generation."""
    last = Failure(WALL - 30, "0", 1, tail.splitlines()[-1], tail, generation=generation)
    return Crash(place_of(last), ((WALL - 30, generation),), last)


@pytest.mark.parametrize(
    ("members", "want"),
    [
        pytest.param([raised(0), raised(1), raised(2)], "refused", id="all raise at one line"),
        pytest.param([raised(0, code=2), raised(1), raised(2)], "refused", id="codes may differ"),
        pytest.param([raised(0)], "counts", id="the only one may have failed by chance"),
        pytest.param([raised(0), raised(1), runs(2)], "open", id="one has not failed yet"),
        pytest.param([raised(0, at_s=94.0), raised(1), runs(2)], "counts", id="one has not failed in time"),
        pytest.param([runs(0), runs(1), runs(2)], "counts", id="none has failed"),
        pytest.param([raised(0), raised(1, tail=PEER), raised(2, tail=PEER)], "counts", id="one fails, and its peers for that"),
        pytest.param([raised(0), raised(1), raised(2, code=-9)], "counts", id="one is killed"),
        pytest.param([raised(0), raised(1), raised(2, code=139)], "counts", id="one ends by a signal of its child"),
        pytest.param([raised(0), raised(1), raised(2, reason="OOMKilled")], "counts", id="one lacks memory"),
        pytest.param([raised(0), raised(1), raised(2, hung="it hung")], "counts", id="one was killed because it hung"),
        pytest.param([raised(0), raised(1), raised(2, tail=TORN)], "counts", id="one reads a torn file"),
        pytest.param([raised(0, reason="CannotRun")], "counts", id="it can run with no size"),
        pytest.param(
            [raised(0), raised(1), replace(raised(2), standing=Standing.LOST)], "counts", id="a member is lost"
        ),
        pytest.param(
            [raised(0, generation=1), raised(1), raised(2)], "open", id="a failure of the generation before says nothing"
        ),
        pytest.param([member(slot, ended(tail="", last_line="")) for slot in (0, 1)], "refused", id="a script that says nothing"),
        pytest.param([member(0, ended(0, tail="", last_line=""))], "counts", id="a script that ends well"),
    ],
)  # fmt: skip
def test_size_is_refused_by_all(members: list[Worker], want: str) -> None:
    assert judge(*members) == want


@pytest.mark.parametrize(
    ("crash", "want"),
    [
        pytest.param(before(), "refused", id="the generation before failed at the same place"),
        pytest.param(before(PEER), "counts", id="it failed elsewhere"),
        pytest.param(before(generation=2), "counts", id="it is the same generation"),
        pytest.param(None, "counts", id="nothing failed before"),
    ],
)
def test_size_is_refused_by_one_that_fails_twice_at_the_same_place(crash: Crash | None, want: str) -> None:
    """Only rank 0 checks the size, and the others fail for want of it."""
    assert judge(raised(0, at_s=98.0), raised(1, tail=PEER), raised(2, tail=PEER), crash=crash) == want


@pytest.mark.parametrize(
    ("members", "crash", "want"),
    [
        pytest.param([raised(0), raised(1), raised(2)], None, "counts", id="once may be chance"),
        pytest.param([raised(0), raised(1), raised(2)], before(), "refused", id="twice"),
        pytest.param([raised(0, at_s=98.0), raised(1, tail=PEER), raised(2, tail=PEER)], before(), "refused", id="rank 0 alone"),
        pytest.param([raised(0), raised(1), raised(2)], before(PEER), "counts", id="it failed elsewhere"),
        pytest.param([raised(0), raised(1), runs(2)], before(), "open", id="one has not failed yet"),
        pytest.param([raised(0), raised(1, tail=PEER), runs(2)], before(), "open", id="a peer has not failed yet"),
        pytest.param([raised(0, at_s=94.0), raised(1), runs(2)], before(), "counts", id="one has not failed in time"),
    ],
)  # fmt: skip
def test_size_that_a_loss_has_left_is_refused_by_two_generations(
    members: list[Worker], crash: Crash | None, want: str
) -> None:
    assert judge(*members, good=4, wanted=4, crash=crash) == want


@pytest.mark.parametrize(("action", "want"), [("Fail", "counts"), ("Ignore", "refused"), ("Restart", "refused")])
def test_rule_that_fails_the_job_comes_first(action: Any, want: str) -> None:
    rule = ExitRule(action=action, exit_codes=ExitCodes(values=[1]))
    assert judge(raised(0), raised(1), rules=[rule]) == want


def test_refusal_says_what_failed_and_where_the_job_goes() -> None:
    got = judge_trial(trial(raised(0), raised(1), raised(2)))
    assert got.refused == RefusedSize(
        workers=3, back_to=2, wanted=3, generation=2, at=timestamp(WALL), message=(
            "The script refuses 3 workers: it failed in every one of them before it had trained with them (AssertionError)."
        ),
    )  # fmt: skip


def test_members_are_waited_for_if_nobody_has_said_why_yet() -> None:
    others = runs(1), runs(2)
    assert judge(raised(0, at_s=98.0), *others, crash=before()) == "open"
    assert judge(raised(0, at_s=94.0), *others, crash=before()) == "refused"
    tail = TAIL.replace(LINE, "ValueError: no")
    assert judge(raised(0, at_s=98.0, tail=tail), *others, crash=before(tail)) == "refused"


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        pytest.param(("AssertionError", "ValueError: no"), "AssertionError; worker 1: ValueError: no", id="a bare line"),
        pytest.param(("ValueError: no", "ValueError: never"), "ValueError: no", id="the first one says why"),
        pytest.param(("AssertionError", "AssertionError:"), "AssertionError", id="nobody says why"),
        pytest.param(("AssertionError", "my.lib.Error: 3 is odd"), "AssertionError; worker 1: my.lib.Error: 3 is odd",
                     id="an exception of a module"),
        pytest.param(("AssertionError", "12:03:04 done"), "AssertionError", id="a time of day is no exception"),
        pytest.param(("AssertionError", "RuntimeError: Connection closed by peer"), "AssertionError", id="a lost connection"),
        pytest.param(("AssertionError", "RuntimeError: [pair.cc:534] Connection reset by peer", "ValueError: no"),
                     "AssertionError; worker 2: ValueError: no", id="one that lost its connection failed before"),
        pytest.param(("AssertionError", "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely "
                      "closed."), "AssertionError", id="a lost store"),
    ],
)  # fmt: skip
def test_member_that_says_why_is_quoted_beside_the_first_one(lines: tuple[str, str], quoted: str) -> None:
    """Ranks that are new to DeepSpeed's ZeRO 3 have a plain assert, and the others a sentence."""
    members = [raised(slot, at_s=98.0 + slot, last_line=line) for slot, line in enumerate(lines)]
    refused = judge_trial(trial(*members, crash=before())).refused
    assert refused is not None
    assert f" before it had trained with them ({quoted})." in refused.message


def test_open_trial_ends_in_time() -> None:
    got = judge_trial(trial(raised(0, at_s=98.0), runs(1)))
    assert isinstance(got.wait, Wait)
    assert (got.wait.reason, got.wait.until) == ("Settling", 98.0 + SETTLE_S)


@pytest.mark.parametrize(("good", "want"), [(4, 90.0 + HOLD_S), (2, None)])
def test_workers_keep_their_pods_while_a_smaller_size_is_on_trial(good: int, want: float | None) -> None:
    assert judge_trial(trial(runs(0), runs(1), runs(2), good=good)).held_until_s == want


@pytest.mark.parametrize(
    ("good", "size", "policy", "want"),
    [
        pytest.param(2, 3, {}, True, id="it trained with another size"),
        pytest.param(0, 3, {}, False, id="it has not trained yet: the first size fails as ever"),
        pytest.param(3, 3, {}, False, id="it trained with this size"),
        pytest.param(1, 3, {}, False, id="minReplicas was raised since"),
        pytest.param(2, 6, {"sizes": [2, 3, 6]}, True, id="the other size is permitted"),
        pytest.param(4, 6, {"sizes": [2, 3, 6]}, False, id="the other size is permitted no longer"),
    ],
)
def test_size_is_on_trial(good: int, size: int, policy: dict[str, Any], want: bool) -> None:
    limits = ElasticPolicy.model_validate({"minReplicas": 2, "maxReplicas": 8, **policy})
    assert may_go_back(limits, good, size) is want


@pytest.mark.parametrize(
    ("status", "since_s", "announced_s", "adopted", "want"),
    [
        pytest.param("True", 40, 20.0, True, 98.0, id="since it trains"),
        pytest.param("True", 500, 95.0, True, 133.0, id="the condition is that of the generation before"),
        pytest.param("False", 40, 20.0, True, None, id="it does not train"),
        pytest.param("True", 40, 20.0, False, None, id="not all have adopted it"),
    ],
)
def test_script_has_trained_with_a_size(
    status: str, since_s: float, announced_s: float, adopted: bool, want: float | None
) -> None:
    conditions = [{"type": "Training", "status": status, "lastTransitionTime": timestamp(WALL - since_s)}]
    current = make_current(announced_at_s=announced_s, adopted=adopted)
    assert steady_at_s(make_status({"conditions": conditions}), current, CLOCK) == want
    assert steady_at_s(make_status({}), current, CLOCK) is None


# --- how long it holds ---------------------------------------------------------------------------------------------


def refusal(workers: int = 3, back_to: int = 2, wanted: int = 3) -> dict[str, Any]:
    return RefusedSize(
        workers=workers, back_to=back_to, wanted=wanted, generation=2, at=timestamp(WALL), message="It refuses 3."
    ).to_dict()


def size(replicas: int, refused: dict[str, Any], known: Any = None, suspended: bool = False, **policy: Any) -> Size:
    job = make_job().with_replicas(replicas).with_spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 8, **policy})
    built = job.with_status({"refusedSize": refused}).build()
    return decide_size(built, known, CLOCK, runs=True, refused=standing_refusal(built, suspended=suspended))


@pytest.mark.parametrize(
    ("replicas", "refused", "given", "want"),
    [
        pytest.param(3, refusal(), {}, 2, id="the job goes back"),
        pytest.param(3, refusal(3, 4), {}, 4, id="it goes back to a larger size, too"),
        pytest.param(4, refusal(3, 4, wanted=4), {}, 4, id="a loss led to the refused size"),
        pytest.param(4, refusal(3, 2, wanted=4), {}, 4, id="a loss led to it while the job grew"),
        pytest.param(4, refusal(), {}, 4, id="another size is tried"),
        pytest.param(2, refusal(), {}, 2, id="the user wants the size that it went back to"),
        pytest.param(5, refusal(4, 2, wanted=4), {"sizes": [1, 2, 4]}, 2, id="an autoscaler writes a number that means the same"),
        pytest.param(3, refusal(), {"suspended": True}, 3, id="the job was suspended: it is repaired"),
        pytest.param(3, refusal(), {"sizes": [1, 2]}, 2, id="the list does not permit the refused size any more"),
        pytest.param(4, refusal(3, 4, wanted=4), {"minReplicas": 4}, 4, id="minReplicas is above it"),
    ],
)  # fmt: skip
def test_refusal_holds_until_another_size_is_wanted(
    replicas: int, refused: dict[str, Any], given: dict[str, Any], want: int
) -> None:
    assert size(replicas, refused, **given).replicas == want


@pytest.mark.parametrize(
    ("refused", "want"),
    [
        pytest.param(refusal(3, 2), None, id="growth: what is smaller may train as before"),
        pytest.param(refusal(3, 4), [4], id="a smaller size: nothing below the last good one is tried"),
        pytest.param(refusal(3, 4, wanted=4), [4], id="a loss: the lost worker is waited for"),
        pytest.param(
            refusal(3, 2, wanted=4), [2, 4], id="a loss while the job grows: the last good size, and what was wanted"
        ),
        pytest.param(refusal(1, 4, wanted=2), [2], id="a loss while it shrinks: what was wanted"),
    ],
)
def test_sizes_that_may_train_while_it_holds(refused: dict[str, Any], want: list[int] | None) -> None:
    assert RefusedSize.model_validate(refused).permitted == want


@pytest.mark.parametrize(
    ("refused", "want"),
    [
        (
            refusal(),
            "It refuses 3. Until spec.replicas changes, the job trains with 2 workers, as it did before. It tries 3 workers again",
        ),
        (
            refusal(3, 2, wanted=4),
            "It refuses 3. Until spec.replicas changes, the job trains with 2 or 4 workers only.",
        ),
        (refusal(3, 4, wanted=4), "It refuses 3. Until spec.replicas changes, the job trains with 4 workers only."),
    ],
)
def test_words(refused: dict[str, Any], want: str) -> None:
    assert refused_words(RefusedSize.model_validate(refused)).startswith(want)


def test_way_back_does_not_wait_for_the_cooldown() -> None:
    known = Growth(replicas=3, changed_at=timestamp(WALL - 1))
    got = size(3, refusal(3, 4), known, growthCooldownSeconds=600)
    assert (got.replicas, got.growth) == (4, Growth(replicas=4, changed_at=timestamp(WALL)))
    again = size(3, refusal(3, 4), got.growth, growthCooldownSeconds=600)
    assert again.growth == got.growth


def recalled(
    replicas: int,
    earlier: list[int],
    good: int | None = 4,
    known: dict[str, Any] | None = None,
    suspended: bool = False,
    **policy: Any,
) -> RefusedSize | None:
    limits = {"minReplicas": 1, "maxReplicas": 8, **policy}
    status = {
        "lastGoodSize": good, "refusedSize": known, "refusedSizes": [{"workers": n, "at": timestamp(WALL)} for n in earlier],
    }  # fmt: skip
    job = make_job().with_replicas(replicas).with_spec(elasticPolicy=limits).with_status(status).build()
    return standing_refusal(job, suspended=suspended)


@pytest.mark.parametrize(
    ("replicas", "earlier", "given", "want"),
    [
        pytest.param(3, [3], {}, (3, 4), id="an autoscaler comes back to a refused size"),
        pytest.param(5, [3, 5], {}, (5, 4), id="to another one"),
        pytest.param(4, [3], {}, None, id="another size"),
        pytest.param(3, [3], {"good": None}, None, id="no size has trained"),
        pytest.param(3, [3], {"good": 3}, None, id="it has trained with that size since"),
        pytest.param(3, [3], {"suspended": True}, None, id="a suspension"),
        pytest.param(3, [3], {"sizes": [1, 2, 4]}, None, id="the list leads to another size"),
        pytest.param(5, [4], {"good": 2, "sizes": [1, 2, 4]}, (4, 2), id="the list leads to a refused size"),
        pytest.param(3, [3], {"sizes": [1, 2, 3]}, None, id="the list does not permit the last good size"),
        pytest.param(3, [3], {"known": refusal(3, 2, wanted=3)}, (3, 2), id="it holds since then"),
        pytest.param(3, [3, 5], {"known": refusal(5, 2, wanted=5)}, (3, 4), id="another refusal held until now"),
    ],
)  # fmt: skip
def test_refusal_holds_again_when_the_job_wants_the_size_again(
    replicas: int, earlier: list[int], given: dict[str, Any], want: tuple[int, int] | None
) -> None:
    got = recalled(replicas, earlier, **given)
    assert (None if got is None else (got.workers, got.back_to)) == want


@pytest.mark.parametrize(("known", "want"), [(None, 0), (refusal(5, 2, wanted=5), refusal()["generation"])])
def test_generation_that_was_judged_stays_known(known: dict[str, Any] | None, want: int) -> None:
    """The agents repeat the exits of that generation."""
    got = recalled(3, [3, 5], known=known)
    assert got is not None
    assert got.generation == want


@pytest.mark.parametrize(
    ("stored", "new", "want"),
    [
        pytest.param([], None, None, id="there is none"),
        pytest.param([3], None, [3], id="nothing new"),
        pytest.param([3], 5, [3, 5], id="one more"),
        pytest.param([3, 5], 3, [5, 3], id="again: the newest stands last"),
        pytest.param(range(1, 17), 20, [*range(2, 17), 20], id="the oldest of 16 is forgotten"),
    ],
)
def test_refused_sizes_in_the_status_are_bounded(
    stored: Sequence[int], new: int | None, want: list[int] | None
) -> None:
    status = JobStatus(refused_sizes=[EarlierRefusal(workers=n, at=timestamp(WALL)) for n in stored] or None)
    got = with_refusal(status, None if new is None else RefusedSize.model_validate(refusal(new)))
    assert (None if got is None else [one.workers for one in got]) == want


@pytest.mark.parametrize(
    ("permitted", "refused", "want"),
    [
        pytest.param(None, [], None, id="nothing is refused"),
        pytest.param(None, [3, 6], [2, 4, 8], id="every number, in whole groups of 2"),
        pytest.param([1, 2, 4, 8], [4], [1, 2, 8], id="a list"),
        pytest.param([1, 2, 4, 8], [8], [1, 2, 4, 8], id="the size that the job is to have stays"),
    ],
)
def test_sizes_that_a_loss_may_lead_to(permitted: list[int] | None, refused: list[int], want: list[int] | None) -> None:
    earlier = [EarlierRefusal(workers=n, at=timestamp(WALL)) for n in refused]
    assert tried_sizes(permitted, earlier, smallest=2, size=8, per_group=2) == want
