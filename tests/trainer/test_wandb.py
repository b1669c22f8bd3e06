"""The page on Weights & Biases: its script, killed in rank 0, leaves one run in which no step is missing. Wandb is offline."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import only_long
from tests.trainer.agent_double import AgentDouble
from tests.trainer.zygote import Zygote

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "weights-and-biases.md"
STEPS = 120
FOUND = [str(path) for path in sorted((ROOT / ".venv-wandb").glob("lib/python*/site-packages"))]
"""Its packages, apart from .venv: they stand for those of a user's image."""
READ = """
import glob, json, sys
from wandb.proto import wandb_internal_pb2 as pb

BLOCK, HEADER = 32768, 7

def records(data):
    # The format of LevelDB's log, after a header of seven bytes: a checksum, a length and a kind before each part of a record.
    at, parts = 7, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = data[at + HEADER : at + HEADER + length]
        if not kind or len(part) < length:
            return  # the process that wrote it was killed
        at += HEADER + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield parts

for path in sorted(glob.glob(sys.argv[1] + "/wandb/offline-run-*/run-*.wandb")):
    points, run = [], None
    for one in records(open(path, "rb").read()):
        record = pb.Record.FromString(one)
        if record.WhichOneof("record_type") == "run":
            run = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            points.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    print(json.dumps([run, points]))
"""


@only_long("test_tensorboard.py has the same kill, with event files")
@pytest.mark.skipif(
    not FOUND and importlib.util.find_spec("wandb") is None, reason="make venv-wandb installs wandb into .venv-wandb"
)
def test_run_goes_on_under_the_jobs_uid_and_misses_no_step_when_rank_0_is_killed(
    tmp_path: Path, zygote: Zygote
) -> None:
    (text,) = re.findall(r"```python\n(import collections.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nsys.path += {FOUND}\n{text}")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *FOUND])
    environ = {
        "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "STEPS": str(STEPS),
        "HOME": str(tmp_path),
    }  # fmt: skip
    job = AgentDouble(tmp_path, zygote, script, environ)
    try:
        job.run_and_replace_rank_0(20)
    finally:
        job.close()
    runs = [json.loads(line) for line in _read(tmp_path, path).splitlines()]
    assert len(runs) >= 2, "another process became rank 0"
    assert {run for run, _ in runs} - {None} == {"job"}, "a process that is killed early has written no id"
    points = [point for _, some in runs for point in some]
    by_step = {point["step"]: point["loss"] for point in points}
    assert set(by_step) == set(range(1, STEPS + 1))
    assert all(point["loss"] == by_step[point["step"]] for point in points), "what is there twice is the same"
    assert all(point["_step"] == point["step"] for point in points)
    assert by_step[STEPS] < by_step[1]


def _read(directory: Path, path: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(directory)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
