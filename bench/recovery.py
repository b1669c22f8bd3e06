"""`make bench-recovery`: from SIGKILL of a rank to the next committed step, Regroup beside torchft and torchrun, in one run.

All train the same tiny model with four local processes. Each trial kills a random rank once all are steady and waits until all
four commit together again. Every time is read from the log that the trained processes write. What comes back first:

- Regroup's survivors keep process and state and go on; it starts the dead process again itself.
- torchft's survivors keep theirs, too. Starting the dead replica group again is left to a launcher: here the benchmark does it
  at once. It is measured with its default settings and with the fastest stable ones (`bench.torchft_peer`).
- torchrun starts every process again. They read the checkpoint of the last step, so all ranks are back at once. Its time is also
  given without what the new processes spent importing (the longest of them).

Writes bench/out/recovery.json. Times are in seconds; all but the counts are given as `p50` and `p99`:

- `regroup`, `torchrun`, `torchft_default`, `torchft_tuned` (the last two only with torchft), each with
  - `p50`, `p99` and, equal to them, `survivors`: to the next committed step of anyone. In it also `ranks`: in how many trials
    that step had how many ranks; `kept`: how many processes lived on; `rolled_back`: how many committed steps were committed again;
  - `full_size`: to the next committed step of all ranks. In it also `imports`, the time of that which new processes
    spent importing, and `without_imports`, the rest;
  - `lost`: what else a kill costs; `settings`: torchft's, in milliseconds.
- `torchrun_without_imports`, and `torchrun_imports`, which it lacks.
- `ratio`, `ratio_without_imports`: torchrun / Regroup. `ratios`: each peer / Regroup, for `survivors` and `full_size`.
- `trials`: every trial. `setup`: when and on what, with the machine's load average.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from bench import torchft_peer
from bench.commits import BENCH_STEP_S
from bench.recovery_report import Peer, result, tables
from bench.trials import BenchError, Trial, measure

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = REPOSITORY / "bench" / "out"
RANKS = 4
STEADY_STEPS = 50
STEP_S = 0.005
TRIALS = 10
"""Of each peer; 20 take ten minutes. With so few, p99 is close to the slowest."""


def regroup() -> Peer:
    """Elastic, so that the survivors go on at once; every rank is killed more often than the default limit allows."""
    run = [sys.executable, "-m", "regroup_cli", "run", "--workers", str(RANKS), "--min", "1", "--max", str(RANKS)]
    return Peer(
        "regroup",
        "Regroup",
        [*run, "--max-restarts", "1000", str(REPOSITORY / "bench" / "recovery_script.py")],
        environment(),
        "The survivors redo the interrupted step with all of its samples. Regroup starts the dead process again, as a fork "
        "of a process that has imported torch already.",
    )


def torchrun() -> Peer:
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(RANKS)]
    limits = ["--max-restarts", "100", "--monitor-interval", "0.1"]
    return Peer(
        "torchrun",
        "torchrun",
        [*run, *limits, str(REPOSITORY / "bench" / "torchrun_script.py")],
        environment(),
        "torchrun starts every process again. They load the checkpoint that the script writes after each step.",
    )


def torchft() -> list[Peer]:
    """Raises BenchError if torchft cannot be installed."""
    site = torchft_peer.install()
    return [
        Peer(
            key,
            title,
            torchft_peer.command(site, settings, groups=RANKS),
            torchft_peer.environment(site, environment()),
            "The survivors try the interrupted step again. As in torchft's example, the dead replica group's samples of each "
            "step are not trained on until it is back. The benchmark starts it again at once; torchft leaves that to a launcher.",
            asdict(settings),
        )
        for key, title, settings in (
            ("torchft_tuned", "torchft, tuned", torchft_peer.TUNED),
            ("torchft_default", "torchft, defaults", torchft_peer.DEFAULT),
        )
    ]


def environment() -> dict[str, str]:
    """Return what all peers inherit.

    The last variable makes torchrun use a fresh store for each restart. Without it, torch 2.13 keeps the store, restarted
    gloo ranks read the dead ones' addresses in it, and the job never steps again (pytorch issue 135712).
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, BENCH_STEP_S: str(STEP_S)}
    return {**os.environ, **ours, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def setup(trials: int, load_before: float) -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "ranks": RANKS,
        "step_s": STEP_S,
        "trials": trials,
    }


def kills(peer: Peer, console: Console, *, trials: int, seed: int) -> list[Trial]:
    """Measure one peer and show each trial. Raises BenchError."""
    done: list[Trial] = []
    with console.status(f"{peer.title}: starting") as status:

        def show(trial: Trial) -> None:
            done.append(trial)
            line = (
                f"{peer.title}: kill {len(done)} of {trials}, rank {trial.killed_rank}: {trial.recovery_s:.3f} s "
                f"({trial.world} of {RANKS} ranks), all ranks {trial.full_s:.3f} s"
            )
            if console.is_terminal:
                status.update(line)
            else:
                console.print(line, highlight=False, soft_wrap=True)

        return measure(
            peer.command,
            peer.environment,
            output=OUT / f"{peer.key}.log",
            ranks=RANKS,
            trials=trials,
            steady_steps=STEADY_STEPS,
            seed=seed,
            progress=show,
        )


def main() -> int:
    """Measure the peers, print the tables, write the JSON file; 1 and one sentence when a peer cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"kills of each peer (default {TRIALS})")
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed (default 0)")
    parser.add_argument("--without", choices=["torchft"], help="leave torchft out: it is downloaded at the first run")
    args = parser.parse_args()
    if not 1 <= args.trials <= 100:
        parser.error(f"--trials ({args.trials}) must be from 1 to 100: torchrun gives up after 100 restarts.")
    console = Console()
    load_before = os.getloadavg()[0]
    measured: dict[str, list[Trial]] = {}
    name = "torchft"
    try:
        peers = [regroup(), *([] if args.without else torchft()), torchrun()]
        for peer in peers:
            name = peer.title
            measured[peer.key] = kills(peer, console, trials=args.trials, seed=args.seed)
    except BenchError as error:
        console.print(f"{name}: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    found = result(measured, peers, setup(args.trials, load_before))
    (OUT / "recovery.json").write_text(json.dumps(found, indent=2) + "\n")
    console.print(tables(found, peers), highlight=False)
    console.print(f"written to {(OUT / 'recovery.json').relative_to(REPOSITORY)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
