"""`make bench-recovery`: from SIGKILL of a rank to the next committed step, Regroup beside torchft and torchrun, in one run.

All train the same tiny model with four local processes. Each trial kills a random rank once all are steady and waits
until all four commit together again. Every time is read from the log that the trained processes write. The systems
recover differently:

- Regroup's survivors keep process and state and go on. Regroup starts the dead process again itself.
- torchft's survivors keep theirs, too. A launcher has to restart the dead replica group: the benchmark does it at once.
  It is measured with its default settings and with the fastest stable ones (`bench.torchft_peer`).
- torchrun starts every process again. They read the checkpoint of the last step, so all ranks are back at once. The
  report also gives its time without the longest import of a new process.

The file bench/out/recovery.json has times in seconds, each as `p50` and `p99`:

- `regroup`, `torchrun`, `torchft_default`, `torchft_tuned` (the last two only with torchft), each with
  - `p50`, `p99` and, equal to them, `survivors`: to the next committed step of any rank. `survivors` also has `ranks`
    (number of ranks in that step -> trials), `kept` (processes that lived on) and `rolled_back` (steps committed
    again);
  - `full_size`: to the next committed step of all ranks. It also has `imports`, the part of that time in which new
    processes imported, and `without_imports`, the rest;
  - `lost`: other costs of a kill; `settings`: torchft's, in milliseconds.
- `torchrun_without_imports`, and `torchrun_imports`, the part that it leaves out.
- `ratio`, `ratio_without_imports`: torchrun / Regroup. `ratios`: each peer / Regroup, for `survivors` and `full_size`.
- `trials`: every trial. `setup`: date, machine and load average.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from rich.console import Console

from bench.commits import BENCH_STEP_S
from bench.peers import OUT, RANKS, REPOSITORY, STEADY_STEPS, Peer, environment, regroup, setup, torchft, torchrun
from bench.recovery_report import result, tables
from bench.trials import BenchError, Trial, measure

STEP_S = 0.005
TRIALS = 10
"""Kills of each peer. 20 take ten minutes. With so few, p99 is close to the slowest."""


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
    """Measure the peers, print the tables, write the JSON file. Return 1, after one sentence, if a peer cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"kills of each peer (default {TRIALS})")
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed (default 0)")
    parser.add_argument("--without", choices=["torchft"], help="leave torchft out: it is downloaded at the first run")
    args = parser.parse_args()
    if not 1 <= args.trials <= 100:
        parser.error(f"--trials ({args.trials}) must be from 1 to 100: torchrun gives up after 100 restarts.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the launcher and its ranks outlive it
    console = Console()
    load_before = os.getloadavg()[0]
    measured: dict[str, list[Trial]] = {}
    name = "torchft"
    try:
        common = environment({BENCH_STEP_S: STEP_S})
        peers = [regroup(common), *([] if args.without else torchft(common)), torchrun(common)]
        for peer in peers:
            name = peer.title
            measured[peer.key] = kills(peer, console, trials=args.trials, seed=args.seed)
    except BenchError as error:
        console.print(f"{name}: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    found = result(measured, peers, {**setup(load_before), "step_s": STEP_S, "trials": args.trials})
    (OUT / "recovery.json").write_text(json.dumps(found, indent=2) + "\n")
    console.print(tables(found, peers), highlight=False)
    console.print(f"written to {(OUT / 'recovery.json').relative_to(REPOSITORY)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
