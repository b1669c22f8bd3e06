"""Notice a crash that repeats: the same exit at the same place, and no step committed in between. Pure.

Another restart cannot help there, so the job fails long before maxRestarts, with the end of the traceback. A cause that may pass
by itself has AFTER_S for that: a file server that restarts, a name that is not resolved yet. A signal without a traceback has no
place (somebody killed the process) and never counts. Crashes of several workers in one generation count once.

In tier Script no steps are seen, and the loss of one rank makes its peers fail, each time at the same place. There a
generation counts only while none of its processes is known to have ended by a signal, and only `STEADY_S` apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from regroup.protocol.text import shorten
from regroup_operator.model.plan import Crash, Failure

ROUNDS = 3
AFTER_S = 15.0
"""A crash is hopeless after so many rounds, and so many seconds after the first one. Restarts come after 0, 1, 2, 4 and 8 s. So a
script that fails within 14 s of its start ends its job within 30 s of the first crash."""
ROUND_S = 0.5
"""Crashes this close together are one: all ranks that fail at the same line."""
STEADY_S = 38.0
"""Tier Script: a script that ran for 30 s after the longest restart delay has not failed at its start."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def place_of(failure: Failure) -> str:
    """Return what is the same each time a script fails in the same way, or "" where that is not known."""
    if failure.reason:
        return failure.reason
    frames = _FRAME.findall(failure.tail)
    kind = failure.last_line.partition(":")[0]
    if frames:
        # A fatal signal's first frame is the newest, an exception's last one is.
        file, line = frames[0] if "most recent call first" in failure.tail else frames[-1]
        return f"{file}:{line} {kind}"
    if failure.exit_code is None or not 0 <= failure.exit_code < 128:
        return ""
    return failure.last_line or "nothing on stderr"


def note_crashes(
    crash: Crash | None,
    failures: Iterable[Failure],
    *,
    committed_at: float | None,
    script: bool,
    excused: Collection[int] = (),
) -> Crash | None:
    """Return the crash that repeats now, None if there is none. `committed_at`: when a step was last committed, in seconds
    since the epoch; `excused`: generations whose processes exit for want of a peer (failures.excused_generations)."""
    if crash is not None and excused:
        rounds = tuple(r for r in crash.rounds if r[1] not in excused)
        crash = replace(crash, rounds=rounds) if rounds else None
    if crash is not None and committed_at is not None and committed_at > crash.rounds[-1][0]:
        crash = None
    for failure in sorted(failures, key=lambda f: f.at):
        if (committed_at is not None and committed_at > failure.at) or failure.generation in excused:
            continue
        crash = _add(crash, failure, script)
    return crash


def _add(crash: Crash | None, failure: Failure, script: bool) -> Crash | None:
    place = place_of(failure)
    if not place:
        return None
    this, mine = (failure.at, failure.generation), frozenset({failure.worker})
    if crash is None or (crash.place, crash.last.exit_code) != (place, failure.exit_code):
        return Crash(place, (this,), failure, workers=mine)
    newest_at, newest_generation = crash.rounds[-1]
    # A crash may end peers much later: a process that was stopped (SIGSTOP) notices the loss only once it goes on.
    is_same = failure.generation > 0 and failure.generation == newest_generation and not mine & crash.workers
    if failure.at < newest_at + ROUND_S or is_same:
        return replace(crash, last=failure, workers=crash.workers | mine)
    if script and failure.at > newest_at + STEADY_S:
        return Crash(place, (this,), failure, workers=mine)
    # The first stays, for its time; of the others only as many as can matter.
    rounds = (crash.rounds[0], *crash.rounds[1:][-(ROUNDS - 1) :], this)
    return Crash(place, rounds, failure, crash.count + 1, mine)


def is_hopeless(crash: Crash | None) -> bool:
    """Return whether the crash has repeated often and long enough to fail the job."""
    return crash is not None and len(crash.rounds) >= ROUNDS and crash.rounds[-1][0] >= crash.rounds[0][0] + AFTER_S


def repeats(crash: Crash | None) -> bool:
    """Return whether people should be told of it: it has come a second time."""
    return crash is not None and len(crash.rounds) > 1


def crash_sentence(crash: Crash, what: str, where: str) -> str:
    """Return what a condition says of it. `what`: the exit in words; `where`: how its log is read."""
    span_s = crash.rounds[-1][0] - crash.rounds[0][0]
    count = f"{crash.count} times in {span_s:.0f} s"
    quoted = crash.last.tail or crash.last.last_line
    return f"{what}, {count} at the same place, and no step was committed in between.{_quote(quoted)}\n{where}"


def _quote(text: str) -> str:
    """Return the last lines, on lines of their own; an event has room for little more."""
    lines: Sequence[str] = text.splitlines()[-6:]
    while len(lines) > 1 and sum(len(line) + 1 for line in lines) > 600:
        lines = lines[1:]
    return "".join(f"\n{shorten(line, 500)}" for line in lines)
