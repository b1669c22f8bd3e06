"""python -m tests.simulator [SEED ...]: walks of random faults through the whole of it, in memory."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.simulator.faults import KINDS, Fault, parse
from tests.simulator.setting import faults_of, setting_of
from tests.simulator.walk import Outcome, run, shrink


def main() -> int:
    """Run the walks that the command line asks for; return 0 if everything held."""
    options = _options()
    seeds = options.seeds or list(range(options.first, options.first + options.walks))
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    kinds = options.kinds.split(",") if options.kinds else list(KINDS)
    given = [parse(text) for text in options.faults.split(";")] if options.faults else None
    work = [(seed, kinds, options.most, given) for seed in seeds]
    for outcome in _all(work, options.jobs):
        outcomes.append(outcome)
        if outcome.sort:
            print(f"\nFAILED {outcome if options.no_shrink else shrink(outcome)}\n{outcome.where}", flush=True)
        elapsed_s = time.monotonic() - began_s
        if options.seconds and elapsed_s > options.seconds:
            break
        if len(outcomes) % 50 == 0:
            num_failed = sum(bool(o.sort) for o in outcomes)
            print(f"{len(outcomes)} of {len(seeds)} walks, {num_failed} failed, {elapsed_s:.0f} s", flush=True)
    print(table(outcomes))
    by_sort = Counter(o.sort for o in outcomes if o.sort)
    commits = sum(o.num_commits for o in outcomes)
    elapsed_s = time.monotonic() - began_s
    print(
        f"\n{len(outcomes)} walks, {sum(len(o.faults) for o in outcomes)} faults, {commits} commits in {elapsed_s:.0f} s: "
        f"{sum(by_sort.values())} failed {dict(by_sort) if by_sort else ''}; "
        f"{sum(o.waited for o in outcomes)} waits that only the end of a fault could end."
    )
    ends = Counter(o.end for o in outcomes if o.end)
    num_due = sum(o.num_due for o in outcomes)
    print(f"Ended: {dict(ends)}. {num_due} ends had to fail a job.")
    for outcome in outcomes:
        if outcome.sort:
            print(f"Again: python -m tests.simulator {outcome.setting.seed}")
    return 1 if by_sort else 0


def table(outcomes: list[Outcome]) -> str:
    """Return the table of kinds of faults with the time from the fault to the next commit."""
    times: dict[str, list[float]] = defaultdict(list)
    struck: Counter[str] = Counter()
    hit: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for outcome in outcomes:
        struck.update(f.kind for f in outcome.faults)
        hit.update(outcome.hits)
        if outcome.sort:
            failed.update({f.kind for f in outcome.faults})
        for kind, seconds in outcome.recoveries:
            times[kind].append(seconds)
    lines = [f"{'fault':<20} {'n':>6} {'hit':>6} {'p50 s':>8} {'p99 s':>8} {'max s':>8} {'in failed':>10}"]
    for kind in sorted(struck):
        found = sorted(times[kind])
        ranks = (len(found) // 2, int(len(found) * 0.99), len(found) - 1)
        # None where another fault followed each time before the next commit.
        seen = [f"{found[min(rank, len(found) - 1)]:.2f}" for rank in ranks] if found else ["-"] * len(ranks)
        lines.append(
            f"{kind:<20} {struck[kind]:>6} {hit[kind]:>6} {seen[0]:>8} {seen[1]:>8} {seen[2]:>8} {failed[kind]:>10}"
        )
    return "\n".join(lines)


def _all(work: list[tuple[int, list[str], int, list[Fault] | None]], jobs: int) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from map(_one, work)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_one, work, chunksize=4)


def _one(work: tuple[int, list[str], int, list[Fault] | None]) -> Outcome:
    seed, kinds, most, given = work
    return run(setting_of(seed), faults_of(seed, kinds, most) if given is None else given)


def _options() -> argparse.Namespace:
    kinds = f"only these kinds of faults, by comma, of {', '.join(KINDS)}; default: all"
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED", help="walks to run (default: --walks of them)")
    parser.add_argument("--walks", type=int, default=200, help="how many walks (default 200)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default 0)")
    parser.add_argument("--seconds", type=float, default=0, help="end after so long, whatever is left (default: never)")
    parser.add_argument("--most", type=int, default=8, help="faults in a walk, at most (default 8)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--kinds", default="", help=kinds)
    parser.add_argument("--faults", default="", help="instead of a seed's own faults: these, separated by semicolons")
    parser.add_argument("--no-shrink", action="store_true", help="print a failing list of faults as it is")
    options = parser.parse_args()
    unknown = sorted(set(filter(None, options.kinds.split(","))) - set(KINDS))
    if unknown:
        parser.error(f"--kinds: {', '.join(unknown)} is no kind of fault. Known: {', '.join(sorted(KINDS))}.")
    try:
        for text in filter(None, options.faults.split(";")):
            parse(text)
    except ValueError as error:
        parser.error(f"--faults: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())
