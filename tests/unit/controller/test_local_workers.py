"""Agents as subprocesses are told apart by the spec that they were started for, as pods are."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from regroup_cli.local import LocalWorkers
from regroup_operator.api import worker_digest
from regroup_operator.model.ports import Forbidden
from tests.builders.plan import make_job

WITHIN_S = 20.0


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


def test_end_of_a_worker_is_seen_though_more_run_than_the_pool_has_threads(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import os, signal\nif os.environ['REGROUP_POD_NAME'].endswith('-3-0'):\n    os._exit(7)\nsignal.pause()\n"
    )
    job = make_job().build()

    async def run() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(ThreadPoolExecutor(2))
        workers = LocalWorkers(tmp_path, agent, ["python", "train.py"], {})

        def changed(_: object) -> None:
            if any(pod.last_exit_code == 7 for pod in workers.list(job.key, job.uid)):
                ended.set()

        workers.on_change(changed)
        try:
            for slot in range(4):
                await workers.create(job, slot, 0, ())
            async with asyncio.timeout(WITHIN_S):
                await ended.wait()
        finally:
            await workers.stop(1.0)

    asyncio.run(run())
