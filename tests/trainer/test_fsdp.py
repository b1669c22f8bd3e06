"""What of torch's FSDP2 a cut-off forward or backward leaves, and that none of it reaches the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from regroup.protocol import env
from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote


@pytest.mark.parametrize("in_flight", ["gather", "gradients that are kept for a later sum"])
def test_nothing_is_left_of_what_was_in_flight(zygote: Zygote, tmp_path: Path, in_flight: str) -> None:
    script = Path(__file__).parent / "fsdp_alone.py"
    # As under an agent that has not announced a generation: torch's groups have nobody in them.
    alone = {env.SOCKET: "nobody listens", env.LOCAL_WORLD_SIZE: "2", env.LOCAL_RANK: "0"}
    plain = Plain(zygote, tmp_path / "output", script, in_flight, **alone)
    assert plain.wait().splitlines()[-1] == "left: 0.0"
