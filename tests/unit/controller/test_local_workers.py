"""Agents as subprocesses are told apart by the spec that they were started for, as pods are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from regroup_cli.local import LocalWorkers
from regroup_operator.api import worker_digest
from tests.builders.plan import make_job


def test_agent_carries_the_digest_of_its_spec(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("")
    job = make_job().build()

    async def run() -> None:
        workers = LocalWorkers(tmp_path, agent, ["python", "train.py"], {})
        await workers.create(job, 0, 0, ())
        assert [pod.spec_digest for pod in workers.list(job.key, job.uid)] == [worker_digest(job)]
        await workers.stop()

    asyncio.run(run())
