"""Times the ways in which ranks can gather a row of each. adr/0074 compares them.

    python -m bench.rows --ranks 64

Ranks are processes of this machine, forked once torch is imported. It prints one line of JSON: for each way the
milliseconds of wall time and of CPU time on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_BOUND = timedelta(seconds=300)
WIDTH = 16
"""Numbers in a row, as many as in a row of a step."""


class Ways:
    """Ways to gather the rows of all ranks, each into `out`: [ranks, WIDTH]."""

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        self._rank, self._ranks, self._store = rank, ranks, store
        self._row = torch.full((WIDTH,), rank)
        self._num_stored = 0
        self.out = torch.empty(ranks, WIDTH, dtype=torch.int64)

    def ring(self) -> None:
        """Gather by gloo's all-gather, as a step does it."""
        dist.all_gather_into_tensor(self.out.view(-1), self._row)

    def doubling(self) -> None:
        """Gather by Bruck's algorithm: log2(ranks) exchanges."""
        rank, ranks, have = self._rank, self._ranks, torch.empty_like(self.out)
        have[0], num = self._row, 1
        while num < ranks:
            count = min(num, ranks - num)
            sending: Any = dist.isend(have[:count].contiguous(), (rank - num) % ranks)
            got = torch.empty(count, WIDTH, dtype=torch.int64)
            coming: Any = dist.irecv(got, (rank + num) % ranks)
            coming.wait()
            sending.wait()
            have[num : num + count] = got
            num += count
        self.out.copy_(torch.roll(have, rank, 0))

    def tree(self) -> None:
        """Gather to rank 0 and broadcast from it."""
        dist.gather(self._row, list(self.out) if self._rank == 0 else None, dst=0)
        dist.broadcast(self.out, 0)

    def direct(self) -> None:
        """Exchange all to all: each rank sends its row to each other rank, in one hop."""
        dist.all_to_all_single(self.out, self._row.repeat(self._ranks, 1))

    def store(self) -> None:
        """Write this rank's row into the store and read the rows of all."""
        self._num_stored += 1
        keys = [f"{self._num_stored}/{rank}" for rank in range(self._ranks)]
        self._store.set(keys[self._rank], self._row.numpy().tobytes())
        for rank, value in enumerate(self._store.multi_get(keys)):
            self.out[rank] = torch.frombuffer(bytearray(value), dtype=torch.int64)


def timed(way: Callable[[], None], rounds: int) -> dict[str, float]:
    """Return the milliseconds of a round: the median of wall time, and the mean of CPU time."""
    dist.barrier()
    way()
    taken_s, cpu_s = [], time.process_time()
    for _ in range(rounds):
        began_s = time.perf_counter()
        way()
        taken_s.append(time.perf_counter() - began_s)
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / rounds
    return {"median_ms": round(1e3 * statistics.median(taken_s), 2), "cpu_ms": round(cpu_ms, 2)}


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description="Time the ways in which ranks gather a row of each.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))  # before the fork, so that all know its port
    port = listener.getsockname()[1]
    rank = next((rank for rank in range(1, args.ranks) if os.fork() == 0), 0)
    fd = listener.detach() if rank == 0 else None
    store = TCPStore(
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=_BOUND, master_listen_fd=fd
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks, timeout=_BOUND)
    ways = Ways(rank, args.ranks, PrefixStore("rows", store))
    found = {}
    for name in ("ring", "doubling", "tree", "direct", "store"):
        found[name] = timed(getattr(ways, name), args.rounds)
        assert ways.out[:, 0].tolist() == list(range(args.ranks)), name
    if rank == 0:
        print(json.dumps({"ranks": args.ranks, **found}), flush=True)
    dist.barrier()
    if rank != 0:
        os._exit(0)  # what the parent had to do at its end is not a child's


if __name__ == "__main__":
    main()
