"""Run as a program: sum the same virtual workers over gloo at several world sizes; print one line of JSON a rank.

torch is imported once, then every rank is forked, which is what the agent's zygote does too.
Usage: exact_ranks.py NUM_VIRTUAL LENGTH CHUNK WORLD_SIZE...
"""

import hashlib
import json
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

from regroup.data import ExactSum, GroupExchange, exact, microbatch_rng, shares_of


def flat_of(v: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what virtual worker v contributes: magnitudes over eight decades, so that the order of additions shows."""
    with microbatch_rng() as seed_for:
        seed_for(0, 0, v)
        return (torch.randn(length) * 10 ** (8 * torch.rand(length))).to(dtype)


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main(rank: int, world_size: int, store: str, num_virtual: int, length: int) -> None:
    group = dist.ProcessGroupGloo(dist.FileStore(store, world_size), rank, world_size, timedelta(seconds=60))  # type: ignore[attr-defined]
    shares = shares_of(num_virtual, world_size)
    total = ExactSum(shares, rank)
    exchange = GroupExchange(lambda method, *arguments: getattr(group, method)(*arguments).wait())
    line: dict[str, object] = {"world_size": world_size, "rank": rank}
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):  # the second time in used buffers
            plain = torch.zeros(length, dtype=dtype)
            for v in shares[rank]:
                flat = flat_of(v, length, dtype)
                total.add(v, flat)
                plain += flat
                flat.zero_()
            out = torch.empty(length, dtype=dtype)  # a rank with an empty share cannot know its length
            line[str(dtype)] = sha(total.reduce(exchange, out))
            group.allreduce([plain]).wait()  # type: ignore[attr-defined]
            line[f"plain {dtype}"] = sha(plain)
    os.write(1, (json.dumps(line) + "\n").encode())  # one write: lines of ranks do not mix


if __name__ == "__main__":
    num_virtual, length, exact.CHUNK, *world_sizes = map(int, sys.argv[1:])
    for world_size in world_sizes:
        store = tempfile.mktemp()
        children = []
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                main(rank, world_size, store, num_virtual, length)
                os._exit(0)
            children.append(child)
        if sum(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)
