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
from typing import NoReturn

import torch

from regroup.generation import edges
from regroup.generation import groups as groups_module
from regroup.generation.adoption import Arrival
from regroup.generation.groups import Groups
from regroup.layout import Layout
from regroup.parallel.ring import ring_sum
from tests.builders.generations import make_assignment, make_document


def main(rank: int, world_size: int, listener: socket.socket, what: str, said: int, end: int) -> None:
    part = make_assignment(make_document(listener.getsockname()[1], world_size), rank)
    layout = Layout.of({"pipeline": world_size})
    edges.plan(world_size)
    among = edges.parts(layout, rank) if what.startswith("edge-") else {}
    groups = Groups(part, "127.0.0.1", torch.device("cpu"), among)
    try:
        if what == "unformed":
            groups_module._CONNECT = timedelta(seconds=2)
            if rank == 1:
                groups_module.open_gloo = _die  # type: ignore[assignment]
        groups.form(Arrival(None, 0, 0), listener.detach() if rank == 0 else None)
        tensor = torch.ones(1 << 18)
        groups.wait([groups.launch("allreduce", [tensor])])
        if what == "type":
            tensor = torch.ones(4, dtype=torch.uint16)
        elif rank == 1:
            if what.startswith("ring-"):
                for turn, pending in enumerate(ring_sum(groups, tensor)):
                    groups.wait([pending])
                    if turn == 1:
                        break
            what = what.removeprefix("ring-").removeprefix("edge-")
            if what == "killed":
                _die()
            elif what == "closed":
                groups.close()
                return
            time.sleep(60)  # until the others have said what they have to say, and the test ends this one
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
        os.write(1, (json.dumps(line) + "\n").encode())  # one write: lines of ranks do not mix
        os.write(said, b"1")
        os.read(end, 1)  # who ends now would be missed by the others, too


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
    for _ in range(world_size if what == "type" else world_size - 1):
        os.read(heard, 1)
    os.close(last)
    if what.endswith("aborted"):
        os.kill(children[1], signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
