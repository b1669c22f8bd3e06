"""The unmodified script of manifests/samples, started as torchrun or the agent would: also where nothing is left to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "manifests" / "samples" / "script.py"


def run(directory: Path, *arguments: str) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(SCRIPT), "--checkpoint", str(directory / "model.pt"), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_script_that_is_started_again_after_its_last_step_ends_well(tmp_path: Path) -> None:
    arguments = ("--steps", "10", "--step-seconds", "0")
    assert "starts at step 0\n" in run(tmp_path, *arguments)
    assert run(tmp_path, *arguments) == "rank 0 of 1 starts at step 10\nrank 0 finished step 10\n"
