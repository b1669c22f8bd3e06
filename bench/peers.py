"""The systems that `bench.recovery` and `bench.goodput` compare: the commands that start them, and their machine.

All of them train `bench.tiny` with four local processes. `bench.trials` runs the commands.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench import torchft_peer

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = REPOSITORY / "bench" / "out"
RANKS = 4
STEADY_STEPS = 50
"""Steps that every rank makes in one epoch before a system is measured."""
OURS = "regroup"
TUNED = "torchft_tuned"


@dataclass(frozen=True)
class Peer:
    """A system that is measured. `key` names it in the JSON file, `title` in the table."""

    key: str
    title: str
    command: Sequence[str]
    environment: Mapping[str, str]
    lost: str
    """Other costs of a kill, which the times do not show, in a few words."""
    settings: Mapping[str, int] | None = None
    keeps_batch: bool = True
    """False: a step of fewer ranks leaves out the samples of the missing ranks."""


def regroup(common: Mapping[str, str]) -> Peer:
    """Return Regroup as a peer.

    The job is elastic, so that the survivors go on at once. Its limit of restarts is far above the number of kills.
    """
    run = [sys.executable, "-m", "regroup_cli", "run", "--workers", str(RANKS), "--min", "1", "--max", str(RANKS)]
    return Peer(
        OURS,
        "Regroup",
        [*run, "--max-restarts", "1000", str(REPOSITORY / "bench" / "recovery_script.py")],
        common,
        "The survivors redo the interrupted step with all of its samples. Regroup starts the dead process again, as a fork "
        "of a process that has imported torch already.",
    )


def torchrun(common: Mapping[str, str]) -> Peer:
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(RANKS)]
    limits = ["--max-restarts", "100", "--monitor-interval", "0.1"]
    return Peer(
        "torchrun",
        "torchrun",
        [*run, *limits, str(REPOSITORY / "bench" / "torchrun_script.py")],
        common,
        "torchrun starts every process again. They load the checkpoint that the script writes after each step.",
    )


def torchft(common: Mapping[str, str]) -> list[Peer]:
    """Return torchft as two peers, with default and with tuned settings. Raises BenchError if it cannot be installed."""
    site = torchft_peer.install()
    return [
        Peer(
            key,
            title,
            torchft_peer.command(site, settings, groups=RANKS),
            torchft_peer.environment(site, common),
            "The survivors try the interrupted step again. As in torchft's example, the dead replica group's samples of each "
            "step are not trained on until it is back. The benchmark starts it again at once; torchft leaves that to a launcher.",
            asdict(settings),
            keeps_batch=False,
        )
        for key, title, settings in (
            (TUNED, "torchft, tuned", torchft_peer.TUNED),
            ("torchft_default", "torchft, defaults", torchft_peer.DEFAULT),
        )
    ]


def environment(work: Mapping[str, float]) -> dict[str, str]:
    """Return the environment of all peers. `work` maps variables of `bench.tiny.Work` to seconds.

    The last variable makes torchrun use a fresh store for each restart. Without it torch 2.13 keeps the store.
    Restarted gloo ranks then read the dead ones' addresses in it, and the job never steps again (pytorch issue 135712).
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **{name: str(seconds) for name, seconds in work.items()}}
    return {**os.environ, **ours, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def setup(load_before: float) -> dict[str, object]:
    """Return the date, the machine and its load averages. `load_before` was read before the peers ran."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "ranks": RANKS,
    }
