"""Faults by signals and files. The processes of a job are processes of this machine, wherever the job runs.

A rule of the plan becomes a process here, at its moment. Each method `_KIND` injects that kind and returns its target.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos.job import Job, NothingToHitError
from chaos.kinds import SCRIPT
from chaos.plan import Fault

WRITES_S = 1.0
"""Time after which a checkpoint with unchanged files is not being written any more. Its writer was killed."""
_CHECKPOINT = re.compile(r"(?:\.writing-)?step-(\d+)\.g(\d+)-.*")
"""Name of a checkpoint: regroup.checkpoint.store writes it aside first, then renames it, then commits it."""


@dataclass(frozen=True)
class Trainer:
    """A trainer process: its id on this machine, and its id in its container if it has one."""

    pid: int
    inner_pid: int
    start: int  # in clock ticks since the machine's boot


@dataclass(frozen=True)
class Agent:
    """One agent and its children."""

    pid: int
    worker: str
    slot: int
    trainers: tuple[Trainer, ...]
    zygote: int | None


class SignalledJob(Job):
    """A job whose processes run on this machine."""

    checkpoints: Path

    @abstractmethod
    def agents(self) -> list[Agent]:
        """Return the agents that run, by slot."""

    @abstractmethod
    def scale(self, workers: int) -> None:
        """Change the number of workers as a user does. Raises JobError."""

    def writes_checkpoint(self) -> bool:
        whole, begun = (-1, -1), (-1, -1)
        for path in self.checkpoints.glob("*step-*"):
            match = _CHECKPOINT.fullmatch(path.name)
            if match is None:
                continue
            order = int(match[2]), int(match[1])
            if (path / "COMMIT.json").exists():
                whole = max(whole, order)
                continue
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime < WRITES_S:
                    begun = max(begun, order)
        return begun > whole  # an older one is being deleted

    def inject(self, fault: Fault) -> str:
        self._check_repeatable(fault)
        what: str = getattr(self, "_" + fault.kind.replace("-", "_"))(fault)
        return what

    def _check_repeatable(self, fault: Fault) -> None:
        """Raise NothingToHitError if the fault would rightly fail the job.

        That is so after the last step if no checkpoint has the state of that step. Members of a script, and of a model
        that is split over workers, go back to an older checkpoint together, so they may be hit.
        """
        status = self.status()
        finished, saved = status.get("finished"), (status.get("checkpoint") or {}).get("step")
        if not finished or self.scenario.tier == SCRIPT or self.scenario.workers_per_group > 1:
            return
        if saved != finished["step"]:
            raise NothingToHitError(f"the last step is in no checkpoint ({saved}), so no script could run again")
        if fault.kind == "damage-checkpoint":
            raise NothingToHitError("the state of the last step is in the newest checkpoint only")

    def _trainers(self) -> list[tuple[Agent, Trainer]]:
        found = [(a, trainer) for a in self.agents() for trainer in a.trainers]
        if not found:
            raise NothingToHitError("no trainer process runs")
        return found

    def _signal(self, number: signal.Signals, *pids: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_trainer(self, fault: Fault) -> str:
        found = self._trainers()
        agent, trainer = found[fault.pick(len(found))]
        self._signal(signal.SIGKILL, trainer.pid)
        return f"{trainer.pid} of {agent.worker}"

    def _kill_two(self, fault: Fault) -> str:
        found = self._trainers()
        hit = {found[fault.pick(len(found))], found[fault.pick(len(found), beside=1)]}
        self._signal(signal.SIGKILL, *(t.pid for _, t in hit))
        return " and ".join(f"{t.pid} of {a.worker}" for a, t in hit)

    def _kill_all(self, fault: Fault) -> str:  # noqa: ARG002
        found = self._trainers()
        self._signal(signal.SIGKILL, *(t.pid for _, t in found))
        return f"all {len(found)}"

    def _store_host(self) -> Agent:
        store = (self.status().get("membership") or {}).get("store")
        hosts = [a for a in self.agents() if store and a.slot == store["slot"] and a.trainers]
        if not hosts:
            raise NothingToHitError("the store's host does not run")
        return hosts[-1]

    def _kill_store_host(self, fault: Fault) -> str:  # noqa: ARG002
        host = self._store_host()
        self._signal(signal.SIGKILL, host.trainers[0].pid)
        return f"{host.trainers[0].pid} of {host.worker}"

    def _kill_store_agent(self, fault: Fault) -> str:  # noqa: ARG002
        host = self._store_host()
        self._signal(signal.SIGKILL, host.pid)
        return host.worker

    def _an_agent(self, fault: Fault) -> Agent:
        agents = self.agents()
        if not agents:
            raise NothingToHitError("no agent runs")
        return agents[fault.pick(len(agents))]

    def _kill_agent(self, fault: Fault) -> str:
        agent = self._an_agent(fault)
        self._signal(signal.SIGKILL, agent.pid)
        return agent.worker

    def _term_agent(self, fault: Fault) -> str:
        agent = self._an_agent(fault)
        self._signal(signal.SIGTERM, agent.pid)
        return agent.worker

    def _kill_zygote(self, fault: Fault) -> str:
        agents = [a for a in self.agents() if a.zygote]
        if not agents:
            raise NothingToHitError("no zygote runs")
        agent = agents[fault.pick(len(agents))]
        assert agent.zygote is not None
        self._signal(signal.SIGKILL, agent.zygote)
        return f"{agent.zygote} of {agent.worker}"

    def _stop_trainer(self, fault: Fault) -> str:
        found = self._trainers()
        agent, trainer = found[fault.pick(len(found))]
        self._signal(signal.SIGSTOP, trainer.pid)
        self.undo.after(fault.lasts_s, lambda: self._signal(signal.SIGCONT, trainer.pid))
        return f"{trainer.pid} of {agent.worker}"

    def _stop_agent(self, fault: Fault) -> str:
        agent = self._an_agent(fault)
        self._signal(signal.SIGSTOP, agent.pid)
        self.undo.after(fault.lasts_s, lambda: self._signal(signal.SIGCONT, agent.pid))
        return agent.worker

    def _term_trainer(self, fault: Fault) -> str:
        found = self._trainers()
        agent, trainer = found[fault.pick(len(found))]
        self._signal(signal.SIGTERM, trainer.pid)
        return f"{trainer.pid} of {agent.worker}"

    def _scale(self, fault: Fault) -> str:
        group = self.scenario.workers_per_group
        low = self.scenario.min_workers or group
        sizes = [n for n in range(low, self.scenario.max_workers + 1, group) if n != self.wanted]
        if not sizes:
            raise NothingToHitError("the job has one size only")
        # Small sizes twice as often: to one worker and from it is where most has gone wrong.
        sizes = [n for n in sizes for _ in range(2 if n <= 2 * group else 1)]
        wanted = sizes[fault.number % len(sizes)]
        self.scale(wanted)
        before, self.wanted = self.wanted, wanted
        return f"{before} -> {wanted}"

    def _damage_checkpoint(self, fault: Fault) -> str:
        whole = [p for p in self.checkpoints.glob("step-*") if (p / "COMMIT.json").exists()]
        if len(whole) < 2:
            raise NothingToHitError("there are no two checkpoints")
        newest = max(whole, key=lambda p: p.stat().st_mtime)
        if fault.number % 2:
            shutil.rmtree(newest, ignore_errors=True)
            how = "removed"
        else:
            data = max(newest.rglob("*.distcp"), key=lambda p: p.stat().st_size)
            os.truncate(data, data.stat().st_size - 1)
            how = "truncated"
        return f"{newest.name} {how}, {self._kill_all(fault)} killed"

    def _slow_rank(self, fault: Fault) -> str:
        found = self._trainers()
        agent, trainer = found[fault.pick(len(found))]
        file = self.traces / f"slow-{agent.worker}-{trainer.inner_pid}"
        file.write_text("0.2")
        self.undo.after(fault.lasts_s, lambda: file.unlink(missing_ok=True))
        return f"{trainer.pid} of {agent.worker}"
