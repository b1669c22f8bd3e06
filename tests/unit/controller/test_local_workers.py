"""Agents as subprocesses are told apart by the spec that they were started for, as pods are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from regroup_cli.local import LocalWorkers
from regroup_operator.api import worker_digest
from regroup_operator.model.ports import Forbidden
from tests.builders.plan import make_job


def test_agent_carries_the_digest_of_its_spec(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("")
    job = make_job().build()

    async def run() -> None:
        workers = LocalWorkers(tmp_path, agent, ["python", "train.py"], {})
        await workers.create(job, 0, 0, ())
        (pod,) = workers.list(job.key, job.uid)
        assert pod.spec_digest == worker_digest(job)
        assert workers.known(pod) is pod
        with pytest.raises(Forbidden, match="has ended"):
            workers.known(replace(pod, uid="an earlier one"))
        await workers.stop()

    asyncio.run(run())
