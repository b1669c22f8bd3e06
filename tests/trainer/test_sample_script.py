"""The unmodified script of manifests/samples, started as torchrun or the agent would: also where nothing is left to do."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.trainer.elastic_kit import Plain
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parents[2] / "manifests" / "samples" / "script.py"


def test_script_that_is_started_again_after_its_last_step_ends_well(tmp_path: Path, zygote: Zygote) -> None:
    def run(name: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = ("--checkpoint", str(tmp_path / "model.pt"), "--steps", "10", "--step-seconds", "0")
        return Plain(zygote, tmp_path / name, SCRIPT, *arguments, **environment).wait()

    first = run("first")
    assert "starts at step 0\n" in first
    assert first.endswith("rank 0 finished step 10\n")
    assert run("second") == "rank 0 of 1 starts at step 10\nrank 0 finished step 10\n"
