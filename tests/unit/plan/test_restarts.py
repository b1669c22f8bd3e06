"""The (maxRestarts + 1)-th failure within the window fails the job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup_operator.api.status import Restarts
from regroup_operator.model.plan import Failure
from regroup_operator.plan.failures.restarts import (
    KUBECTL_LOGS,
    Recent,
    judge_restarts,
    read_recent,
    restart_cause,
    with_recent,
)

NOW = 1000.0


def fail(at: float = NOW, worker: str = "1", code: int | None = 1, line: str = "") -> Failure:
    return Failure(at, worker, code, line)


@pytest.mark.parametrize(
    ("recent", "new", "max_restarts", "kept", "fails"),
    [
        pytest.param([], [fail()], 1, (NOW,), False, id="the first of one allowed"),
        pytest.param([900.0], [fail()], 1, (900.0, NOW), True, id="the second of one allowed"),
        pytest.param([], [fail()], 0, (NOW,), True, id="none allowed"),
        pytest.param([900.0], [fail()], 2, (900.0, NOW), False, id="exactly as many as allowed"),
        pytest.param(
            [399.0, 400.0, 401.0], [fail()], 2, (401.0, NOW), False, id="older than the window does not count"
        ),
        pytest.param([900.0, 950.0], [], 1, (900.0, 950.0), False, id="without a new one nothing is judged"),
        pytest.param([], [fail(990.0), fail(980.0)], 1, (980.0, 990.0), True, id="two at once, oldest first"),
        pytest.param([], [fail(300.0)], 0, (), False, id="one that is told late and lies before the window"),
        pytest.param([500.0, 600.0, 700.0], [fail()], 1, (700.0, NOW), True, id="no more is kept than can matter"),
    ],
)
def test_judge_restarts(
    recent: list[float], new: list[Failure], max_restarts: int, kept: tuple[float, ...], fails: bool
) -> None:
    before = tuple((at, 1) for at in recent)
    got = judge_restarts(recent=before, new=new, max_restarts=max_restarts, window_s=600.0, now=NOW, logs="")
    assert (got.recent, got.verdict is not None) == (tuple((at, 1) for at in kept), fails)


@pytest.mark.parametrize(
    ("recent", "new", "max_restarts", "kept", "says"),
    [
        pytest.param([], [NOW - 0.1, NOW - 0.9], 5, [(NOW - 0.1, 2)], None, id="of one second"),
        pytest.param([(NOW - 1, 3)], [NOW] * 2, 5, [(NOW - 1, 3), (NOW, 2)], None, id="as many as allowed"),
        pytest.param([(NOW - 1, 4)], [NOW] * 2, 5, [(NOW - 1, 4), (NOW, 2)], "6 failures", id="one more"),
        pytest.param([(NOW - 1, 4)], [NOW] * 2, 3, [(NOW - 1, 2), (NOW, 2)], "6 failures", id="no more is kept than can matter"),
    ],
)  # fmt: skip
def test_failures_of_one_second_have_one_time(
    recent: list[tuple[float, int]],
    new: list[float],
    max_restarts: int,
    kept: list[tuple[float, int]],
    says: str | None,
) -> None:
    got = judge_restarts(
        recent=tuple(recent), new=[fail(at) for at in new], max_restarts=max_restarts, window_s=600.0, now=NOW, logs=""
    )
    assert got.recent == tuple(kept)
    assert (got.verdict is None) if says is None else got.verdict is not None and says in got.verdict.message


@pytest.mark.parametrize("window_s", [3600, 31_536_000])
def test_status_stays_small_however_many_processes_fail_and_none_is_forgotten(window_s: int) -> None:
    """40,000 processes that raise every half minute, for longer than the window or for a thousand times."""
    recent: Recent = ()
    now, each = 1e9, 40_000
    rounds = min(1000, 2 * window_s // 30)
    for _ in range(rounds):
        now += 30.0
        restarts = with_recent(Restarts(), recent)
        new = [fail(now)] * 10
        judged = judge_restarts(
            recent=read_recent(restarts), new=new, max_restarts=10**6, window_s=window_s, now=now, logs=""
        )
        recent = tuple((at, number * each // 10 if at == now else number) for at, number in judged.recent)
        assert len(with_recent(Restarts(), recent).model_dump_json()) < 64 * 2**10
    total = sum(number for _, number in recent)
    assert total >= min(10**6 + 1, each * min(rounds, window_s // 30))


@pytest.mark.parametrize(
    ("restarts", "want"),
    [
        pytest.param({}, (), id="none yet"),
        pytest.param({"recent": ["1970-01-01T00:00:05Z"]}, ((5.0, 1),), id="one each"),
        pytest.param({"recent": ["1970-01-01T00:00:05Z"], "recent_counts": [7]}, ((5.0, 7),), id="seven at once"),
    ],
)  # fmt: skip
def test_counted_failures_are_read(restarts: dict[str, Any], want: tuple[tuple[float, int], ...]) -> None:
    assert read_recent(Restarts(**restarts)) == want


@pytest.mark.parametrize(
    ("failure", "want"),
    [
        pytest.param(fail(code=1), "ExitCode", id="exit code"),
        pytest.param(fail(code=0), "ExitCode", id="before its last step"),
        pytest.param(fail(code=None), "ExitCode", id="unknown"),
        pytest.param(fail(code=255), "ExitCode", id="exit(-1)"),
        pytest.param(fail(code=-9), "Signal", id="a process that was killed"),
        pytest.param(fail(code=139), "Signal", id="a container that was"),
        pytest.param(replace(fail(code=-9), hung=True), "Hung", id="by the operator, as it hung"),
        pytest.param(replace(fail(code=137), reason="OOMKilled"), "OOMKilled", id="by the kernel, for its memory"),
    ],
)
def test_cause_of_a_restart(failure: Failure, want: str) -> None:
    assert restart_cause(failure) == want


IN_POD = Failure(NOW, "1", 1, namespace="ns", pod="d-worker-1-0")


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        pytest.param(fail(), "Worker 1 ended with exit code 1; 1 failure in 600 s", id="exit code"),
        pytest.param(fail(code=-11), "ended with signal 11;", id="signal"),
        pytest.param(fail(code=None), "ended with an unknown exit code;", id="unknown"),
        pytest.param(fail(line="ValueError: no"), 'exit code 1: "ValueError: no";', id="with the last line"),
        pytest.param(fail(worker="3.2"), "Worker 3.2 ended", id="pod of a slot"),
        pytest.param(
            replace(IN_POD, reason="OOMKilled", detail="limit 1 GiB"),
            "exit code 1 (OOMKilled: limit 1 GiB);",
            id="memory",
        ),
        pytest.param(IN_POD, "Worker 1 (pod d-worker-1-0) ended", id="with its pod"),
        pytest.param(IN_POD, "kubectl logs --namespace=ns d-worker-1-0", id="the log of a process"),
        pytest.param(
            replace(IN_POD, container=True),
            "d-worker-1-0 --previous",
            id="the log of a container that ended",
        ),
        pytest.param(
            replace(IN_POD, container=True, init="setup"),
            "Init container setup of worker 1 (pod d-worker-1-0) ended",
            id="an init container",
        ),
        pytest.param(replace(IN_POD, container=True, init="setup"), "d-worker-1-0 --container=setup", id="and its log"),
    ],
)
def test_sentence_names_slot_code_and_last_line(failure: Failure, says: str) -> None:
    got = judge_restarts(recent=(), new=[failure], max_restarts=0, window_s=600.0, now=NOW, logs=KUBECTL_LOGS)
    assert got.verdict is not None
    assert says in got.verdict.message
    assert "spec.recovery.maxRestarts allows 0." in got.verdict.message


@pytest.mark.parametrize(
    ("before", "max_restarts", "code"),
    [
        pytest.param(0, 0, 3, id="the first of three: the others lost their peer"),
        pytest.param(0, 1, 4, id="one was allowed"),
        pytest.param(2, 2, 3, id="two have been, and none of these is allowed"),
        pytest.param(5, 2, 3, id="maxRestarts was lowered meanwhile"),
        pytest.param(0, 3, None, id="all are allowed"),
    ],
)
def test_failure_that_is_one_too_many_is_named(before: int, max_restarts: int, code: int | None) -> None:
    """Whatever the order in which they were heard."""
    new = [fail(NOW - 1, "2", 4), fail(NOW, "0", 5), fail(NOW - 2, "1", 3)]
    got = judge_restarts(
        recent=((NOW - 9, before),) if before else (),
        new=new,
        max_restarts=max_restarts,
        window_s=600.0,
        now=NOW,
        logs="",
    )
    assert (None if got.verdict is None else got.verdict.exit_code) == code
    if got.verdict is not None:
        assert f"ended with exit code {code};" in got.verdict.message


@pytest.mark.parametrize(
    ("failure", "want"),
    [
        pytest.param(fail(code=1), 1, id="an exit code"),
        pytest.param(fail(code=255), 255, id="exit(-1)"),
        pytest.param(fail(code=-9), 137, id="a signal, as shells have it"),
        pytest.param(replace(fail(code=-9), reason="OOMKilled"), 137, id="by the kernel, for its memory"),
        pytest.param(replace(fail(code=-9), hung=True), None, id="by the operator, as it hung"),
        pytest.param(fail(code=0), None, id="0 before the last step is no success"),
        pytest.param(fail(code=None), None, id="unknown"),
        pytest.param(
            replace(fail(code=137), container=True), None, id="a container: its agent is no process of the script"
        ),
    ],
)
def test_exit_code_of_a_script(failure: Failure, want: int | None) -> None:
    assert failure.script_code == want
