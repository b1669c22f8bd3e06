"""Compose the policies into one plan for one job. See the package's text for the order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from regroup.protocol.document import CheckpointRef, Document, OlderGeneration
from regroup.protocol.state import Phase
from regroup.protocol.wire import DocumentCommand, Generation, ProgressRequest, Prune, Stop, Welcome
from regroup_operator.api import Job, processes_per_worker, set_condition
from regroup_operator.api.names import selector
from regroup_operator.api.status import MAX_INCIDENTS, MAX_LINEAGE
from regroup_operator.model.members import MemberId, format_members, gone_name, parse_members
from regroup_operator.model.plan import JobPlan, Memory, Tell
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Observation, Pod, Settings
from regroup_operator.model.worker import Announce, Bounds, Current, Decision, Keep, Standing, Wait, Worker
from regroup_operator.plan.document import build_document, lineage_entries, with_peers
from regroup_operator.plan.membership import names_of, next_generation
from regroup_operator.plan.restarts import Failure, Verdict, judge_restarts
from regroup_operator.plan.standing import assess
from regroup_operator.plan.status import (
    FAILED,
    SUCCEEDED,
    Said,
    phase_of,
    summary,
    training_conditions,
    worker_conditions,
)
from regroup_operator.plan.workers import plan_workers

SCRIPT_AFTER_S = 30.0
"""Processes that run this long without attaching belong to an unmodified script (tier Script). Longer than a session's
imports take on a busy node: until then nobody says Running of a job in which nobody trains."""


@dataclass(frozen=True)
class Clock:
    """`now_s`: monotonic seconds. `wall`: seconds since the epoch, for what people read."""

    now_s: float
    wall: float

    def timestamp(self, ago_s: float = 0.0) -> str:
        """Return RFC 3339 UTC, whole seconds."""
        return datetime.fromtimestamp(self.wall - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def plan_job(
    job: Job, obs: Observation, memory: Memory, clock: Clock, *, fresh_uid: str, settings: Settings, endpoint: str, agent_image: str
) -> JobPlan:  # fmt: skip
    """Return the plan. `fresh_uid` names the next generation if one is issued."""
    return _Planner(job, obs, memory, clock, fresh_uid, settings, endpoint, agent_image).plan()


class _Planner:
    """One run of the plan; holds the parts while they are put together."""

    def __init__(
        self,
        job: Job,
        obs: Observation,
        memory: Memory,
        clock: Clock,
        fresh_uid: str,
        settings: Settings,
        endpoint: str,
        agent_image: str,
    ) -> None:
        self.job, self.obs, self.memory, self.clock, self.settings = job, obs, memory, clock, settings
        self.fresh_uid, self.endpoint = fresh_uid, endpoint
        self.agent_image = agent_image
        self.processes = processes_per_worker(job)
        sessions, peers = with_peers(obs.sessions, memory.document, memory.peers)
        self.obs, self.memory = replace(obs, sessions=sessions), replace(memory, peers=peers)
        self.status: dict[str, Any] = job.status.to_dict()
        self.released = frozenset(self.status.get("released", ()))
        self.notes: list[EventNote] = []
        self.tell: list[Tell] = []
        self.recovery = job.spec.recovery
        self.replicas = job.spec.replicas

    # --- the order of things ---------------------------------------------------------------------------------------

    def plan(self) -> JobPlan:
        failure = self._restarts()
        tier = self._tier()
        self.current = self._current()
        self._assess(tier)
        self._adoption()
        ended = self._ended(failure)
        decision: Decision | None = None
        document: Document | None = None
        if ended is None and self.memory.refusal is None:
            decision = self._membership()
            if isinstance(decision, Announce):
                document = self._announce(decision, tier)
                if document is None:
                    decision = Wait("NoStore", "No member offers a socket for the store yet.", self.clock.now_s + 0.2)
        changes = plan_workers(
            workers=self.workers,
            replicas=self.replicas,
            released=self.released,
            named=self._named(),
            bad_nodes=self.memory.bad_nodes,
            settled=document is None and (self.current is None or self.current.adopted),
            ended=ended is not None or self.memory.refusal is not None,
        )
        if changes.release:
            self.status["released"] = [*self.status.get("released", ()), *(p.uid for p in changes.release)]
        self._prune_released()
        self._progress()
        self._conditions(decision, ended, failure)
        self._commands(tier, ended, document)
        self._count_pods([MemberId(c.slot, c.attempt) for c in changes.create])
        return JobPlan(
            status=self.status,
            urgent=self._urgent(),
            memory=self.memory,
            tell=tuple(self.tell),
            create=tuple((c.slot, c.attempt, c.avoid_nodes) for c in changes.create),
            delete=(*changes.delete, *(p for p in changes.release if not p.terminating)),
            notes=tuple(self.notes),
            look_again_s=self._look_again(decision),
            announced=document is not None,
        )

    # --- failures --------------------------------------------------------------------------------------------------

    def _restarts_status(self) -> dict[str, Any]:
        out: dict[str, Any] = self.status.setdefault(
            "restarts", {"processes": 0, "pods": 0, "generations": 0, "recent": []}
        )
        return out

    def _restarts(self) -> str | None:
        new: list[Failure] = []
        exits, restarts = dict(self.memory.num_exits), dict(self.memory.container_restarts)
        bad_nodes, failed_on = dict(self.memory.bad_nodes), dict(self.memory.failed_on)
        for pod in self.obs.pods:
            name = f"{pod.slot}" + (f".{pod.attempt}" if pod.attempt else "")
            session = self.obs.sessions.get(pod.uid)
            leaves = pod.terminating or (session is not None and session.draining is not None)
            if session is not None and session.num_exits > exits.get(pod.uid, 0):
                fresh = session.exits[-(session.num_exits - exits.get(pod.uid, 0)) :]
                new += [Failure(self._wall(e.at_s), name, e.exit_code, e.last_line) for e in fresh]
                exits[pod.uid] = session.num_exits
            known = restarts.get(pod.uid, 0 if self.memory.seen_pods else pod.container_restarts)
            if pod.container_restarts > known and pod.last_exit_code != 0 and not leaves:
                new += [Failure(self.clock.wall, name, pod.last_exit_code)] * (pod.container_restarts - known)
            restarts[pod.uid] = pod.container_restarts
            if pod.phase == "Failed" and pod.uid not in self.memory.seen_pods and pod.node:
                if self.memory.seen_pods and 0 < (pod.last_exit_code or 0) < 128 and not leaves:
                    new.append(Failure(self.clock.wall, name, pod.last_exit_code))  # ended by itself, not by a signal
                # The last one only, and only if the job is known to run elsewhere, too: a slot must not run out of nodes.
                elsewhere = any(p.node not in ("", pod.node) and p.node_ready for p in self.obs.pods)
                if failed_on.get(pod.slot) == pod.node and elsewhere:
                    bad_nodes[pod.slot] = (pod.node,)
                failed_on[pod.slot] = pod.node
        alive = {pod.uid for pod in self.obs.pods}
        seen = frozenset(p.uid for p in self.obs.pods if p.phase == "Failed") | (self.memory.seen_pods & alive)
        self.memory = replace(
            self.memory,
            num_exits={u: n for u, n in exits.items() if u in alive},
            container_restarts={u: n for u, n in restarts.items() if u in alive},
            bad_nodes=bad_nodes,
            failed_on=failed_on,
            seen_pods=seen | {"-"},
        )
        if not new:
            return None
        status = self._restarts_status()
        verdict: Verdict = judge_restarts(
            recent=[_epoch(t) for t in status.get("recent", ())],
            new=new,
            max_restarts=self.recovery.max_restarts,
            window_s=self.recovery.window_seconds,
            now=self.clock.wall,
        )
        status["processes"] += len(new)
        status["recent"] = [_stamp(t) for t in verdict.recent]
        return verdict.message

    def _count_pods(self, create: list[MemberId]) -> None:
        """Count replaced pods, each once: it is asked for again until the informer has seen it."""
        seen = {pod.id for pod in self.obs.pods}
        fresh = [m for m in create if m not in self.memory.created]
        self.memory = replace(
            self.memory, created=frozenset({*create, *(m for m in self.memory.created if m not in seen)})
        )
        replaced = sum(m.attempt > 0 for m in fresh)
        if replaced and self.status.get("membership"):
            self._restarts_status()["pods"] += replaced

    def _wall(self, at_s: float) -> float:
        return self.clock.wall - (self.clock.now_s - at_s)

    # --- the newest generation -------------------------------------------------------------------------------------

    def _tier(self) -> str | None:
        tier: str | None = self.status.get("tier")
        if tier != "Session" and any(s.condition.session for s in self.obs.sessions.values()):
            tier = "Session"
        elif tier is None and self.status.get("membership"):
            number = self.status["membership"]["generation"]
            started = [
                s.condition_at_s
                for s in self.obs.sessions.values()
                if s.connected and s.condition.phase == "starting" and s.condition.generation == number
            ]
            members = parse_members(self.status["membership"]["members"])
            if started and len(started) >= len(members) and self.clock.now_s >= max(started) + SCRIPT_AFTER_S:
                tier = "Script"
        if tier is not None:
            self.status["tier"] = tier
        return tier

    def _current(self) -> Current | None:
        membership = self.status.get("membership")
        if membership is None:
            return None
        uids = {pod.id: pod.uid for pod in self.obs.pods}
        document, announced_at_s = self.memory.document, self.memory.announced_at_s
        known = document is not None and document.uid == membership["uid"]
        older = tuple(
            OlderGeneration(
                o["generation"], o["uid"], tuple(uids.get(m, gone_name(m)) for m in parse_members(o["members"]))
            )
            for o in membership.get("older", ())
        )
        return Current(
            number=membership["generation"],
            uid=membership["uid"],
            kind=membership["kind"],
            members=parse_members(membership["members"]),
            adopted=membership.get("adopted", False),
            announced_at_s=announced_at_s if known and announced_at_s is not None else self.obs.term_started_s,
            older=older,
            lineage=lineage_entries((e["generation"], e["startStep"]) for e in self.status.get("lineage", ())),
            known=known,
            attempts=0 if membership.get("adopted") else max(1, self.memory.attempts),
            launches=known and self.memory.launches,
            incarnations={m.pod_uid: m.incarnation for m in document.members} if known and document else {},
        )

    def _assess(self, tier: str | None) -> None:
        self.workers: tuple[Worker, ...] = assess(
            current=self.current,
            tier=tier,
            pods=self.obs.pods,
            sessions=self.obs.sessions,
            released=self.released,
            processes=self.processes,
            now_s=self.clock.now_s,
            term_started_s=self.obs.term_started_s,
            disconnect_s=self.recovery.disconnect_seconds,
            settings=self.settings,
        )

    def _members(self) -> list[Worker]:
        return [w for w in self.workers if w.is_member]

    def _adoption(self) -> None:
        """With the first `adopted` write startStep and lineage (rule MAD); with the last, forget the older generations."""
        current, membership = self.current, self.status.get("membership")
        if current is None or membership is None:
            return
        members = self._members()
        reports = [
            w.session.adopted
            for w in members
            if w.session and w.session.adopted and w.session.adopted_generation == current.number
        ]
        if reports and membership.get("startStep") is None:
            start = reports[0].start_step
            membership["startStep"] = start
            lineage = [*self.status.get("lineage", ()), {"generation": current.number, "startStep": start}]
            self.status["lineage"] = lineage[-MAX_LINEAGE:]
            if any(r.rolled_back for r in reports):
                note = (
                    f"Generation {current.number} rolled back to step {start}: no worker holds a newer state any more."
                )
                self.notes.append(EventNote("Warning", "RolledBack", note))
        everyone = all(w.session is not None and w.session.condition.adopted >= current.number for w in members)
        if not current.adopted and membership.get("startStep") is not None and everyone:
            membership["adopted"] = True
            membership["older"] = []
            self.current = replace(current, adopted=True, older=(), attempts=0)
        self._incident_times(members)

    def _incident_times(self, members: list[Worker]) -> None:
        """Fill in what the newest incident's own members have measured since."""
        incidents = self.status.get("incidents") or []
        assert self.current is not None
        if not incidents or incidents[-1]["generation"] != self.current.number:
            return
        last = incidents[-1] = dict(incidents[-1])
        sessions = [w.session for w in members if w.session is not None]
        number = self.current.number
        formed = [s.formed.form_ms for s in sessions if s.formed and s.formed_generation == number]
        moved = [s.adopted.transfer_ms for s in sessions if s.adopted and s.adopted_generation == number]
        first = [s.first_progress for s in sessions if s.first_progress and s.progress_generation == number]
        if self.memory.persist_ms is not None:
            last.setdefault("persistMs", round(self.memory.persist_ms, 1))
        if formed and len(formed) == len(members):
            last.setdefault("formMs", round(max(formed), 1))
        if moved and len(moved) == len(members):
            last.setdefault("transferMs", round(max(moved), 1))
        if first:
            last.setdefault("firstStepMs", round(max(p.first_step_ms or 0.0 for p in first), 1))
            last.setdefault("stepsRedone", max(p.steps_redone for p in first))
        incidents[-1] = last

    # --- the end ---------------------------------------------------------------------------------------------------

    def _has(self, condition: str) -> bool:
        return any(c["type"] == condition and c["status"] == "True" for c in self.status.get("conditions", ()))

    def _ended(self, failure: str | None) -> str | None:
        if self._has("Complete"):
            return SUCCEEDED
        if self._has("Failed") or failure is not None:
            return FAILED
        members = self._members()
        if self.current is not None and members and all(self._finished(w, self.current.number) for w in members):
            return SUCCEEDED
        return None

    def _finished(self, worker: Worker, generation: int) -> bool:
        """Whether a member has said finished: what it says once stays true, whether it can be reached or not."""
        condition = worker.session.condition if worker.session else None
        said = condition is not None and (condition.phase, condition.generation) == (Phase.FINISHED, generation)
        return worker.standing == Standing.FINISHED or (
            said and worker.pod is not None and worker.pod.phase != "Failed"
        )

    # --- membership ------------------------------------------------------------------------------------------------

    def _membership(self) -> Decision:
        refused = None
        if self.current is not None:
            no_witness = any(
                w.session and w.session.fault and w.session.fault.cause == "witness"
                and w.session.fault_generation == self.current.number
                for w in self._members()
            )  # fmt: skip
            refused = (self.memory.tried or frozenset()) if no_witness else None
        return next_generation(
            current=self.current,
            workers=self.workers,
            bounds=Bounds(self.replicas, self.job.min_replicas, self.job.elastic, self.recovery.rejoin_seconds),
            refused=refused,
            now_s=self.clock.now_s,
            settings=self.settings,
        )

    def _announce(self, decision: Announce, tier: str | None) -> Document | None:
        try:
            document = build_document(
                announce=decision,
                current=self.current,
                workers=self.workers,
                job_uid=self.job.uid,
                uid=self.fresh_uid,
                processes=self.processes,
                checkpoint=self._checkpoint_ref(),
                session_tier=tier == "Session",
            )
        except ValueError:
            return None
        previous = self.status.get("membership")
        older: list[dict[str, Any]] = []
        if previous is not None:
            this = {"generation": previous["generation"], "uid": previous["uid"], "members": previous["members"]}
            listed = {generation.uid for generation in document.older}
            older = [o for o in (this, *previous.get("older", ())) if o["uid"] in listed]
        self.status["membership"] = {
            "generation": document.number,
            "uid": document.uid,
            "kind": document.kind,
            "digest": document.digest(),
            "adopted": False,
            "worldSize": document.world_size,
            "members": format_members(w.id for w in decision.members),
            "store": {"host": document.store.host, "port": document.store.port,
                      "slot": next(m.slot for m in document.members if m.pod_uid == document.store.pod_uid)},
            "older": older,
            "lost": list(document.lost),
        }  # fmt: skip
        self.status.setdefault("startTime", self.clock.timestamp())
        if document.number > 1:
            self._restarts_status()["generations"] += 1
        self._incident(decision, document)
        self.notes.append(EventNote("Normal" if decision.kind == "planned" or document.number == 1 else "Warning",
                                    decision.reason, f"Generation {document.number}: {decision.message}"))  # fmt: skip
        self.memory = replace(
            self.memory,
            document=document,
            announced_at_s=self.clock.now_s,
            persist_ms=None,
            launches=tier != "Session",
            attempts=1 if self.current is None or self.current.adopted else self.current.attempts + 1,
            tried=names_of(self.current, self.workers, decision.members),
        )
        return document

    def _incident(self, decision: Announce, document: Document) -> None:
        if document.number == 1:
            return
        culprit = next(
            (w for w in self.workers if w.session and w.session.fault and w.is_member and w.why == decision.cause), None
        )
        observed = culprit.session.fault.observed_ms if culprit and culprit.session and culprit.session.fault else 0.0
        waited_s = max(0.0, self.clock.now_s - decision.detected_at_s)
        incident = {
            "generation": document.number,
            "at": self.clock.timestamp(waited_s),
            "decision": decision.message,
            "cause": decision.cause or None,
            "culprit": decision.culprit or None,
            "detectMs": round(observed, 1),
            "decideMs": round(waited_s * 1000, 1),
        }
        incidents = [*self.status.get("incidents", ()), {k: v for k, v in incident.items() if v is not None}]
        self.status["incidents"] = incidents[-MAX_INCIDENTS:]

    def _checkpoint_ref(self) -> CheckpointRef | None:
        named = self.status.get("checkpoint")
        return CheckpointRef(named["generation"], named["step"], named["directory"]) if named else None

    def _named(self) -> list[MemberId]:
        membership = self.status.get("membership")
        if membership is None:
            return []
        texts = [membership["members"], *(o["members"] for o in membership.get("older", ()))]
        return [m for text in texts for m in parse_members(text)]

    def _prune_released(self) -> None:
        """A released UID matters only while its pod exists (or may still be in the informer's past)."""
        alive = {pod.uid for pod in self.obs.pods}
        kept = [uid for uid in self.status.get("released", ()) if uid in alive]
        if kept or "released" in self.status:
            self.status["released"] = kept

    # --- what people see -------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        if self.current is None:
            return
        counted = (
            (self.current.number, self.current.number - 1) if self.current.kind == "planned" else (self.current.number,)
        )
        best = max(
            (
                (s.progress_generation, s.progress.step, s.progress_at_s or 0.0, s.progress)
                for s in self.obs.sessions.values()
                if s.progress is not None and s.progress_generation in counted
            ),
            key=lambda item: item[:3],
            default=None,
        )
        if best is None:
            return
        generation, step, at_s, report = best
        known = self.status.get("progress") or {}
        progress = {
            "step": step,
            "totalSteps": report.total_steps if report.total_steps is not None else known.get("totalSteps"),
            "loss": report.loss if report.loss is not None else known.get("loss"),
            "samplesPerSecond": report.samples_per_second,
        }
        same = known.get("at") is not None and all(known.get(k) == v for k, v in progress.items())
        # The two clocks drift against each other: what is unchanged keeps its time.
        progress["at"] = known["at"] if same else _stamp(self._wall(at_s))
        self.status["progress"] = {k: v for k, v in progress.items() if v is not None}
        self.status["samples"] = {"committed": report.samples, "digest": report.digest}
        named = self.status.get("checkpoint")
        started = self.status["membership"].get("startStep") is not None  # rule MAD
        newest = generation == self.current.number
        if report.checkpoint and newest and started and self.job.spec.checkpoint is not None:
            new = (report.checkpoint["generation"], report.checkpoint["step"])
            if named is None or new > (named["generation"], named["step"]):
                kept = [*(named or {}).get("kept", ()), report.checkpoint["directory"]][
                    -self.job.spec.checkpoint.keep :
                ]
                self.status["checkpoint"] = {
                    "generation": new[0],
                    "step": new[1],
                    "directory": report.checkpoint["directory"],
                    "at": _stamp(self._wall(at_s)),
                    "kept": kept,
                }
                first = next((w for w in self._members() if w.connected and w.pod), None)
                if first is not None and first.pod is not None:
                    self.tell.append(Tell(first.pod.uid, Prune(tuple(kept))))

    def _conditions(self, decision: Decision | None, ended: str | None, failure: str | None) -> None:
        membership = self.status.get("membership") or {}
        earlier = any(e["generation"] < membership.get("generation", 0) for e in self.status.get("lineage", ()))
        trained = earlier or bool(membership.get("adopted"))
        phase = phase_of(current=self.current, decision=decision, workers=self.workers, trained=trained, ended=ended)
        refusal = self.memory.refusal
        said = [
            Said("Accepted", "False", self.memory.refusal_reason or "InvalidSpec", refusal)
            if refusal
            else Said("Accepted", "True", "Valid", "The job can run as written.")
        ]
        said += worker_conditions(workers=self.workers, replicas=self.replicas, ended=ended is not None,
                                  now_s=self.clock.now_s, settings=self.settings, endpoint=self.endpoint)  # fmt: skip
        told = failure or next((c["message"] for c in self.status.get("conditions", ()) if c["type"] == "Failed"), None)
        said += training_conditions(phase=phase, decision=decision, current=self.current, replicas=self.replicas,
                                    workers=self.workers, failure=told, note=self._refusal_note(decision))  # fmt: skip
        conditions: list[dict[str, Any]] = list(self.status.get("conditions", ()))
        for one in said:
            conditions = set_condition(conditions, one.type, one.status, one.reason, one.message,  # type: ignore[arg-type]
                                       self.clock.timestamp(), self.job.spec_generation)  # fmt: skip
        self.status["conditions"] = conditions
        if ended and not self._was(ended):
            kind = "Normal" if ended == SUCCEEDED else "Warning"
            self.notes.append(EventNote(kind, ended, said[-1].message))
        if refusal and not any(c.type == "Accepted" and c.message == refusal for c in self.job.status.conditions):
            self.notes.append(EventNote("Warning", said[0].reason, refusal))
        # Who has not called since the operator's start is what the status said before.
        adopted = self.current is not None and self.current.adopted
        ready = sum(
            w.available
            or w.standing in (Standing.TRAINING, Standing.FINISHED)
            or (adopted and w.standing == Standing.SILENT and w.session is None)
            for w in self.workers
            if w.pod
        )
        ready = min(ready, self.replicas) if not ended else 0
        self.status.update(
            observedGeneration=self.job.spec_generation,
            phase=phase,
            replicas=sum(p.usable for p in self.obs.pods),
            readyReplicas=ready,
            selector=selector(self.job.name),
            agentImage=self.agent_image,
            summary=summary(
                phase=phase,
                refused=said[0].reason if refusal else None,
                ready=ready,
                replicas=self.replicas,
                progress=self.status.get("progress") or {},
                samples=self.status.get("samples") or {},
            ),
        )

    def _refusal_note(self, decision: Decision | None) -> str:
        if not isinstance(decision, Wait) or decision.reason != "NoWitness":
            return ""
        faults = [w.session.fault for w in self._members() if w.session and w.session.fault]
        return next((f.message for f in faults if f.cause == "witness"), "")

    def _was(self, ended: str) -> bool:
        return self.job.status.phase == ended

    def _urgent(self) -> bool:
        """Whether anything but progress differs from what is stored."""

        def skeleton(status: dict[str, Any]) -> dict[str, Any]:
            kept = {k: v for k, v in status.items() if k not in ("progress", "samples")}
            kept["summary"] = {k: v for k, v in (status.get("summary") or {}).items() if k in ("state", "ready")}
            return kept

        return skeleton(self.status) != skeleton(self.job.status.to_dict())

    # --- commands --------------------------------------------------------------------------------------------------

    def _commands(self, tier: str | None, ended: str | None, issued: Document | None) -> None:
        document = issued or (self.memory.document if self.current and self.current.known else None)
        index = {m.pod_uid: i for i, m in enumerate(document.members)} if document else {}
        digest = document.digest() if document else ""
        released = frozenset(self.status.get("released", ()))
        silent = any(w.standing == Standing.SILENT for w in self._members())
        for worker in self.workers:
            session, pod = worker.session, worker.pod
            if session is None or pod is None or not session.connected:
                continue
            word = tier or "Unknown"
            if session.told_tier != word:
                self.tell.append(Tell(pod.uid, Welcome(word)))
            if ended or pod.uid in released:
                if not session.told_stop:
                    outcome = {SUCCEEDED: "Complete", FAILED: "Failed"}.get(ended or "", "Released")
                    self.tell.append(Tell(pod.uid, Stop(outcome)))
                continue
            if document and max(session.told_generation, session.condition.heard) < document.number:
                self._tell_generation(document, digest, pod, index.get(pod.uid))
            if silent and (session.asked_at_s is None or self.clock.now_s >= session.asked_at_s + 1.0):
                self.tell.append(Tell(pod.uid, ProgressRequest()))

    def _tell_generation(self, document: Document, digest: str, pod: Pod, index: int | None) -> None:
        hosts = pod.uid == document.store.pod_uid
        body = Generation(
            number=document.number,
            uid=document.uid,
            kind=document.kind,
            member=index is not None,
            rank_offset=sum(m.processes for m in document.members[:index]) if index is not None else 0,
            world_size=document.world_size,
            slot=pod.slot,
            group_rank=index or 0,
            store_host=document.store.host,
            store_port=document.store.port,
            store_prefix=document.store_prefix(),
            hosts_store=hosts,
            document_digest=digest,
            reason=document.reason,
        )
        self.tell.append(Tell(pod.uid, body))
        if hosts:
            self.tell.append(Tell(pod.uid, DocumentCommand(document)))

    def _look_again(self, decision: Decision | None) -> float | None:
        times = [self.clock.now_s + self.settings.resync_s]
        if isinstance(decision, (Wait, Keep)) and decision.until_s is not None:
            times.append(decision.until_s)
        for worker in self.workers:
            pod = worker.pod
            if pod and worker.session is None and pod.running_since_s is not None:
                due = pod.running_since_s + self.settings.hello_timeout_s
                if due > self.clock.now_s:
                    times.append(due)
            if worker.standing == Standing.STARTING and self.status.get("tier") is None:
                times.append(max(worker.since_s + SCRIPT_AFTER_S, self.clock.now_s + 2.0))
        if any(w.standing == Standing.SILENT for w in self._members()):
            times.append(self.clock.now_s + 1.0)
        return min(at_s for at_s in times if at_s > self.clock.now_s)  # what is due has been looked at


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
