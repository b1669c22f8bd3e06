"""Faults inside a trainer process that no signal from outside can time: a test names one in TEST_FAULT."""

import os
import signal

from regroup.elastic import transfer
from regroup.elastic.groups import Groups


def install(name: str) -> None:
    """Arrange for the fault: `source-dies-in-transfer:G` kills the source in mid-copy of generation G."""
    kind, _, generation = name.partition(":")
    assert kind == "source-dies-in-transfer", name
    transfer.CHUNK_BYTES = 4096
    broadcast, chunks = transfer._broadcast, 0

    def dying(groups: Groups, tensor: object, source: int) -> None:
        nonlocal chunks
        if groups.generation == int(generation) and groups.rank == source:
            chunks += 1
            if chunks == 6:  # length, text, three chunks, and no more
                os.kill(os.getpid(), signal.SIGKILL)
        broadcast(groups, tensor, source)  # type: ignore[arg-type]

    transfer._broadcast = dying  # type: ignore[assignment]
