"""What `bench.tiers` makes of its blocks."""

from __future__ import annotations

from typing import Any

from bench.tiers import STEPS, summary


def block(kind: str, ms: float, blocked_ms: float = 0.0, copies: int = 0) -> dict[str, Any]:
    return {"kind": kind, "ms": ms, "blocked_ms": blocked_ms, "copies": copies, "state_mb": 12.34}


def test_each_block_is_compared_with_the_one_without_a_tier_before_it() -> None:
    blocks = [
        *(block("off", 100.0), block("memory", 101.0, 6.0, 2), block("durable", 120.0, 30.0, 1)),
        *(block("off", 200.0), block("memory", 206.0, 3.0, 1), block("durable", 220.0)),
    ]
    found = summary(blocks)
    assert found["off"] == {"ms": 150.0}
    assert found["memory"] == {"ms": 153.5, "ratio": 1.02, "blocked_ms": 3.0, "copies": 3, "steps": 2 * STEPS}
    assert found["durable"] == {"ms": 170.0, "ratio": 1.15, "blocked_ms": 30.0, "copies": 1, "steps": 2 * STEPS}
    assert found["state_mb"] == 12.3


def test_tier_that_took_no_copy_says_so() -> None:
    assert summary([block("off", 1.0), block("memory", 1.0), block("durable", 1.0)])["memory"]["blocked_ms"] is None
