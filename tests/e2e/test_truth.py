"""`kubectl get trainingjobs -o wide`, sampled against the trainers' own trace through kills and a resize, tells the truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import ClusterError
from tests.e2e.trace import Trace
from tests.e2e.training import TracedJob

SAMPLE_S = 0.5
LAG_S, STEP_LAG_S = 2.0, 12.0
SLACK_S = 0.6
"""Between two samples, and the time kubectl itself takes on two cores."""


@dataclass(frozen=True)
class Row:
    """One line of kubectl. `before` and `after` enclose the moment it was true."""

    before: float
    after: float
    cells: dict[str, str]


def test_columns_follow_the_trainers(jobs: Callable[..., TracedJob]) -> None:
    job = jobs(elastic=(2, 5), environment={"STEPS": 900})
    rows: list[Row] = []
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(job, rows, done), daemon=True)
    sampler.start()
    job.training(workers=3, steps=20)
    job.kill_rank(1)
    job.training(workers=3, steps=20)
    job.patch_replicas(2)
    job.training(workers=2, steps=20)
    job.wait(180, "the job does not end", state="Succeeded")
    time.sleep(LAG_S)
    done.set()
    sampler.join()
    trace = job.trace()
    wrong = [problem for row in rows for problem in _judge(row, trace)]
    print(f"{len(rows)} samples, states {sorted({r.cells['STATE'] for r in rows})}")
    assert len(rows) > 20
    assert not wrong, wrong[:10]


def _sample(job: TracedJob, rows: list[Row], done: threading.Event) -> None:
    while not done.wait(SAMPLE_S):
        before = time.time()
        try:
            text = job.kubectl.run("--namespace", job.namespace, "get", "trainingjobs", job.name, "-o", "wide")
        except ClusterError:
            continue
        header, line = text.splitlines()
        starts = [header.index(word) for word in header.split()]
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        rows.append(Row(before, time.time(), dict(zip(header.split(), cells, strict=True))))


def _judge(row: Row, trace: Trace) -> list[str]:
    problems = []
    state, step, generation = row.cells["STATE"], row.cells["STEP"], row.cells["GENERATION"]
    recent = [c for c in trace.commits if row.before - LAG_S - SLACK_S <= c.t <= row.after]
    if state == "Running" and not recent:
        problems.append(f"Running, but nobody committed in the {LAG_S} s before {row.before:.2f}: {row.cells}")
    if state == "Succeeded" and len(trace.done) < 1:
        problems.append("Succeeded, but nobody finished")
    if step:
        if int(step) > trace.step_at(row.after) + 1:
            problems.append(f"step {step} was not yet committed at {row.after:.2f}")
        if int(step) < trace.step_at(row.before - STEP_LAG_S - SLACK_S):
            problems.append(f"step {step} lags more than {STEP_LAG_S} s at {row.before:.2f}")
    if generation and state == "Running":
        trained = [c.generation for c in trace.commits if c.t <= row.before - LAG_S - SLACK_S]
        if trained and int(generation) < trained[-1]:
            problems.append(f"generation {generation} lags behind {trained[-1]} at {row.before:.2f}")
    ready, wanted = row.cells["READY"].split("/") if "/" in row.cells["READY"] else ("0", "0")
    if state == "Running" and not 1 <= int(ready) <= int(wanted):
        problems.append(f"Running with {row.cells['READY']} ready")
    return problems
