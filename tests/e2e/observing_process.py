"""An observer as the agent has it, by itself: python -m tests.e2e.observing_process OBSERVED... (uid,host,port).

Writes a line for each change of what it would report: JSON with the member's uid, its level and the time (CLOCK_MONOTONIC, that all
processes share). The first line says that it has heard everybody.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from _regroup_agent.observing import Watch
from _regroup_agent.prober import Prober
from regroup.protocol.wire import Observed


def say(uid: str, level: float) -> None:
    """Write one line."""
    print(json.dumps({"uid": uid, "level": level, "at_s": time.monotonic()}), flush=True)


async def main(observed: list[Observed]) -> None:
    """Observe until the process is ended."""
    levels: dict[str, float] = {}

    def changed(watches: tuple[Watch, ...]) -> None:
        for watch in watches:
            uid = watch.observed.pod_uid
            if levels.get(uid, 0.0) != watch.level:
                levels[uid] = watch.level
                say(uid, watch.level)

    prober = Prober(changed)
    prober.observe(observed)
    while not all(watch.has_answered for watch in prober.watches):
        await asyncio.sleep(0.01)
    say("", 0.0)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(
        main([Observed(uid, host, int(port)) for uid, host, port in (text.split(",") for text in sys.argv[1:])])
    )
