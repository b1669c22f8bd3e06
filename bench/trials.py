"""Runs a training under a launcher, kills a rank, waits until all ranks commit again, and repeats. No process is left."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.commits import (
    BENCH_LOG,
    LogReader,
    first_after,
    full_after,
    is_whole_again,
    longest_gap,
    pids_of,
    rolled_back,
    steady_epoch,
)
from bench.leftovers import end_leftovers, marked
from harness.polling import until

POLL_S = 0.05
"""Time between two looks at the log. A long one costs no precision, since the log has time stamps."""
DEADLINE_S = 300.0
"""Longest wait for a steady group or for the next commit; far above any recovery that is worth a number."""

NEXT_WITHIN_S = 0.3
"""Upper bound of the random wait before a new process is killed, too, so that kills meet different moments of its start."""


class BenchError(Exception):
    """The benchmark cannot go on. The text is for the person who ran it."""


@dataclass(frozen=True)
class Trial:
    """One kill and what followed. Times are in seconds from the signal."""

    recovery_s: float
    """Time to the first commit of the group formed anew."""
    imports_s: float
    """Longest import of a process that is in this commit and was started after the kill; 0 if there is none."""
    killed_rank: int
    world: int
    """Number of ranks in this commit."""
    full_s: float
    """Time to the first commit with all ranks."""
    full_imports_s: float
    """Longest import of any process that was started after the kill."""
    kept: int
    """Number of processes that trained before the kill and train after it."""
    rolled_back: int
    """Number of committed steps that were committed again."""


@dataclass
class Run:
    """A training under its launcher. `running` starts and ends it."""

    process: subprocess.Popen[bytes]
    log: LogReader
    output: Path
    mark: str
    """Value of BENCH_LOG in the environment of each of its processes."""

    def living(self) -> set[int]:
        """Return the ids of its processes that have not ended, the launcher's included."""
        return set(marked(BENCH_LOG, self.mark))

    def wait(self, what: str, is_done: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Poll the log until `is_done`. Raises BenchError with the launcher's last lines."""

        def there() -> bool:
            self.log.poll()
            code = None if is_done() else self.process.poll()
            if code is not None:
                raise BenchError(f"The launcher ended with exit code {code} before {what}. {self._last_lines()}")
            return is_done()

        until(there, what, timeout_s=timeout_s, every_s=POLL_S, details=self._last_lines, error=BenchError)

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
    is_next: Callable[[int], bool] | None = None,
) -> list[Trial]:
    """Kill a random rank `trials` times and return one Trial a kill.

    Before each kill, every rank has made `steady_steps` steps in one epoch. `output` takes what the launcher and its
    processes print. `is_next(pid)` is asked about processes that were started after a kill. The first one for which it
    is true is killed, too, at most `NEXT_WITHIN_S` later. With None a trial kills only one process. Raises BenchError.
    """
    rng = random.Random(seed)
    done: list[Trial] = []
    with running(command, environment, output) as run:
        for number in range(1, trials + 1):
            run.wait(
                f"{ranks} steady ranks before kill {number}",
                lambda: steady_epoch(run.log.commits, ranks=ranks, steps=steady_steps) is not None,
            )
            epoch = steady_epoch(run.log.commits, ranks=ranks, steps=steady_steps)
            assert epoch is not None
            run.log.forget(epoch)
            done.append(_kill(run, epoch, ranks, rng, number, is_next))
            progress(done[-1])
    return done


def measure_resize(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: Path,
    ranks: tuple[int, int],
    trials: int,
    steady_steps: int,
    scale: Callable[[int], None],
) -> list[float]:
    """Grow a job `trials` times and return for each growth the longest time without a commit of any rank, in seconds.

    The job grows from the first number of ranks to the second. `scale(ranks)` asks for a size. Raises BenchError.
    """
    found = measure_pauses(
        command, environment, output=output, sizes=ranks * trials, steady_steps=steady_steps, scale=scale
    )
    return found[::2]


def measure_pauses(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: Path,
    sizes: Sequence[int],
    steady_steps: int,
    scale: Callable[[int], None],
    progress: Callable[[int, float], None] = lambda _size, _pause_s: None,
) -> list[float]:
    """Resize a job and return for each change the longest time without a commit of any rank, in seconds.

    The job starts with the first of `sizes` and is brought to the others in turn. `scale(ranks)` asks for a size, and
    `progress(ranks, pause_s)` is called after each change. Raises BenchError.
    """
    done: list[float] = []
    with running(command, environment, output) as run:
        for number, size in enumerate(sizes):
            if number:
                scale(size)
            run.wait(
                f"{size} steady ranks for resize {number}",
                lambda size=size: steady_epoch(run.log.commits, ranks=size, steps=steady_steps) is not None,  # type: ignore[misc]
            )
            if number:
                done.append(longest_gap(run.log.commits))
                progress(size, done[-1])
            epoch = steady_epoch(run.log.commits, ranks=size, steps=steady_steps)
            assert epoch is not None
            run.log.forget(epoch)
    return done


def _kill(
    run: Run, epoch: int, ranks: int, rng: random.Random, number: int, is_next: Callable[[int], bool] | None
) -> Trial:
    before = set(run.log.imports)
    old = pids_of(run.log.commits, epoch)
    victim = rng.choice(old)
    rank = next(commit.rank for commit in run.log.commits if commit.pid == victim)
    killed_s = time.time()
    os.kill(victim, signal.SIGKILL)
    if is_next is not None:
        found: list[int] = []

        def started() -> bool:
            found[:] = [pid for pid in run.log.imports if pid not in before and is_next(pid)]
            return bool(found)

        run.wait(f"the next process can be killed, too, after kill {number}", started)
        time.sleep(rng.random() * NEXT_WITHIN_S)  # the fault's moment is random: nothing is waited for
        with suppress(ProcessLookupError):
            os.kill(found[0], signal.SIGKILL)
    run.wait(
        f"the first commit of all {ranks} ranks after kill {number}",
        lambda: is_whole_again(run.log.commits, epoch, ranks=ranks),
    )
    run.log.poll()  # an earlier commit may lie in a file that was read before it was written
    return trial_of(run.log, epoch, ranks=ranks, killed_s=killed_s, killed_rank=rank)


def trial_of(log: LogReader, epoch: int, *, ranks: int, killed_s: float, killed_rank: int) -> Trial:
    """Return the Trial of a kill in `epoch`, from the log, once all ranks have committed together again. Pure."""
    old = set(pids_of(log.commits, epoch))
    first, full = first_after(log.commits, epoch), full_after(log.commits, epoch, ranks=ranks)
    assert first is not None
    assert full is not None

    def pids(last_epoch: float) -> set[int]:
        return {commit.pid for commit in log.commits if epoch < commit.epoch <= last_epoch}

    def imports_s(last_epoch: float) -> float:
        new = pids(last_epoch) - old
        return max((log.imports[pid].imports_s for pid in new if pid in log.imports), default=0.0)

    return Trial(
        recovery_s=first.t_s - killed_s,
        imports_s=imports_s(first.epoch),
        killed_rank=killed_rank,
        world=first.world,
        full_s=full.t_s - killed_s,
        full_imports_s=imports_s(math.inf),
        kept=len(old & pids(math.inf)),
        rolled_back=rolled_back(log.commits, epoch),
    )


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], output: Path) -> Iterator[Run]:
    """Start a training, whose processes log their commits and print into `output`. At the end none of them is left."""
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
            yield Run(process, log, output, directory)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            end_leftovers(BENCH_LOG, directory)
