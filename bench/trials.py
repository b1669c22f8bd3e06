"""Start a training under a launcher, kill a rank, wait for the next commit, again and again; end it without leftovers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.commits import BENCH_LOG, LogReader, first_after, pids_of, steady_epoch
from harness.polling import until

POLL_S = 0.05
"""Recovery is told by the time stamps in the log, so looking seldom costs no precision and leaves the cores alone."""
DEADLINE_S = 300.0
"""Longest wait for a steady group or for the next commit; far above any recovery that is worth a number."""


class BenchError(Exception):
    """The benchmark cannot go on; the text is for the person who ran it."""


@dataclass(frozen=True)
class Trial:
    """One kill. `recovery_s` is from the signal to the first commit of the group formed anew."""

    recovery_s: float
    imports_s: float
    """Of that, the longest time that a process started for it took from its start to the end of its imports; 0: none."""
    killed_rank: int


@dataclass
class _Run:
    process: subprocess.Popen[bytes]
    log: LogReader
    output: Path

    def wait(self, what: str, is_done: Callable[[], bool]) -> None:
        """Poll the log until `is_done`. Raises BenchError with the launcher's last lines."""

        def there() -> bool:
            self.log.poll()
            code = None if is_done() else self.process.poll()
            if code is not None:
                raise BenchError(f"The launcher ended with exit code {code} before {what}. {self._last_lines()}")
            return is_done()

        until(there, what, timeout_s=DEADLINE_S, every_s=POLL_S, details=self._last_lines, error=BenchError)

    def _last_lines(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines()[-15:]
        return "\n  ".join(["The launcher's last lines:", *lines])


def measure(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: Path,
    ranks: int,
    trials: int,
    steady_steps: int,
    seed: int,
    progress: Callable[[Trial], None],
) -> list[Trial]:
    """Return one Trial a kill of a random rank. Before each, every rank has made `steady_steps` steps in one epoch.

    `output` takes what the launcher and its processes print. Raises BenchError.
    """
    rng = random.Random(seed)
    done: list[Trial] = []
    with _running(command, environment, output) as run:
        for number in range(1, trials + 1):
            run.wait(
                f"{ranks} steady ranks before kill {number}",
                lambda: steady_epoch(run.log.commits, ranks=ranks, steps=steady_steps) is not None,
            )
            epoch = steady_epoch(run.log.commits, ranks=ranks, steps=steady_steps)
            assert epoch is not None
            run.log.forget(epoch)
            done.append(_kill(run, epoch, rng, number))
            progress(done[-1])
    return done


def _kill(run: _Run, epoch: int, rng: random.Random, number: int) -> Trial:
    old = pids_of(run.log.commits, epoch)
    victim = rng.choice(old)
    rank = next(commit.rank for commit in run.log.commits if commit.pid == victim)
    killed_s = time.time()
    os.kill(victim, signal.SIGKILL)
    run.wait(f"the first commit after kill {number}", lambda: first_after(run.log.commits, epoch) is not None)
    run.log.poll()  # an earlier commit may lie in a file that was read before it was written
    first = first_after(run.log.commits, epoch)
    assert first is not None
    new = set(pids_of(run.log.commits, first.epoch)) - set(old)
    imports_s = max((run.log.imports[pid].imports_s for pid in new if pid in run.log.imports), default=0.0)
    return Trial(first.t_s - killed_s, imports_s, rank)


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], output: Path) -> Iterator[_Run]:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, output.open("wb") as out:
        log = LogReader(Path(directory))
        process = subprocess.Popen(
            command,
            env={**environment, BENCH_LOG: directory, "BENCH_CHECKPOINT": f"{directory}/checkpoint.pt"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield _Run(process, log, output)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _end_leftovers(directory)


def _end_leftovers(directory: str) -> None:
    """Kill processes of this run that outlived their launcher: exactly those with its log in their environment."""
    mark = f"{BENCH_LOG}={directory}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                continue  # it has just ended, or is not ours
