"""The exact reduction over real processes and gloo: the same bits on every rank at any world size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORLD_SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize(
    ("num_virtual", "length", "chunk"),
    [
        pytest.param(32, 1003, 1 << 22, id="a power of two of virtual workers, one part"),
        pytest.param(5, 1003, 100, id="an odd number, fewer than ranks, many parts of which the last is short"),
    ],
)
def test_exact_sum_is_bitwise_equal_on_every_rank_at_any_world_size(num_virtual: int, length: int, chunk: int) -> None:
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("exact_ranks.py")), *map(str, (num_virtual, length, chunk)),
         *map(str, WORLD_SIZES)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(lines) == sum(WORLD_SIZES)
    for dtype in ("torch.float32", "torch.bfloat16"):
        assert len({line[dtype] for line in lines}) == 1, lines
        # The inputs do tell orders of addition apart: a plain all-reduce gives other bits at other world sizes.
        assert len({line[f"plain {dtype}"] for line in lines}) > 1, lines
