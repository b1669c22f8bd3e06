"""The (maxRestarts + 1)-th failure within the window fails the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regroup_operator.model.plan import Failure
from regroup_operator.plan.failures.restarts import KUBECTL_LOGS, judge_restarts, restart_cause

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
    got = judge_restarts(recent=recent, new=new, max_restarts=max_restarts, window_s=600.0, now=NOW, logs="")
    assert (got.recent, got.message is not None) == (kept, fails)


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
        pytest.param(IN_POD, "kubectl logs --namespace=ns d-worker-1-0 --container=trainer", id="the log of a process"),
        pytest.param(
            replace(IN_POD, container=True),
            "d-worker-1-0 --container=trainer --previous",
            id="the log of a container that ended",
        ),
    ],
)
def test_sentence_names_slot_code_and_last_line(failure: Failure, says: str) -> None:
    got = judge_restarts(recent=[], new=[failure], max_restarts=0, window_s=600.0, now=NOW, logs=KUBECTL_LOGS)
    assert got.message is not None
    assert says in got.message
    assert "spec.recovery.maxRestarts allows 0." in got.message
