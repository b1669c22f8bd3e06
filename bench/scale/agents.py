"""Thousands of agents in one event loop, speaking the real protocol over real TLS, for workers whose pods nobody runs.

An `Agent` does what _regroup_agent does in tier Session, as seen from the operator: one stream that begins with hello, the same
reports with the same messages (regroup.protocol), the same back-off and time limits (_regroup_agent.link), and a full TLS
handshake. Its trainer processes are numbers. `Groups` is what trainers do
among themselves: a group forms when all of its members have arrived, and breaks for all when one of them is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from _regroup_agent import core, http, link, progress
from regroup.protocol import VERSION, codec, wire
from regroup.protocol.document import PLANNED
from regroup.protocol.state import Condition, Phase, Seal, StatePair, Times

ATTACH_S = 0.2
"""From the start of a process until it waits for a generation. Of a real one most is import time."""
STEP_S = 0.5
"""Seconds of a step, if nothing else is said."""
FIRST_STEP_S = 0.2
BREAK_S = 0.1
"""Within this time after the loss of a member the collectives of all others have failed."""
TLS_BUFFER_BYTES = 16384
"""Of asyncio's TLS, for each connection: thousands of agents are one process here."""
_DOCUMENT = b'{"body":{"document":{'
"""How a line with a document begins: keys are sorted."""
TIMES = Times(0.01, 0.1, 0.2, 0.15, 0.02, 0.01, 0.01, 0.0)


@dataclass
class Group:
    """The trainers of one generation."""

    number: int
    world_size: int
    is_planned: bool
    step_s: float
    members: dict[str, Agent] = field(default_factory=dict)
    arrived: int = 0
    is_formed: bool = False
    is_broken: bool = False
    base_step: int = 0
    trains_since_s: float = 0.0
    told: int = 0
    last_told_s: float = 0.0
    adopted: int = 0
    last_adopted_s: float = 0.0

    def step(self, now_s: float) -> int:
        """Return the newest step."""
        if not self.is_formed:
            return self.base_step
        return self.base_step + max(0, int((now_s - self.trains_since_s) / self.step_s))


@dataclass
class Counts:
    """What all agents of this process have seen."""

    up: int = 0
    ups: int = 0
    last_up_s: float = 0.0
    downs: int = 0
    dials: int = 0
    reports: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)


class Groups:
    """All groups of all jobs, and what is counted. `target()` returns (address, port) to call now, or None: nobody is there."""

    def __init__(
        self,
        context: ssl.SSLContext,
        server_name: str,
        target: Callable[[], tuple[str, int] | None],
        step_s: float = STEP_S,
    ) -> None:
        self.context, self.server_name, self.target, self.step_s = context, server_name, target, step_s
        self.counts = Counts()
        self.of_job: dict[str, dict[int, Group]] = {}
        """By job UID and generation; the last two generations of a job are kept."""
        asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES  # type: ignore[attr-defined]

    def heard(self, agent: Agent, body: wire.Generation) -> Group:
        """Return the group of a generation that an agent has heard of."""
        groups = self.of_job.setdefault(agent.job_uid, {})
        group = groups.get(body.number)
        if group is None:
            before = groups[max(groups)] if groups else None
            group = groups[body.number] = Group(body.number, body.world_size, body.kind == PLANNED, self.step_s)
            group.base_step = before.step(time.monotonic()) if before is not None else 0
            for number in sorted(groups)[:-3]:
                del groups[number]
        group.told += 1
        group.last_told_s = time.monotonic()
        if body.member:
            group.members[agent.pod_uid] = agent
        return group

    def arrived(self, group: Group) -> None:
        """One more member is at the store; the last one makes the group stand."""
        group.arrived += 1
        if group.arrived >= group.world_size and not group.is_broken:
            group.is_formed, group.trains_since_s = True, time.monotonic()
            for member in list(group.members.values()):
                member.formed(group)

    def lose(self, agents: list[Agent]) -> None:
        """Break the groups that these agents are in."""
        for group in {id(a.group): a.group for a in agents if a.group is not None}.values():
            group.base_step = group.step(time.monotonic())
            group.is_formed, group.is_broken = False, True
            lost = {a.pod_uid for a in agents}
            first = min((a.rank for a in agents if a.group is group), default=0)
            for member in group.members.values():
                if member.pod_uid not in lost:
                    member.break_soon(group, first)


class Refused(Exception):
    """The operator answered, but not with success."""


