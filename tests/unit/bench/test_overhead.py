"""What `bench.overhead` makes of its blocks."""

from bench.overhead import CASES, summary


def test_blocks_are_compared_with_their_neighbours() -> None:
    """The machine became twice as slow in the middle: the ratio does not move."""
    blocks = []
    for slow in (1, 1, 2, 2):
        blocks += [
            {"kind": "plain", "ms": 2.0 * slow, "cpu_ms": 1.0},
            {"kind": "ours", "ms": 3.0 * slow, "cpu_ms": 2.0},
        ]
    blocks.append({"kind": "plain", "ms": 99.0, "cpu_ms": 99.0})  # the last one has no partner
    found = summary(CASES[0], blocks)
    assert (found["ours_ms"], found["ddp_ms"], found["ratio"]) == (4.5, 3.0, 1.5)
    assert (found["added_ms"], found["pairs"]) == (1.5, 4)
    assert set(summary(CASES[2], blocks)) >= {"ours_ms", "plain_ms"}
