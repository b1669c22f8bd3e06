"""Times gloo's all-reduce beside the ring in regroup/parallel/ring.py: seconds for one sum over processes.

Usage: python -m bench.ring [--rounds 20]. It prints a table and writes bench/out/ring.json. All processes are on this
machine and use one thread each. So the table compares two algorithms over the loopback, not networks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from regroup.generation.adoption import Arrival
from regroup.generation.groups import Groups
from regroup.parallel.hooks import launch_sum
from regroup.parallel.ring import ring_sum
from tests.builders.generations import make_assignment, make_document

OUT = Path(__file__).parent / "out" / "ring.json"
SIZES_BYTES = (4 << 10, 256 << 10, 4 << 20, 25 << 20)
"""The last one is a bucket of gradients."""
WARM_UP = 3


def library(groups: Groups, flat: torch.Tensor) -> None:
    groups.wait([launch_sum(groups, flat)])


def ring(groups: Groups, flat: torch.Tensor) -> None:
    for pending in ring_sum(groups, flat):
        groups.wait([pending])


def measure(groups: Groups, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds for each sum, the two algorithms in turn. Every rank calls it."""
    seconds: dict[str, list[float]] = {"library": [], "ring": []}
    flat = torch.zeros(num_bytes // 4)
    for number in range(WARM_UP + rounds):
        for name, sum_ in (("library", library), ("ring", ring)):
            library(groups, torch.zeros(1))  # together
            began_s = time.monotonic()
            sum_(groups, flat)
            if number >= WARM_UP:
                seconds[name].append(time.monotonic() - began_s)
    return seconds


def rank_main(rank: int, world_size: int, listener: socket.socket, rounds: int, answer: int) -> None:
    torch.set_num_threads(1)
    assignment = make_assignment(make_document(listener.getsockname()[1], world_size), rank)
    groups = Groups(assignment, "127.0.0.1", torch.device("cpu"))
    groups.form(Arrival(None, 0, 0), listener.detach() if rank == 0 else None)
    results = [
        {"processes": world_size, "bytes": size, **{name: _summary(values) for name, values in found.items()}}
        for size in SIZES_BYTES
        for found in [measure(groups, size, rounds)]
    ]
    if rank == 0:
        os.write(answer, json.dumps(results).encode())
    library(groups, torch.zeros(1))  # no rank ends before the others have all


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def run(world_size: int, rounds: int) -> list[dict[str, Any]]:
    """Fork the processes, wait for them, and return what rank 0 measured. A process that fails fails the benchmark."""
    listener = socket.create_server(("127.0.0.1", 0))
    there, here = os.pipe()
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, world_size, listener, rounds, here)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    listener.close()
    os.close(here)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed:
        raise SystemExit(f"{len(failed)} of {world_size} processes failed.")
    with os.fdopen(there, "rb") as answer:
        results: list[dict[str, Any]] = json.loads(answer.read())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    results = [result for world_size in (2, 3, 4) for result in run(world_size, rounds)]
    print("processes   tensor KiB   library ms   ring ms   ring / library   (medians)")
    for result in results:
        library_s, ring_s = result["library"]["median_s"], result["ring"]["median_s"]
        print(f"{result['processes']:9}   {result['bytes'] >> 10:10}", end="   ")
        print(f"{library_s * 1e3:10.2f}   {ring_s * 1e3:7.2f}   {ring_s / library_s:14.1f}")
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"rounds": rounds, "machine": machine, "results": results}, indent=1) + "\n")
    print(f"Written to {OUT}.")


if __name__ == "__main__":
    main()