class _Connection(asyncio.Protocol):
    """The answer to the request for the stream, and then its lines."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._buffer, self._body = agent, b"", b""
        self.transport: Any = None
        self._is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        link._notice_a_dead_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_open:
            head, mark, rest = self._buffer.partition(b"\r\n\r\n")
            if not mark:
                return
            status, length = _parsed(head)
            if len(rest) < length:
                return
            self._buffer, self._is_open = rest[length:], status == 200
            self._agent.answered(status, rest[:length])
        if self._is_open:
            self._read_chunks()

    def _read_chunks(self) -> None:
        while True:
            size, mark, rest = self._buffer.partition(b"\r\n")
            if not mark:
                return
            length = int(size, 16)
            if len(rest) < length + 2:
                return
            self._buffer = rest[length + 2 :]
            self._body += rest[:length]
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                self._agent.said(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._agent.broke(self, exc)


def _parsed(head: bytes) -> tuple[int, int]:
    """Return status and length of the body of an answer."""
    low = head.lower()
    at = low.find(b"content-length:")
    length = int(low[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    return int(head[9:12]), length


class Agent:
    """One worker's agent with one trainer process."""

    def __init__(
        self, groups: Groups, *, namespace: str, job: str, job_uid: str, pod: str, pod_uid: str, token: str, port: int
    ) -> None:
        self._groups = groups
        self.job, self.job_uid, self.pod, self.pod_uid = job, job_uid, pod, pod_uid
        self.namespace, self.token, self._store_port = namespace, token, port
        self.boot = uuid.uuid4().hex
        self._path = f"/v1/namespaces/{namespace}/pods/{pod}/stream"
        self._incarnation = 0
        self._phase, self._generation, self._cause = Phase.STARTING, 0, ""
        self._heard = self._entered = self._adopted = self._left = 0
        self._state: StatePair | None = None
        self.group: Group | None = None
        self.rank = 0
        self._progress_factor = 1.0
        self._is_attached = self._first_said = False
        self._connection: _Connection | None = None
        self._unanswered: deque[float] = deque()
        """Monotonic times at which the reports without an answer were sent on this stream, oldest first."""
        self._num_answered = 0
        self._opened: asyncio.Future[tuple[int, bytes]] | None = None
        """Status and body of the answer to the hello."""
        self._broken: asyncio.Future[str] | None = None
        self.is_up = False
        self._task: asyncio.Task[None] | None = None
        self._progress: asyncio.TimerHandle | None = None
        self.ended = False
        self.num_ups = 0

    # --- its life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, and again for as long as it lives."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def die(self) -> None:
        """Its container is gone: its connections end as the kernel ends them."""
        self.ended = True
        if self._task is not None:
            self._task.cancel()
        self._down()
        if self._progress is not None:
            self._progress.cancel()

    async def _run(self) -> None:
        counts = self._groups.counts
        wait_s = link.FIRST_WAIT_S
        while not self.ended:
            was_up = False
            try:
                await self._session()
            except (TimeoutError, OSError, EOFError, Refused, ValueError) as error:
                was_up = self.is_up
                counts.troubles[f"{type(error).__name__}: {error}"[:80] if not was_up else "went down"] += 1
            finally:
                self._down()
            wait_s = link.FIRST_WAIT_S if was_up else min(wait_s * 2, link.LAST_WAIT_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _session(self) -> None:
        loop = asyncio.get_running_loop()
        self._broken = loop.create_future()
        self._connection = connection = await self._dial()
        self._opened = loop.create_future()
        self._groups.counts.reports += 1
        hello = codec.line(self._report(wire.Hello(VERSION, 1)))
        asks = http.request("POST", self._groups.server_name, self._path, self.token)
        connection.transport.write(asks + http.chunk(hello))
        status, body = await asyncio.wait_for(self._opened, link.ANSWER_TIMEOUT_S)
        if status != 200:
            self._groups.counts.refusals[f"{status} {http.sentence(body)}"[:60]] += 1
            raise Refused(str(status))
        self._went_up()
        raise Refused(await self._broken)

    async def _dial(self) -> _Connection:
        groups = self._groups
        target = groups.target()
        if target is None:
            raise ConnectionRefusedError("The Service has no endpoint.")
        groups.counts.dials += 1
        connecting = asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), *target, ssl=groups.context, server_hostname=groups.server_name
        )
        _, protocol = await asyncio.wait_for(connecting, link.CONNECT_TIMEOUT_S + link.HANDSHAKE_TIMEOUT_S)
        return protocol

    def _went_up(self) -> None:
        counts = self._groups.counts
        self.is_up = True
        self.num_ups += 1
        counts.up, counts.ups, counts.last_up_s = counts.up + 1, counts.ups + 1, time.monotonic()
        if self._incarnation == 0:  # a session's process starts once the operator is reached
            self._incarnation = 1
            asyncio.get_running_loop().call_later(ATTACH_S, self._attached)
            self._post(wire.Changed())
            return
        group = self.group
        if group is not None and self._phase == Phase.TRAINING:  # rule RESAY
            self._post(self._adopted_body(group))
            self._post(self._progress_body(group))

    def _down(self) -> None:
        if self.is_up:
            self._groups.counts.up -= 1
            self._groups.counts.downs += 1
        self.is_up = False
        connection, self._connection = self._connection, None
        self._unanswered.clear()
        self._num_answered = 0
        if connection is not None and connection.transport is not None:
            connection.transport.abort()

    def broke(self, connection: object, error: Exception | None) -> None:
        """Its connection has ended."""
        if connection is self._connection:
            self._give_up(f"closed: {error}")

    def _give_up(self, why: str) -> None:
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(EOFError(why))
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(why)

    def overdue(self, now_s: float) -> None:
        """Give the connection up where a report is not answered for too long."""
        if self.is_up and self._unanswered and now_s - self._unanswered[0] > link.ANSWER_TIMEOUT_S:
            self._give_up("no answer")

    # --- reports ---------------------------------------------------------------------------------------------------

    def answered(self, status: int, body: bytes) -> None:
        """Note that the operator has answered the request for the stream."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_result((status, body))

    def _answered(self, answer: wire.Answered) -> None:
        """Note that the operator has taken reports, or refuses one."""
        while self._num_answered < answer.reports and self._unanswered:
            self._num_answered += 1
            self._unanswered.popleft()
        if answer.status != 204:
            self._groups.counts.refusals[f"{answer.status} {answer.error}"[:60]] += 1
            self._give_up(str(answer.status))
        else:
            self._progress_factor = answer.progress_factor

    def _post(self, body: Any) -> None:
        if self._connection is None or not self.is_up:
            return
        self._groups.counts.reports += 1
        self._unanswered.append(time.monotonic())
        self._connection.transport.write(http.chunk(codec.line(self._report(body))))

    def _report(self, body: Any) -> wire.Report:
        group, phase = self.group, self._phase
        step = group.step(time.monotonic()) if group is not None and phase == Phase.TRAINING else 0
        if phase == Phase.TRAINING and step:
            self._state = StatePair(self._generation, step)
        condition = Condition(
            incarnation=self._incarnation,
            generation=self._generation,
            phase=phase,
            step=step or (self._state.step if self._state else 0),
            heard=self._heard,
            entered=self._entered,
            adopted=self._adopted,
            session=True,
            cause=self._cause or None,
        )
        seal = None
        if phase in (Phase.STARTING, Phase.READY, Phase.BROKEN):
            seal = Seal(max(self._entered, self._left), self._state, self._adopted, self._adopted if self._state else 0)
        return wire.Report(self.job_uid, self.pod_uid, self.boot, condition, seal, self._store_port, body)

    def _adopted_body(self, group: Group) -> wire.Adopted:
        return wire.Adopted(group.base_step, "self", self._state, transfer_ms=1.0, form_ms=5.0)

    def _progress_body(self, group: Group, first_step_ms: float | None = None) -> wire.Progress:
        step = group.step(time.monotonic())
        return wire.Progress(
            step=step,
            loss=1.0 / (1 + step),
            samples=step * 256,
            digest="0123456789abcdef",
            total_steps=1_000_000,
            samples_per_second=256 / group.step_s,
            first_step_ms=first_step_ms,
            step_s=group.step_s,
            longest_s=group.step_s,
            times=TIMES if step > 1 else None,
        )

    # --- commands --------------------------------------------------------------------------------------------------

    def said(self, line: bytes) -> None:
        """Take one line of the stream."""
        if self.ended or not line:
            return
        if line.startswith(_DOCUMENT):
            return  # for the store's host; a group here needs none
        if line.startswith(wire.Answered.START):
            self._answered(wire.Answered.decode(line))
            return
        body = wire.Command.decode(line).body
        if isinstance(body, wire.Generation):
            self._hear(body)
        elif isinstance(body, wire.Ping):
            self._post(wire.Changed())
        elif isinstance(body, wire.ProgressRequest):
            group = self.group
            trains = group is not None and self._phase == Phase.TRAINING
            self._post(self._progress_body(group) if trains and group is not None else wire.Changed())
        elif isinstance(body, wire.Stop):
            self._phase = Phase.STOPPED
            self._post(wire.Changed())
            self.ended = True
            self._give_up("stopped")

    def _hear(self, body: wire.Generation) -> None:
        if body.number <= self._heard:
            return
        self._heard = body.number
        group = self._groups.heard(self, body)
        if not body.member:
            if self.group is not None:
                self._leave()
            self._left = max(self._left, body.number)
            return
        self.rank = body.rank_offset
        if self._is_attached:
            asyncio.get_running_loop().call_soon(self._enter, group)

    def _leave(self) -> None:
        group, self.group = self.group, None
        if self._progress is not None:
            self._progress.cancel()
        if group is not None and self._phase == Phase.TRAINING:
            step = group.step(time.monotonic())
            self._state = StatePair(group.number, step) if step or self._state is None else self._state
        self._left = max(self._left, self._entered)
        self._phase, self._generation = Phase.READY, 0

    def _enter(self, group: Group) -> None:
        if self.ended or group.number != self._heard:
            return
        joins = self.group is None
        self._leave()
        self.group, self._cause = group, ""
        self._entered = self._generation = group.number
        self._phase = Phase.ARRIVED
        wait_s = core.CHANGED_DELAY_S if group.is_planned and joins else core.FORMING_DELAY_S
        asyncio.get_running_loop().call_later(wait_s, self._say_arrived, group)
        self._groups.arrived(group)

    def _say_arrived(self, group: Group) -> None:
        if self.group is group and self._phase == Phase.ARRIVED:
            self._post(wire.Changed())

    def formed(self, group: Group) -> None:
        """All members have arrived."""
        if self.group is not group or self.ended:
            return
        if self._state is None:
            self._state = StatePair(group.number, 0)
        self._adopted, self._phase = group.number, Phase.TRAINING
        group.adopted += 1
        group.last_adopted_s = time.monotonic()
        self._post(self._adopted_body(group))
        self._first_said = False
        self._progress = asyncio.get_running_loop().call_later(FIRST_STEP_S, self._say_progress, group)

    def _say_progress(self, group: Group) -> None:
        if self.group is not group or self.ended or self._phase != Phase.TRAINING:
            return
        self._post(self._progress_body(group, None if self._first_said else FIRST_STEP_S * 1000))
        self._first_said = True
        wait_s = max(group.step_s, progress.interval_s(self.rank, group.world_size, self._progress_factor))
        self._progress = asyncio.get_running_loop().call_later(wait_s, self._say_progress, group)

    def _attached(self) -> None:
        if self.ended:
            return
        self._is_attached, self._phase = True, Phase.READY
        self._post(wire.Changed())
        groups = self._groups.of_job.get(self.job_uid, {})
        group = groups.get(self._heard)
        if group is not None and self.pod_uid in group.members:
            self._enter(group)

    def break_soon(self, group: Group, first_rank: int) -> None:
        """Have a member's collective fail a moment after another member is gone, at once beside the one that is lost."""
        wait_s = 0.0 if abs(self.rank - first_rank) < 3 else random.uniform(0.01, BREAK_S)
        asyncio.get_running_loop().call_later(wait_s, self._break, group, first_rank)

    def _break(self, group: Group, lost_rank: int) -> None:
        if self.group is not group or self._heard > group.number or self.ended:
            return
        step = group.base_step
        self._leave()
        self._phase, self._generation = Phase.BROKEN, group.number
        self._cause = f"The connection to rank {lost_rank} has ended."
        fault = wire.Fault(cause="collective", message=self._cause, step=step, local_rank=0, peer_rank=lost_rank)
        self._post(replace(fault, generation=group.number, incarnation=self._incarnation))


async def watch_answers(agents: Callable[[], list[Agent]]) -> None:
    """Have each agent look every second whether it has waited too long, until cancelled."""
    while True:
        await asyncio.sleep(1.0)
        now_s = time.monotonic()
        for agent in agents():
            with contextlib.suppress(Exception):
                agent.overdue(now_s)
