"""`make bench-goodput`: the share of time that goes into steps that stay, while ranks are killed, beside torchrun and torchft.

Regroup (a session), torchft (tuned) and torchrun train the same tiny model with four local processes. The systems run
one after the other, each once for each `--every`. A run first trains undisturbed for 10 s. Then one random rank gets a
SIGKILL every `--every` seconds, for `--seconds`. The same seed draws the same ranks for each system. Kills do not wait
for a recovery. If no process trains, the kill is skipped and counted, which is in favour of the system that recovers
slowly.

    goodput = steps that stayed x mean time of a step of all ranks / length of the window of kills

- This is goodput as it is usually defined: time spent computing useful new steps over elapsed time (DLRover's README).
  A useful step counts with the time that the same system takes for it with all ranks, in the same run. So time without
  a step, repeated steps, and steps that are slower for lack of a rank all lower the goodput. A system's own overhead in
  each step does not; `bench.overhead` measures that. Slow steps of all ranks do not lower it either. The first steps of
  new processes are slow, which is in favour of a system that starts many. The JSON file also has the goodput of the
  undisturbed 10 s, by the same formula.
- A step *stayed* if it was committed for the first time in the window, and the state at the window's end contains it.
  After the last kill the run goes on until the next commit, because that commit shows from which step the system went
  on.
- Each sample of a step costs simulated work. So fewer ranks take longer for the same batch. torchft's survivors leave
  out the missing rank's samples instead. Such a step counts with the share of its batch that was trained on. `steps`
  counts it as a whole step.
- torchrun's script writes a checkpoint after each step, as in `bench.recovery`. That is in favour of torchrun: no
  committed step is lost, and a checkpoint of this model takes no time. With rarer checkpoints the steps since the last
  one are lost.

The file bench/out/goodput.json has `regroup`, `torchft_tuned` (only with torchft) and `torchrun`. Each has `title`,
`lost` (other costs of a kill), torchft's `settings` in milliseconds, and `every`. This maps the seconds between two
kills to

- `goodput`, `steps`, `undisturbed`: shares, 1 in the ideal;
- `step_s`: mean of the steps of all ranks; `seconds`: length of the window;
- `stayed`: steps; `partial`: steps among them that fewer than all ranks made; `again`: steps that were repeated or
  lost;
- `kills`, `skipped`: kills, and times at which no process could be killed.

`setup` has the date, the machine and its load average. `--figure FILE` measures nothing: it draws this file and
bench/out/recovery.json into an SVG.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from bench.commits import BENCH_SAMPLE_S, steady_epoch
from bench.goodput_report import Disturbed, Window, fault_times, goodput, mean_step_s, result, tables, victim
from bench.peers import (
    OUT,
    RANKS,
    REPOSITORY,
    STEADY_STEPS,
    TUNED,
    Peer,
    environment,
    regroup,
    setup,
    torchft,
    torchrun,
)
from bench.tiny import GLOBAL_BATCH
from bench.trials import DEADLINE_S, BenchError, Run, running

SECONDS = 180.0
EVERY_S = (10.0, 60.0)
CALM_S = 10.0
SAMPLE_S = 0.005 * RANKS / GLOBAL_BATCH  # with all ranks each step has 5 ms of simulated work
JSON = OUT / "goodput.json"


def disturb(peer: Peer, console: Console, *, every_s: float, seconds: float, seed: int) -> Disturbed:
    """Measure one peer with a kill every `every_s` and show each kill. Raises BenchError."""
    rng = random.Random(seed)
    kills = skipped = 0
    with running(peer.command, peer.environment, OUT / f"goodput-{peer.key}.log") as run:
        commits = run.log.commits

        def steady() -> bool:
            return steady_epoch(commits, ranks=RANKS, steps=STEADY_STEPS) is not None

        run.wait(f"{RANKS} steady ranks", steady)
        calm = Window(time.time(), time.time() + CALM_S)
        _until(run, calm.end_s)
        calm_step_s = mean_step_s(commits, calm, ranks=RANKS)
        if calm_step_s is None:
            raise BenchError(f"fewer than two steps were committed in the {CALM_S:g} s without a kill.")
        _say(console, peer, every_s, f"{1000 * calm_step_s:.1f} ms a step before the first kill")
        window = Window(calm.end_s, calm.end_s + seconds)
        killed_epoch = -1
        for after_s in fault_times(seconds, every_s):
            _until(run, window.begin_s + after_s)
            chosen = victim(commits, run.living(), rng.random())
            if chosen is None:
                skipped += 1
                _say(console, peer, every_s, f"after {after_s:.0f} s no process trains: nobody is killed")
                continue
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(chosen.pid, signal.SIGKILL)
            kills += 1
            killed_epoch = chosen.epoch
            _say(
                console, peer, every_s, f"after {after_s:.0f} s rank {chosen.rank} is killed in step {chosen.step + 1}"
            )
        _until(run, window.end_s)
        run.wait("the first commit after the last kill", lambda: any(commit.epoch > killed_epoch for commit in commits))
        run.log.poll()  # an earlier commit may lie in a file that was read before it was written
        step_s = mean_step_s(commits, Window(calm.begin_s, window.end_s), ranks=RANKS) or calm_step_s
        undisturbed, found = (
            goodput(commits, part, step_s=step_s, ranks=RANKS, keeps_batch=peer.keeps_batch) for part in (calm, window)
        )
    _say(console, peer, every_s, f"goodput {100 * found.goodput:.1f} %")
    return Disturbed(every_s, seconds, step_s, undisturbed.goodput, kills, skipped, found)


def _until(run: Run, at_s: float) -> None:
    """Read the log until a time of the clock. Raises BenchError if the launcher ends before."""
    timeout_s = at_s - time.time() + DEADLINE_S
    run.wait("the end of the measurement", lambda: time.time() >= at_s, timeout_s=timeout_s)


def _say(console: Console, peer: Peer, every_s: float, what: str) -> None:
    console.print(f"{peer.title}, a kill every {every_s:g} s: {what}", markup=False, highlight=False, soft_wrap=True)


def draw(path: Path, console: Console) -> int:
    """Draw the last figures of this benchmark and of `bench.recovery`. Return 1, after one sentence, if a file is missing."""
    from bench.goodput_figure import draw as figure  # imports matplotlib

    recovery = OUT / "recovery.json"
    for file, target in ((JSON, "bench-goodput"), (recovery, "bench-recovery")):
        if not file.exists():
            console.print(f"{file.relative_to(REPOSITORY)} does not exist: run `make {target}` first.", markup=False)
            return 1
    figure(json.loads(JSON.read_text()), json.loads(recovery.read_text()), path)
    console.print(f"Drawn into {path}.", markup=False, highlight=False)
    return 0


def main() -> int:
    """Measure the peers, print the table, write the JSON file. Return 1, after one sentence, if a peer cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.goodput", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"length of each run (default {SECONDS:g})")
    parser.add_argument(
        "--every", type=float, action="append", help="seconds between two kills; may be repeated (default 10 and 60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed (default 0)")
    parser.add_argument("--without", choices=["torchft"], help="leave torchft out: it is downloaded at the first run")
    parser.add_argument(
        "--figure", metavar="FILE", type=Path, help="draw the files' figures into this SVG, and no more"
    )
    args = parser.parse_args()
    console = Console()
    if args.figure is not None:
        return draw(args.figure, console)
    every = sorted(set(args.every or EVERY_S))
    if not 1 <= every[0] <= every[-1] <= args.seconds:
        parser.error(f"--every ({every[0]:g} to {every[-1]:g}) must be from 1 to --seconds ({args.seconds:g}).")
    if args.seconds / every[0] > 100:
        parser.error("--seconds / --every must be at most 100: torchrun gives up after 100 restarts.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the launcher and its ranks outlive it
    load_before = os.getloadavg()[0]
    measured: dict[str, list[Disturbed]] = {}
    name = "torchft"
    try:
        common = environment({BENCH_SAMPLE_S: SAMPLE_S})
        tuned = [] if args.without else [peer for peer in torchft(common) if peer.key == TUNED]
        peers = [regroup(common), *tuned, torchrun(common)]
        for peer in peers:
            name = peer.title
            measured[peer.key] = [
                disturb(peer, console, every_s=every_s, seconds=args.seconds, seed=args.seed) for every_s in every
            ]
    except BenchError as error:
        console.print(f"{name}: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    about = {**setup(load_before), "sample_s": SAMPLE_S, "seconds": args.seconds, "seed": args.seed}
    found = result(measured, peers, about)
    JSON.write_text(json.dumps(found, indent=2) + "\n")
    console.print(tables(found), highlight=False)
    console.print(f"written to {JSON.relative_to(REPOSITORY)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
