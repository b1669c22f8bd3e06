"""torchft as one of `bench.peers`: its packages, its settings, and the command that starts it.

The packages are no dependency of the project. They are installed into a directory under .cache/bench, at the versions
and hashes in bench/torchft.txt. torchft's processes import them together with the project's own torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.trials import BenchError

REPOSITORY = Path(__file__).resolve().parent.parent
PINS = REPOSITORY / "bench" / "torchft.txt"
CACHE = REPOSITORY / ".cache" / "bench"
UV = REPOSITORY / ".uv" / "bin" / "uv"
INSTALL_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Settings:
    """The timeouts that decide how soon the survivors of a kill go on, in milliseconds."""

    join_timeout_ms: int
    """Lighthouse: time for which groups that ask for a quorum wait for a group that sends heartbeats and does not ask."""
    heartbeat_timeout_ms: int
    """Lighthouse: time without a heartbeat after which a replica group is dead."""
    quorum_tick_ms: int
    """Lighthouse: time between two looks whether a quorum is complete. It also looks at each request."""
    group_timeout_ms: int
    """ProcessGroupGloo: bound of a collective. Some survivors see the dead rank's connection end, others wait this long."""


DEFAULT = Settings(join_timeout_ms=60_000, heartbeat_timeout_ms=5_000, quorum_tick_ms=100, group_timeout_ms=5_000)
"""The defaults of the command torchft_lighthouse, and the process group's timeout in torchft's example train_ddp.py."""

TUNED = Settings(join_timeout_ms=100, heartbeat_timeout_ms=5_000, quorum_tick_ms=10, group_timeout_ms=100)
"""The fastest settings that stayed stable with this model, whose slowest steps take 40 to 90 ms on a busy machine.

A lighthouse forms a quorum without a group that still sends heartbeats only if more than half have asked for one.
Survivors that do not see a connection end ask after the group's timeout, and the next commit comes just after that.
With both timeouts at 50 ms, slow replica groups were left out, four times in 15 s without a kill. The next commit came
no sooner. A heartbeat timeout of 200 ms, with heartbeats every 20 ms, gave 0.25 s and left out a survivor in most
trials. A job with longer steps has to raise both timeouts above its slowest step.
"""


def install() -> Path:
    """Return the directory with torchft, installed there at the first call. Raises BenchError with the remedy."""
    version = hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]
    there = CACHE / f"torchft-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    if there.is_dir():
        return there
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="torchft-", dir=CACHE) as aside:
        command = [str(UV), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", sys.executable]
        log = CACHE / "torchft-install.log"
        try:
            with log.open("wb") as output:
                subprocess.run(
                    [*command, "--target", f"{aside}/site", "--requirement", str(PINS)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=INSTALL_TIMEOUT_S,
                    check=True,
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchError(
                f"its packages (bench/torchft.txt) could not be installed, see {log.relative_to(REPOSITORY)}: give this "
                "machine access to PyPI, or measure the others without torchft (WITHOUT=torchft)."
            ) from error
        try:
            Path(aside, "site").rename(there)
        except OSError:
            if not there.is_dir():  # else another run was faster
                raise
    return there


def command(site: Path, settings: Settings, *, groups: int) -> list[str]:
    lighthouse = str(site / "bin" / "torchft_lighthouse")
    launcher = [sys.executable, "-m", "bench.torchft_launcher", "--lighthouse", lighthouse, "--groups", str(groups)]
    options = {
        "group-timeout-ms": settings.group_timeout_ms,
        "join_timeout_ms": settings.join_timeout_ms,
        "heartbeat_timeout_ms": settings.heartbeat_timeout_ms,
        "quorum_tick_ms": settings.quorum_tick_ms,
    }
    return [*launcher, *(f"--{name}={value}" for name, value in options.items())]


def environment(site: Path, common: Mapping[str, str]) -> dict[str, str]:
    """Return `common` and what torchft's processes need. Without RUST_LOG they print a dozen lines in each step."""
    return {**common, "PYTHONPATH": os.pathsep.join([common["PYTHONPATH"], str(site)]), "RUST_LOG": "warn"}
