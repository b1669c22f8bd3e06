"""A part of `bench.gpu`: its record, its rows of the table, and the context that it works with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gpu.machine import Machine
from bench.trials import BenchError
from harness.polling import until

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
SAMPLES = REPOSITORY / "manifests" / "samples" / "train"
NOT_ON_CPU = "not judged on a CPU"


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure, and with an aim also a verdict."""

    what: str
    found: str
    aim: str = ""
    holds: bool | None = None
    """True if the figure meets its aim. None: there is no aim, or `unjudged` has the reason why it is not judged."""
    unjudged: str = ""
    value: Any = None
    """The figure in the JSON file, where `found` rounds it."""

    @property
    def verdict(self) -> str:
        """Text of the last column."""
        if not self.aim:
            return ""
        return {True: "holds", False: "FAILS", None: self.unjudged or "not judged"}[self.holds]

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON. A part writes it to its pipe, and the JSON file has it."""
        return asdict(self)


@dataclass(frozen=True)
class Sizes:
    """The amount of work of each part."""

    worlds: tuple[int, ...]
    """Numbers of ranks that have to give equal results."""
    steps: int
    """Steps of the runs whose losses and hashes are compared."""
    kills: int
    connecting_kills: int
    sizes: tuple[int, ...]
    """Numbers of ranks of the job that is scaled."""
    steady: int
    """Steps that each rank makes between two faults."""
    width: int
    """Width of the perceptron that is trained while ranks are killed."""
    model: str
    """Size of the language model: `gpt2` or `tiny`."""
    copies: int
    """Snapshots and checkpoints whose cost is measured, after the first one."""
    meshes: tuple[str, ...] | None
    """Split models: names in `bench.gpu.parts.meshes.CASES`. None means all."""
    read_at: tuple[str, ...] | None
    """Splits that read a checkpoint of parts: names in `bench.gpu.parts.meshes.READERS`. None means all."""
    killed_meshes: tuple[str, ...]
    """Dimensions of regroup.mesh() over which two groups that lose ranks split their model."""
    group_kills: int
    """Kills in each job of two model groups."""
    microbatches: tuple[int, ...]
    """Sequences in a microbatch of GPT-2. The first measures idle time, the last is compared with the plain loop."""
    gpt_steps: int
    pairs: int
    """Blocks of the session. Each has a block of DDP beside it."""


ON_GPU = Sizes(
    worlds=(1, 2, 4),
    steps=60,
    kills=20,
    connecting_kills=10,
    sizes=(2, 3, 2, 3, 2),
    steady=15,
    width=2048,
    model="gpt2",
    copies=3,
    meshes=None,
    read_at=None,
    killed_meshes=("shard", "pipeline"),
    group_kills=2,
    microbatches=(16, 64),
    gpt_steps=5,
    pairs=10,
)
DRY = Sizes(
    worlds=(1, 2),
    steps=10,
    kills=2,
    connecting_kills=1,
    sizes=(2, 3, 2),
    steady=5,
    width=64,
    model="tiny",
    copies=2,
    meshes=("fsdp", "pipeline"),
    read_at=("tensor: 2",),
    killed_meshes=("pipeline",),
    group_kills=1,
    microbatches=(2, 4),
    gpt_steps=3,
    pairs=4,
)
"""Sizes of a dry run on CPUs. It runs every line of each part, in about three minutes on two cores."""


@dataclass(frozen=True)
class Context:
    """The machine, the directory and the deadline of a part, and the ways to start processes."""

    machine: Machine
    out: Path
    """Directory of the part's logs."""
    ends_s: float
    """End of the part, in time.monotonic() seconds. Every wait of a part ends before."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of this run."""
        return ON_GPU if self.machine.is_gpu else DRY

    def left_s(self) -> float:
        """Return the seconds that the part may still wait, at least one. Three seconds are kept for the sentence at its end."""
        return max(1.0, self.ends_s - time.monotonic() - 3.0)

    def environment(self, ranks: int = 1, **more: str) -> dict[str, str]:
        """Return the environment for this many ranks. Raises BenchError if they cannot form."""
        problem = self.machine.lacks(ranks)
        if problem:
            raise BenchError(problem)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("REGROUP_")}
        return {**inherited, **self.machine.environment(ranks), **more}

    def judged(self, what: str, found: str, aim: str, holds: bool, value: Any = None, *, speed: bool = False) -> Row:
        """Return a row with a verdict. A row with `speed` is about time, and not judged on a CPU."""
        if speed and not self.machine.is_gpu:
            return Row(what, found, aim, None, NOT_ON_CPU, value)
        return Row(what, found, aim, holds, "", value)

    @contextmanager
    def started(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Process]:
        """Run a command beside others; its output goes to `out`/NAME.log. It is ended when the `with` block ends."""
        log = self.out / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            yield Process(name, process, log, self.left_s)
        finally:
            process.terminate()
            try:
                process.wait(min(20.0, self.left_s()))
            except subprocess.TimeoutExpired:
                process.kill()  # agents of `regroup run` die with it
                process.wait()

    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Run a command to its end and return its output. Raises BenchError."""
        with self.started(name, command, environment) as process:
            return process.finished()


@dataclass(frozen=True)
class Process:
    """A command that a part has started."""

    name: str
    _process: subprocess.Popen[bytes]
    log: Path
    _left_s: Callable[[], float]

    def text(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Return the first true value of `condition`. Raises BenchError if the process or the part's time ends first."""

        def there() -> Any:
            code = self._process.poll()
            value = condition()
            if not value and code is not None:
                raise BenchError(f"{self.name} ended with exit code {code} before {what}. {self.last_lines()}")
            return value

        return until(there, what, timeout_s=self._left_s(), every_s=0.05, details=self.last_lines, error=BenchError)

    def finished(self) -> str:
        """Wait for the end of the process and return its output. Raises BenchError if it fails or the part's time is over."""
        try:
            code = self._process.wait(self._left_s())
        except subprocess.TimeoutExpired:
            raise BenchError(f"{self.name} had not ended when the part's time was over. {self.last_lines()}") from None
        if code:
            raise BenchError(f"{self.name} ended with exit code {code}. {self.last_lines()}")
        return self.text()

    def last_lines(self) -> str:
        """Return the end of the output, for an error sentence."""
        return "\n  ".join([f"The last lines of {self.log}:", *self.text().splitlines()[-12:]])


@dataclass(frozen=True)
class Part:
    """One part. `run` measures, and passes on each row as soon as it has it."""

    name: str
    what: str
    """One line for `--help`."""
    bound_s: float
    """Bound on a GPU, in seconds."""
    run: Callable[[Context, Callable[[Row], None]], None]


def regroup_run(ranks: int, *arguments: str, script: Sequence[str]) -> list[str]:
    """Return the command of a job with this many workers of one process each."""
    return [sys.executable, "-m", "regroup_cli", "run", "--workers", str(ranks), *arguments, *script]


def regroup_train(*arguments: str) -> list[str]:
    """Return the command of one process that trains by a configuration."""
    return [sys.executable, "-m", "regroup_cli", "train", *arguments]


def changes(*fields: str) -> list[str]:
    """Return FIELD=VALUE pairs in the form of `--set`."""
    return [word for field in fields for word in ("--set", field)]
