"""A process that has the agents of all running worker pods, and the handle by which a benchmark or a test has it.

`python -m bench.scale.fleet` reads a JSON object of settings, then one command a line on stdin, and answers each with a line. It
finds the workers by a watch of its own, as its own API user, and the leader by the label that the membership Service selects.
`Fleet` starts it, asks it, ends it. It makes no request for a token (tokens.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.scale.agents import STEP_S, Agent, Groups, watch_answers
from bench.scale.tokens import ServiceAccount, TokenMint
from regroup_operator.api.names import LABEL_JOB_NAME, LABEL_LEADER
from regroup_operator.kube.client import PODS, ApiError, Client, Resource
from regroup_operator.kube.informer import Informer
from regroup_operator.kube.pods import controller_of

SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts")


@dataclass(frozen=True)
class Setup:
    """Settings that the process reads at its start. `ports`: of each operator's pod, by its name."""

    kubeconfig: str
    sa_key: str
    ca_file: str
    server_name: str
    operator_namespace: str
    namespace: str
    ports: Mapping[str, int]
    step_s: float = STEP_S


@dataclass(frozen=True)
class _Seen:
    """What is kept of a pod."""

    name: str
    uid: str
    job: str
    job_uid: str
    runs: bool


class _Process:
    def __init__(self, setup: Setup, client: Client) -> None:
        self._setup, self._client = setup, client
        self._mint = TokenMint(Path(setup.sa_key))
        self._account: ServiceAccount | None = None
        self._leaders: Informer[str] = Informer(
            client,
            PODS,
            lambda item, _: item["metadata"]["name"],
            lambda _old, _new: None,
            namespace=setup.operator_namespace,
            label_selector=f"{LABEL_LEADER}=true",
        )
        self._pods: Informer[_Seen] = Informer(
            client, PODS, _see, self._changed, namespace=setup.namespace, label_selector=LABEL_JOB_NAME
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(setup.ca_file)
        self._groups = Groups(context, setup.server_name, self._target, setup.step_s)
        self._agents: dict[str, Agent] = {}
        self._num_seen = 0
        self._last_seen_s = 0.0

    def _target(self) -> tuple[str, int] | None:
        """Return where the membership Service leads now: a pod that has the leader's label."""
        ports = [self._setup.ports[name] for _, name in self._leaders.items if name in self._setup.ports]
        return ("127.0.0.1", random.choice(ports)) if ports else None

    def _changed(self, old: _Seen | None, new: _Seen | None) -> None:
        if old is not None and (new is None or new.uid != old.uid):
            agent = self._agents.pop(old.uid, None)
            if agent is not None and not agent.ended:
                self._groups.lose([agent])
                agent.die()
        if new is not None and new.runs and new.uid not in self._agents and self._account is not None:
            self._num_seen, self._last_seen_s = self._num_seen + 1, time.monotonic()
            agent = self._agents[new.uid] = Agent(
                self._groups,
                namespace=self._setup.namespace,
                job=new.job,
                job_uid=new.job_uid,
                pod=new.name,
                pod_uid=new.uid,
                token=self._mint.token(self._account, new.name, new.uid),
                port=20_000 + self._num_seen % 40_000,
            )
            agent.start()

    async def run(self) -> None:
        """Serve commands until stdin ends."""
        account = await self._client.get(SERVICE_ACCOUNTS, self._setup.namespace, "default")
        self._account = ServiceAccount(self._setup.namespace, "default", account["metadata"]["uid"])
        tasks = [
            asyncio.create_task(self._leaders.run()),
            asyncio.create_task(self._pods.run()),
            asyncio.create_task(watch_answers(lambda: list(self._agents.values()))),
        ]
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print(json.dumps({"ready": True}), flush=True)
        while line := await reader.readline():
            command = json.loads(line)
            try:
                answer = await getattr(self, f"do_{command.pop('do')}")(**command)
            except ApiError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
        for task in tasks:
            task.cancel()
        for agent in self._agents.values():
            agent.die()

    async def do_counts(self) -> dict[str, Any]:
        """Return what all agents have seen so far."""
        counts = self._groups.counts
        ended = sum(agent.ended for agent in self._agents.values())
        # Not asdict: of a Counter it makes one of pairs.
        found = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(counts).items()}
        return found | {"agents": len(self._agents) - ended, "last_seen_s": self._last_seen_s}

    async def do_groups(self, job: str) -> list[dict[str, Any]]:
        """Return the last generations of a job that its agents have heard of, the oldest first."""
        uid = next((a.job_uid for a in self._agents.values() if a.job == job), "")
        names = ("number", "world_size", "told", "last_told_s", "arrived", "adopted", "last_adopted_s", "is_formed")
        return [{n: getattr(g, n) for n in names} for _, g in sorted(self._groups.of_job.get(uid, {}).items())]

    async def do_newest(self) -> dict[str, int]:
        """Return how many jobs have heard of which generation as their newest."""
        found: dict[str, int] = {}
        for groups in self._groups.of_job.values():
            found[str(max(groups))] = found.get(str(max(groups)), 0) + 1
        return found

    async def do_kill(self, job: str, number: int) -> dict[str, Any]:
        """End so many agents of a job at once, as a power cut ends their nodes, and delete their pods from the API."""
        mine = sorted((a for a in self._agents.values() if a.job == job and not a.ended), key=lambda a: a.pod)
        lost = random.Random(7).sample(mine, number)
        at_s = time.monotonic()
        self._groups.lose(lost)
        for agent in lost:
            agent.die()
        await asyncio.gather(*(self._delete(agent) for agent in lost))
        return {"at_s": at_s, "deleted_s": time.monotonic(), "pods": [agent.pod for agent in lost]}

    async def _delete(self, agent: Agent) -> None:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": agent.pod_uid}}
        path = PODS.path(self._setup.namespace, agent.pod)
        await self._client._call(("delete", PODS), "DELETE", path, body=body, timeout_s=30.0)


def _see(item: Mapping[str, Any], _: _Seen | None) -> _Seen | None:
    owner, status = controller_of(item), item.get("status") or {}
    if owner is None:
        return None
    metadata = item["metadata"]
    runs = status.get("phase") == "Running" and "deletionTimestamp" not in metadata
    return _Seen(metadata["name"], metadata["uid"], owner["name"], owner["uid"], runs)


class Fleet:
    """The process, as its parent has it."""

    def __init__(self, setup: Setup, log: Path) -> None:
        command = [sys.executable, "-m", "bench.scale.fleet"]
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
        self._log = log
        self._write(asdict(setup))
        if not self._read().get("ready"):
            raise RuntimeError(f"The agents' process did not start; see {log}.")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Return the answer to a command (do_ methods of the process)."""
        self._write({"do": do, **arguments})
        answer = self._read()
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer

    def stop(self) -> None:
        """End the process; all connections end with it."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _write(self, data: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(data).encode() + b"\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The agents' process has ended: {self._log.read_text(errors='replace')[-500:]}")
        return json.loads(line)


async def _main() -> None:
    setup = Setup(**json.loads(sys.stdin.readline()))
    client = await Client.connect(setup.kubeconfig)
    try:
        await _Process(setup, client).run()
    finally:
        await client.close()


if __name__ == "__main__":
    gc.set_threshold(200_000, 50, 50)  # many objects that stay
    asyncio.run(_main())
