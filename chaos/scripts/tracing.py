"""The trace and the pace of the trained scripts. Standard library only.

CHAOS_TRACE names a directory. Each process writes a file there, a line an event, in one write: a kill leaves no half
line. The file `pace` in it holds "SECONDS STEP SECONDS": the time of each step before that step, and from it on. The
file `slow-NAME` holds extra seconds for each step of this process.
"""

import json
import os
import time

DIRECTORY = os.environ["CHAOS_TRACE"]
POD = os.environ.get("REGROUP_POD_NAME") or os.environ.get("HOSTNAME") or "alone"
_NAME = f"{POD}-{os.getpid()}"
with open("/proc/self/stat") as _stat:
    # In clock ticks since the machine's boot: a container that is started again gives out the same process ids again.
    _STARTED = int(_stat.read().rpartition(")")[2].split()[19])
_FILE = os.open(f"{DIRECTORY}/{_NAME}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def trace(event: str, **what: object) -> None:
    """Write one event."""
    line = {"event": event, "t": time.time(), "pod": POD, "pid": os.getpid(), "start": _STARTED, **what}
    os.write(_FILE, json.dumps(line).encode() + b"\n")


def pause(step: int) -> None:
    """Sleep for the time that this step is meant to take."""
    before, boundary, after = [*_numbers("pace"), 0.0, 0.0, 0.0][:3]
    time.sleep(before if step < boundary else after)
    time.sleep(sum(_numbers(f"slow-{_NAME}")))


def _numbers(name: str) -> list[float]:
    try:
        with open(f"{DIRECTORY}/{name}") as file:
            return [float(word) for word in file.read().split()]
    except FileNotFoundError:
        return []
