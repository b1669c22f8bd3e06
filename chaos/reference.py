"""The run without faults: the same script in one plain `python`. Its result is kept for each version of script and library."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from chaos.job import JobError
from chaos.local import REPOSITORY, SCRIPTS
from chaos.trace import Reader
from chaos.verdict import Expected

CACHE = REPOSITORY / ".cache" / "chaos"
LIBRARY = ("trainer-image/regroup",)
SOURCES = ("trainer-image", "operator", "chaos")


def digest_of(directories: Iterable[str]) -> str:
    """Return a digest of all Python files below some directories of the repository."""
    out = hashlib.sha256()
    for path in sorted(p for d in directories for p in (REPOSITORY / d).rglob("*.py")):
        out.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return out.hexdigest()[:16]


def expected(script: str, steps: int, evaluate_every: int = 0) -> Expected:
    """Return the result of `script` after `steps` steps without faults, in one process that has all of the model.

    Raises JobError.
    """
    key = hashlib.sha256((SCRIPTS / script).read_bytes() + digest_of(LIBRARY).encode()).hexdigest()[:16]
    kept = CACHE / f"{script}-{steps}-{evaluate_every}-{key}.json"
    if kept.exists():
        raw = json.loads(kept.read_text())
        return Expected(**{**raw, "evaluated": {int(step): value for step, value in raw["evaluated"].items()}})
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        own = {"CHAOS_TRACE": directory, "CHAOS_STEPS": str(steps), "CHAOS_EVALUATE": str(evaluate_every)}
        own |= {"CHAOS_MESH": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPTS / script)]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
        trace = Reader(Path(directory)).poll()
    if done.returncode != 0 or not trace.done:
        raise JobError(f"The run without faults failed: {done.stderr.strip()[-500:]}")
    last = trace.done[-1]
    found = Expected(last.parameters, last.samples, last.elements, {e.step: e.value for e in trace.evaluated})
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asdict(found)))
    return found
