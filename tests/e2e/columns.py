"""`kubectl get trainingjobs -o wide`, again and again while a test breaks things."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from cluster.errors import ClusterError
from harness.job import JobView
from tests.e2e.truth import Row, holes

SAMPLE_S = 0.5


@contextmanager
def sampled(job: JobView) -> Iterator[list[Row]]:
    """Ask for the job's line every SAMPLE_S while the block runs; the list grows meanwhile.

    Fails where there was no answer for long: what is not seen is not judged.
    """
    rows: list[Row] = []
    errors: list[str] = []
    done = threading.Event()
    begun = time.time()
    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(_sample, job, rows, errors, done)
        try:
            yield rows
        finally:
            done.set()
        sampler.result()
    unseen = holes(rows, begun, time.time())
    assert not unseen, "\n".join([*unseen, *errors[-3:]])


@contextmanager
def watched(job: JobView) -> Iterator[list[str]]:
    """List each state that the job is in while the block runs: a recovery may be shorter than SAMPLE_S."""
    states: list[str] = []
    get = ("get", "trainingjobs", job.name, "--watch", "--output=jsonpath={.status.phase}{'\\n'}")
    process = job.kubectl.stream("--namespace", job.namespace, *get)
    assert process.stdout is not None
    lines = process.stdout
    reader = threading.Thread(target=lambda: states.extend(map(str.strip, lines)), daemon=True)
    reader.start()
    try:
        yield states
        assert process.poll() is None, "kubectl stopped watching"
    finally:
        process.kill()
        process.wait()
        reader.join()


def _sample(job: JobView, rows: list[Row], errors: list[str], done: threading.Event) -> None:
    due = time.monotonic()
    while not done.wait(max(0.0, due - time.monotonic())):
        due = max(due + SAMPLE_S, time.monotonic())
        before = time.time()
        try:
            get = ("get", "trainingjobs", job.name, "-o", "wide", "--request-timeout=5s")
            text = job.kubectl.run("--namespace", job.namespace, *get)
        except ClusterError as error:  # many in a row make a hole
            errors.append(f"{time.time():.2f}: {error}")
            continue
        rows.append(Row(before, time.time(), cells(text)))


def cells(text: str) -> dict[str, str]:
    """Return {column: cell} of kubectl's table with one line."""
    header, line = text.splitlines()
    columns = [(found[0], found.start()) for found in re.finditer(r"\S+", header)]
    ends = [start for _, start in columns[1:]] + [len(line)]
    return {word: line[start:end].strip() for (word, start), end in zip(columns, ends, strict=True)}
