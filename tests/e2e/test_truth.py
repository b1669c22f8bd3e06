"""`kubectl get trainingjobs -o wide`, sampled against the trainers' own trace through kills and a resize, tells the truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cluster.errors import ClusterError
from tests.e2e.training import TracedJob
from tests.e2e.truth import Asked, Row, judge

SAMPLE_S = 0.5


def test_columns_follow_the_trainers(jobs: Callable[..., TracedJob]) -> None:
    asked = [Asked(time.time(), 3)]
    job = jobs(elastic=(2, 5), environment={"STEPS": 900})
    rows: list[Row] = []
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(job, rows, done), daemon=True)
    sampler.start()
    job.training(workers=3, steps=20)
    job.kill_rank(1)
    job.training(workers=3, steps=20)
    for replicas in (2, 4):
        asked.append(Asked(time.time(), replicas))
        job.patch_replicas(replicas)
        job.training(workers=replicas, steps=20)
    job.wait(180, "the job does not end", state="Succeeded")
    ended = len(rows)
    while len(rows) < ended + 4 / SAMPLE_S:  # some lines of the ended job
        assert sampler.is_alive()
        done.wait(SAMPLE_S)
    done.set()
    sampler.join()
    trace = job.trace()
    wrong = [problem for row in rows for problem in judge(row, trace, asked)]
    print(f"{len(rows)} samples: " + ", ".join(sorted({f"{r.cells['STATE']} {r.cells['READY']}" for r in rows})))
    assert {r.cells["STATE"] for r in rows} >= {"Starting", "Running", "Succeeded"}
    assert not wrong, "\n".join(wrong[:10])


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
