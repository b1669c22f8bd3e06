"""The pages on the library name all of it, and their examples run."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regroup
from regroup.collective import Collective
from regroup.job import Job
from regroup.protocol import env
from regroup.protocol.state import Times
from regroup.step import Step
from regroup.transaction.laps import StepTimes
from regroup_operator.plan.report.breakdown import NAMES

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reference/library.md").read_text()
ATTRIBUTES = {
    "job": {"outcome", "model", "optimizer", "plan", "source", "state", "total"},
    "step": {"index", "loss", "committed", "interrupted", "rehearsal", "virtual_worker"},
}
INSIDE = {
    # The script has these already, or they are for the session itself.
    "job": {"model", "optimizer", "plan", "source", "state", "total", "groups"},
    "step": {"interrupted"},
}


def public(cls: type[Any]) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize(("name", "cls"), [("job", Job), ("step", Step)])
def test_page_names_every_attribute(name: str, cls: type[Any]) -> None:
    named = set(re.findall(rf"`{name}\.(\w+)", PAGE))
    assert named == (public(cls) | ATTRIBUTES[name]) - INSIDE[name]


def test_page_names_every_argument() -> None:
    for call, function in (
        ("## regroup.session", regroup.session),
        ("## regroup.pipeline", regroup.pipeline),
        ("### step.backward", Step.backward),
        ("## regroup.cached", regroup.cached),
        ("### step.run", Step.run),
        ("## regroup.stream", regroup.stream),
        ("### step.commit", Step.commit),
    ):
        section = re.split(r"^##+ ", PAGE.split(f"\n{call}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
        rows = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
        assert rows == set(inspect.signature(function).parameters) - {"self", "positional"}, call
    for method in (Step.backward, Step.run, Step.commit, Job.steps, Job.collective, Job.pause):
        for argument in list(inspect.signature(method).parameters)[1:]:
            assert argument == "positional" or re.search(rf"`(step|job)\.{method.__name__}\([^`]*\b{argument}\b", PAGE)
    assert set(re.findall(r"`team\.(\w+)", PAGE)) == public(Collective)


def test_page_names_every_part_of_a_step() -> None:
    section = re.split(r"^##+ ", PAGE.split("\n### step.times\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(StepTimes._fields)
    assert list(StepTimes._fields) == [field.name for field in dataclasses.fields(Times)]
    assert StepTimes._fields == tuple(NAMES)


def test_example_for_ddp_users_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.SOCKET, env.CHECKPOINT_DIR, env.MAX_WORLD_SIZE):
        monkeypatch.delenv(name, raising=False)
    code = (DOCS / "tutorials/from-ddp.md").read_text().split("## After")[1].split("```python\n")[1].split("```")[0]
    code = code.replace("num_workers=4", "num_workers=2")  # torch warns where a machine has fewer cores
    names: dict[str, Any] = {
        "build_model": lambda: torch.nn.Linear(4, 2),
        "train": torch.utils.data.TensorDataset(torch.randn(300, 4), torch.randint(2, (300,))),
        "cross_entropy": torch.nn.functional.cross_entropy,
        "DataLoader": torch.utils.data.DataLoader,
        "STEPS": 2,
        "torch": torch,
        "regroup": regroup,
    }
    exec(compile(code, "from-ddp.md", "exec"), names)
    assert names["job"].outcome == "Complete"
    assert names["step"].committed
