"""Run as a program: ranks form real groups, and one thing goes wrong in a collective; print one line of JSON a rank.

Usage: python -m tests.trainer.outcome_ranks WORLD_SIZE WHAT
  killed    rank 1 is killed
  closed    rank 1 leaves its groups
  type      a tensor of a type that gloo does not know, on all ranks
  aborted   every rank ends its own groups while it waits for rank 1, which does not come
  ring-killed, ring-closed, ring-aborted
            the same in the middle of an all-reduce by the ring: rank 1 takes part in its first two turns
  edge-killed, edge-closed, edge-aborted
            the same in a pipeline: rank 0 sends rank 1 what it does not take, and rank 2 waits for something from it
  rows-killed, rows-aborted
            the same while rows are gathered: rank 1 has given none
  given-killed
            the same, once rank 1 has given its row: who has all rows by then has no error
  first-killed
            the same with rank 0, which has all rows, and has not passed them on
  rows      nothing: rows of several lengths are compared with those of gloo's all-gather
  unformed  rank 1 is killed when all have arrived at the store, before it connects to the others
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch

from regroup.generation import edges, rows
from regroup.generation import groups as groups_module
from regroup.generation.adoption import Arrival
from regroup.generation.groups import Groups
from regroup.generation.rows import Rows
from regroup.layout import Layout
from regroup.parallel.ring import ring_sum
from tests.builders.generations import make_assignment, make_document

WHOLE = ("type", "rows")
"""No rank is lost."""
ROWS = ("rows-", "given-", "first-")


def main(rank: int, world_size: int, listener: socket.socket, what: str, said: int, end: int) -> None:
    if what.startswith(ROWS):
        rows.TREE_RANKS = 2
    part = make_assignment(make_document(listener.getsockname()[1], world_size), rank)
    layout = Layout.of({"pipeline": world_size})
    edges.plan(world_size)
    among = edges.parts(layout, rank) if what.startswith("edge-") else {}
    groups = Groups(part, "127.0.0.1", torch.device("cpu"), among)
    try:
        if what == "unformed":
            groups_module.CONNECT = timedelta(seconds=2)  # type: ignore[attr-defined]
            if rank == 1:
                groups_module.open_gloo = _die  # type: ignore[assignment]
        groups.form(Arrival(None, 0, 0), listener.detach() if rank == 0 else None)
        tensor = torch.ones(1 << 18)
        groups.wait([groups.launch("allreduce", [tensor])])
        if what == "type":
            tensor = torch.ones(4, dtype=torch.uint16)
        elif what.startswith(ROWS):
            if rank == (0 if what.startswith("first-") else 1):
                if not what.startswith("rows-"):
                    coming = Rows(groups, row_of(rank))
                    groups.wait([coming._sent])
                _end(groups, what.rpartition("-")[2])
                return
            if what == "rows-aborted":
                threading.Timer(0.2, groups.abort).start()
            came = Rows(groups, row_of(rank)).wait()
            assert came.tolist() == [row_of(other).tolist() for other in range(world_size)]
            _say({"rank": rank, "error": None, "peer": None}, said, end)
            return
        elif what == "rows":
            assert world_size >= rows.TREE_RANKS
            for row in all_sorts_of_rows(rank):
                by_ring = torch.empty(world_size, len(row), dtype=torch.uint8)
                coming = Rows(groups, row)
                groups.wait([groups.launch("_allgather_base", by_ring.view(-1), row, control=True)])
                assert torch.equal(coming.wait(), by_ring)
            _say({"rank": rank, "error": None, "peer": None}, said, end)
            return
        elif rank == 1:
            if what.startswith("ring-"):
                for turn, pending in enumerate(ring_sum(groups, tensor)):
                    groups.wait([pending])
                    if turn == 1:
                        break
            _end(groups, what.removeprefix("ring-").removeprefix("edge-"))
            return
        if what.endswith("aborted"):
            threading.Timer(0.2, groups.abort).start()
        if what.startswith("ring-"):
            for pending in ring_sum(groups, tensor):
                groups.wait([pending])
        if what.startswith("edge-"):
            ends = edges.Edges(groups)
            if rank == 0:
                for _ in range(4):
                    ends.send(0, [torch.ones(1 << 20)])
                ends.finish()
            else:
                ends.expect(1)
                ends.receive(1)
            raise AssertionError("the edge has not failed")
        groups.wait([groups.launch("allreduce", [tensor])])
    except Exception as error:
        line = {
            "rank": rank,
            "error": type(error).__name__,
            "text": str(error),
            "peer": getattr(error, "peer_rank", None),
        }
        _say(line, said, end)


def _say(line: dict[str, Any], said: int, end: int) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())  # one write: lines of ranks do not mix
    os.write(said, b"1")
    os.read(end, 1)  # who ends now would be missed by the others, too


def row_of(rank: int) -> torch.Tensor:
    return torch.full((16,), rank, dtype=torch.uint8)


def all_sorts_of_rows(rank: int) -> list[torch.Tensor]:
    """Return a step's row, two sums of an exact reduction, which parameters were used, and a parcel of gradients."""
    made = torch.Generator().manual_seed(rank)
    rows = [
        torch.randint(-(1 << 62), 1 << 62, (24,), generator=made),
        torch.randn(2, dtype=torch.float64, generator=made),
        torch.randint(2, (7,), dtype=torch.uint8, generator=made),
        torch.randn(5003, generator=made).bfloat16(),
    ]
    return [row.view(torch.uint8) for row in rows]


def _end(groups: Groups, how: str) -> None:
    """Return once the groups are closed, or never."""
    if how == "killed":
        _die()
    elif how == "closed":
        groups.close()
    else:
        time.sleep(60)  # until the others have said what they have to say, and the test ends this one


def _die(*_arguments: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    world_size, what = int(sys.argv[1]), sys.argv[2]
    listener = socket.create_server(("127.0.0.1", 0))
    (heard, said), (end, last) = os.pipe(), os.pipe()
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os.close(last)
            main(rank, world_size, listener, what, said, end)
            os._exit(0)
        children.append(child)
    for _ in range(world_size if what in WHOLE else world_size - 1):
        os.read(heard, 1)
    os.close(last)
    if what.endswith("aborted"):
        os.kill(children[1], signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
