"""Compose the policies into one plan for one job. See the package's text for the order."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from statistics import median_low
from typing import Any

from regroup.protocol.document import PLANNED, Document
from regroup.protocol.state import Phase
from regroup.protocol.wire import DumpStacks, Kill, Prune, Restart
from regroup_operator.api import Job, processes_per_worker, worker_digest
from regroup_operator.api.status import MAX_INCIDENTS, MAX_LINEAGE
from regroup_operator.model.members import MemberId
from regroup_operator.model.plan import Clock, JobPlan, Memory, Said, Tell, Verdict, timestamp
from regroup_operator.model.ports import EventNote
from regroup_operator.model.records import Observation, Settings
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Announce, Bounds, Current, Decision, Keep, Refusal, Standing, Wait, Worker
from regroup_operator.plan.breakdown import breakdown, times_of
from regroup_operator.plan.commands import ASK_EVERY_S, plan_commands, script_due_s
from regroup_operator.plan.crashes import crash_sentence, is_hopeless, note_crashes, repeats
from regroup_operator.plan.document import build_document, with_peers
from regroup_operator.plan.face import View, face, is_urgent
from regroup_operator.plan.failures import avoided_nodes, count_created, excused_generations, see_failures
from regroup_operator.plan.generation import (
    SCRIPT_AFTER_S,
    decide_tier,
    membership_status,
    named_checkpoint,
    named_members,
    read_current,
)
from regroup_operator.plan.groups import spare_words
from regroup_operator.plan.hangs import ALONE, HUNG, KILL_AGAIN_S, Hang, find_hang, hangs_in_a_row, stack_lines
from regroup_operator.plan.hangs import bound as hang_bound_s
from regroup_operator.plan.incidents import make_incident, with_times
from regroup_operator.plan.lateness import LONGEST_START, Lateness, longest_start, see_lateness, with_setbacks
from regroup_operator.plan.leaving import leaving_words
from regroup_operator.plan.links import with_links
from regroup_operator.plan.membership import names_of, next_generation
from regroup_operator.plan.no_commit import NO_COMMIT, broke_without_commit, count_after, no_commit_failure
from regroup_operator.plan.observed import FIELD as OBSERVED_AT
from regroup_operator.plan.observed import due_in_s, observe
from regroup_operator.plan.progress import checkpoint_status, progress_status
from regroup_operator.plan.pulse import ANSWER_S, FIRST_STALL_S, newest_progress
from regroup_operator.plan.restarts import KUBECTL_LOGS, exit_words, judge_restarts, log_words
from regroup_operator.plan.saving import judge_saving
from regroup_operator.plan.snapshots import judge_snapshots, snapshot_status
from regroup_operator.plan.standing import assess
from regroup_operator.plan.status import FAILED, SUCCEEDED
from regroup_operator.plan.workers import outdated, plan_workers

OUTCOMES = {SUCCEEDED: "Complete", FAILED: "Failed"}
"""What `stop` says to the agents of a job that has ended."""
STORE_RETRY_S = 0.2
UNADOPTED_S = 1.0
"""Agents are asked whether they are there once a generation is older than this and not adopted."""


def plan_job(
    job: Job,
    obs: Observation,
    memory: Memory,
    clock: Clock,
    *,
    fresh_uid: str,
    settings: Settings,
    endpoint: str,
    agent_image: str,
    logs: str = KUBECTL_LOGS,
) -> JobPlan:
    """Return the plan. `fresh_uid` names the next generation if one is issued; `logs` says how a worker's log is read."""
    return _Planner(job, obs, memory, clock, fresh_uid, settings, endpoint, agent_image, logs).plan()


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
        logs: str,
    ) -> None:
        self.job, self.clock, self.settings, self.logs = job, clock, settings, logs
        self.fresh_uid, self.endpoint, self.agent_image = fresh_uid, endpoint, agent_image
        self.processes = processes_per_worker(job)
        self.per_group = job.spec.workers_per_group
        sessions, peers = with_peers(obs.sessions, memory.document, memory.peers)
        self.obs, self.memory = replace(obs, sessions=sessions), replace(memory, peers=peers)
        self.status: dict[str, Any] = job.status.to_dict()
        self.released = frozenset(self.status.get("released", ()))
        self.notes: list[EventNote] = []
        self.tell: list[Tell] = []
        self.finished: tuple[int, int] | None = None
        self.recovery = job.spec.recovery
        self.replicas = job.spec.replicas
        self.have_all_tried = False
        self.broke = False

    # --- the order of things ---------------------------------------------------------------------------------------

    def plan(self) -> JobPlan:
        self.current = read_current(self.status, self.obs.pods, self.memory, self.obs.term_started_s, self.per_group)
        if self.current is None:
            self._outdated()
        sessions = [s for uid, s in self.obs.sessions.items() if uid not in self.released]
        self.tier = decide_tier(self.status, sessions, self.clock.now_s)
        if self.tier is not None:
            self.status["tier"] = self.tier
        failure = self._failures()
        self._assess()
        self._adoption()
        self._hangs()
        if failure is None and self.hang.failure is not None:
            failure = Verdict(HUNG, self.hang.failure)
        self.broke = self.tier == "Session" and broke_without_commit(
            self.current, self.members, start_step=self.start_step, newest_step=self.newest_step
        )
        no_commit = no_commit_failure(self.num_without_commit, self.members) if self.broke else None
        if failure is None and no_commit is not None:
            failure = Verdict(NO_COMMIT, no_commit)
        ended = self._ended(failure)
        decision: Decision | None = None
        document: Document | None = None
        lateness = Lateness()
        if ended is None and self.memory.refusal is None:
            lateness = self._lateness()
            decision = self._membership()
            if isinstance(decision, Announce):
                document = self._announce(decision)
                if document is None:
                    until_s = self.clock.now_s + STORE_RETRY_S
                    decision = Wait("NoStore", "No member offers a socket for the store yet.", until_s)
        changes = plan_workers(
            workers=self.workers,
            replicas=self.replicas,
            released=self.released,
            named=named_members(self.status),
            bad_nodes=avoided_nodes(self.memory, self.clock.now_s, self.recovery.window_seconds),
            abandoned=lateness.replace,
            settled=document is None and self._is_settled(),
            ended=ended is not None or self.memory.refusal is not None,
            now_s=self.clock.now_s,
            hello_timeout_s=self.settings.hello_timeout_s,
        )
        self._release([pod.uid for pod in changes.release])
        self._count_created([MemberId(c.slot, c.attempt) for c in changes.create])
        self._progress()
        self._stop_hang(ended)
        self._face(decision, ended, failure)
        self._commands(ended, document, decision.ask if isinstance(decision, Wait) else frozenset())
        return JobPlan(
            status=self.status,
            urgent=is_urgent(self.status, self.job.status.to_dict()),
            memory=self.memory,
            tell=tuple(self.tell),
            create=tuple((c.slot, c.attempt, c.avoid_nodes) for c in changes.create),
            delete=(*changes.delete, *(p for p in changes.release if not p.terminating)),
            notes=tuple(self.notes),
            look_again_s=self._look_again(decision, [changes.look_again_s, lateness.due_s]),
            announced=document is not None,
        )

    # --- failures --------------------------------------------------------------------------------------------------

    def _restarts(self) -> dict[str, Any]:
        none = {"total": 0, "processes": 0, "pods": 0, "generations": 0, "recent": []}
        restarts: dict[str, Any] = self.status.setdefault("restarts", none)
        return restarts

    def _count_restarts(self, kind: str, count: int) -> None:
        """Count processes or pods that start again. The total is made anew: an older operator wrote none."""
        restarts = self._restarts()
        restarts[kind] += count
        restarts["total"] = restarts["processes"] + restarts["pods"]

    def _failures(self) -> Verdict | None:
        """Count what has failed; return what fails the job, if there was too much."""
        seen = see_failures(self.obs, self.memory, self.clock, tier=self.tier, current=self.current)
        crash = note_crashes(
            seen.memory.crash,
            seen.failures,
            committed_at=max(
                (
                    self.clock.wall_at(s.progress_at_s)
                    for s in self.obs.sessions.values()
                    if s.progress_at_s is not None
                ),
                default=None,
            ),
            script=self.tier == "Script",
            excused=excused_generations(self.obs.sessions.values(), seen.memory, self.tier),
        )
        self.memory = replace(seen.memory, crash=crash)
        if not seen.failures:
            return None
        restarts = self._restarts()
        verdict = judge_restarts(
            recent=[datetime.fromisoformat(at).timestamp() for at in restarts.get("recent", ())],
            new=seen.failures,
            max_restarts=self.recovery.max_restarts,
            window_s=self.recovery.window_seconds,
            now=self.clock.wall,
            logs=self.logs,
        )
        self._count_restarts("processes", len(seen.failures))
        restarts["recent"] = [timestamp(at) for at in verdict.recent]
        if is_hopeless(crash):
            return Verdict("RepeatedCrash", self._crash())
        return None if verdict.message is None else Verdict("TooManyRestarts", verdict.message)

    def _crash(self) -> str:
        """Return the sentence for a crash that repeats; empty: none does."""
        crash = self.memory.crash
        if crash is None or not repeats(crash):
            return ""
        return crash_sentence(crash, exit_words(crash.last), log_words(crash.last, self.logs))

    def _count_created(self, create: list[MemberId]) -> None:
        replaced, self.memory = count_created(
            create,
            self.obs.pods,
            self.memory,
            released=self.released,
            members=self.current.members if self.current is not None else (),
            leaving={w.pod.uid for w in self.workers if w.pod is not None and w.draining and w.connected},
        )
        if replaced and self.status.get("membership"):
            self._count_restarts("pods", replaced)

    def _outdated(self) -> None:
        """Before the first generation: release the pods of an earlier spec, and forget what kind of script they had."""
        earlier = [uid for uid in outdated(self.obs.pods, worker_digest(self.job)) if uid not in self.released]
        if earlier:
            self._release(earlier)
            self.released = frozenset(self.status["released"])
            self.status.pop("tier", None)

    def _release(self, uids: list[str]) -> None:
        """Write who is released; forget those whose pods are gone: a UID never comes back."""
        if not uids and "released" not in self.status:
            return
        there = {pod.uid for pod in self.obs.pods}
        self.status["released"] = [uid for uid in (*self.status.get("released", ()), *uids) if uid in there]

    # --- the newest generation -------------------------------------------------------------------------------------

    def _assess(self) -> None:
        self.workers: tuple[Worker, ...] = assess(
            current=self.current,
            tier=self.tier,
            pods=self.obs.pods,
            sessions=self.obs.sessions,
            released=self.released,
            processes=self.processes,
            now_s=self.clock.now_s,
            term_started_s=self.obs.term_started_s,
            disconnect_s=self.recovery.disconnect_seconds,
            settings=self.settings,
            setbacks=self.memory.setbacks,
        )
        self.members = [w for w in self.workers if w.is_member]
        self.newest = newest_progress(self.obs.sessions.values(), self.current) if self.current else None

    def _stalled(self) -> bool:
        """Whether steps are overdue in a generation that trains."""
        current = self.current
        trains = current is not None and current.adopted and self.tier == "Session"
        return trains and current is not None and self.clock.now_s >= self._stalls_at_s(current)

    def _stalls_at_s(self, current: Current) -> float:
        return self.newest.stalls_at_s if self.newest is not None else current.announced_at_s + FIRST_STALL_S

    def _asks(self) -> bool:
        """Whether agents are asked if they are there: steps are overdue, or an adoption is."""
        current = self.current
        unadopted = current is not None and not current.adopted
        return self._stalled() or (
            unadopted and current is not None and self.clock.now_s >= current.announced_at_s + UNADOPTED_S
        )

    @property
    def _step_s(self) -> float:
        """Duration of a step by the newest reports, 0 before the first two. All ranks step together, so that half of them may be
        wrong: the time between two reports may hold the minutes in which an agent was stopped."""
        known = [s.step_s for s in self.obs.sessions.values() if s.step_s is not None]
        return median_low(known) if known else 0.0

    def _lateness(self) -> Lateness:
        """See who holds the job up; have the late restarted in place, and say who is replaced."""
        setbacks = with_setbacks(self.memory.setbacks, self.workers, frozenset(), self.clock.now_s)
        said_s = self.recovery.hang_seconds
        hang_s = None if said_s is None else hang_bound_s(self.obs.sessions.values(), said_s, self.settings)
        longest_start_s = longest_start(self.status.get(LONGEST_START), self.obs.sessions.values(), self.settings)
        if longest_start_s is not None:
            self.status[LONGEST_START] = longest_start_s
        lateness = see_lateness(
            workers=self.workers,
            current=self.current,
            spells=self.memory.spells,
            setbacks=setbacks,
            released=self.released,
            step_s=self._step_s,
            now_s=self.clock.now_s,
            settings=self.settings,
            alone_s=None if hang_s is None else ALONE * hang_s,
            longest_start_s=longest_start_s or 0.0,
            per_group=self.per_group,
        )
        for worker, why in lateness.restart:
            assert worker.pod is not None
            self.tell.append(Tell(worker.pod.uid, Restart(why)))
            self.notes.append(
                EventNote("Warning", "WorkerRestarted", f"Worker {worker.id} is restarted in place: {why}")
            )
        self.memory = replace(self.memory, spells=lateness.spells or {}, setbacks=setbacks)
        self.workers = tuple(
            replace(w, abandoned=w.pod is not None and w.pod.uid in lateness.replace) for w in self.workers
        )
        self.members = [w for w in self.workers if w.is_member]
        return lateness

    def _adoption(self) -> None:
        """With the first `adopted` write startStep and lineage (rule MAD); with the last, forget the older generations."""
        current, membership = self.current, self.status.get("membership")
        if current is None or membership is None:
            return
        reports = [
            w.session.adopted
            for w in self.members
            if w.session and w.session.adopted and w.session.adopted_generation == current.number
        ]
        if reports and membership.get("startStep") is None:
            start = reports[0].start_step
            membership["startStep"] = start
            lineage = [*self.status.get("lineage", ()), {"generation": current.number, "startStep": start}]
            self.status["lineage"] = lineage[-MAX_LINEAGE:]
            if any(report.rolled_back for report in reports):
                self._rolled_back(current.number, start)
        everyone = all(_has_adopted(w, current.number) for w in self.members)
        if not current.adopted and membership.get("startStep") is not None and everyone:
            membership.update(adopted=True, older=[])
            self.memory = replace(self.memory, readers=frozenset())
            self._started(current)
            self.current = replace(current, adopted=True, older=(), attempts=0)
        incidents = self.status.get("incidents")
        if incidents and incidents[-1]["generation"] == current.number:
            planned = current.kind == PLANNED
            incidents[-1] = with_times(
                incidents[-1], current.number, self.members, self.memory.persist_ms, planned=planned
            )

    def _rolled_back(self, number: int, start: int) -> None:
        """Say where a generation continues that found nobody with the newest state, and what is known to be lost."""
        told = [s.progress.step for s in self.obs.sessions.values() if s.progress is not None]
        newest = max([(self.status.get("progress") or {}).get("step", 0), *told])
        what = f"Generation {number} continues from step {start}: no worker holds a newer state any more."
        reason = "Resumed" if start >= newest > 0 else "RolledBack"
        self.notes.append(EventNote("Warning", reason, f"{what} The last step reported was {newest}."))

    def _started(self, current: Current) -> None:
        """Tier Script: say in the generation's incident how long its processes took to start."""
        incidents = self.status.get("incidents")
        if self.tier == "Script" and current.known and incidents and incidents[-1]["generation"] == current.number:
            start_ms = round((self.clock.now_s - current.announced_at_s) * 1000, 1)
            self.status["incidents"] = [*incidents[:-1], {**incidents[-1], "startMs": start_ms}]

    def _is_settled(self) -> bool:
        """Whether nobody but the newest generation's members is needed: all have adopted, and none has been lost since.
        Who waits outside may be the last to hold the job's state."""
        stands = not any(
            w.standing in (Standing.LOST, Standing.DIED, Standing.HUNG, Standing.BROKEN) for w in self.members
        )
        return self.current is None or (self.current.adopted and stands)

    @property
    def newest_step(self) -> int | None:
        """The newest step that the newest generation has reported."""
        newest, current = self.newest, self.current
        return newest.step if newest and current and newest.generation == current.number else None

    @property
    def start_step(self) -> int | None:
        """The step that the newest generation began at; None: nobody has adopted it."""
        start: int | None = (self.status.get("membership") or {}).get("startStep")
        return start

    @property
    def num_without_commit(self) -> int:
        """Generations in a row that broke before a step was committed, the newest included."""
        return self.memory.without_commit + 1 if self.broke else 0

    def _hangs(self) -> None:
        """Find out whether the newest generation hangs; whose processes do stands as hung from here on."""
        self.hang = Hang()
        if self.tier == "Session" and self.memory.refusal is None:
            self.hang = find_hang(
                current=self.current,
                workers=self.workers,
                processes=self.processes,
                hang_seconds=self.recovery.hang_seconds,
                in_a_row=hangs_in_a_row(self.status, self.newest_step),
                now_s=self.clock.now_s,
                settings=self.settings,
                per_group=self.per_group,
            )
        if not self.hang.culprits:
            return
        self.workers = tuple(
            replace(w, standing=Standing.HUNG, available=False, since_s=self.hang.found_s, why=HUNG)
            if w.id in self.hang.culprits
            else w
            for w in self.workers
        )
        self.members = [w for w in self.workers if w.is_member]

    def _stop_hang(self, ended: str | None) -> None:
        """Ask for stacks, and have the processes that hang killed; say so once."""
        if ended is not None:
            return
        self.tell += [Tell(w.pod.uid, DumpStacks()) for w in self.hang.ask if w.pod is not None]
        for worker in self.workers:
            culprit, session = self.hang.culprits.get(worker.id), worker.session
            if culprit is None or session is None or worker.pod is None:
                continue
            if session.killed != culprit.incarnations:
                self.notes.append(
                    EventNote("Warning", HUNG, f"{culprit.message}. Its process is killed and restarted.")
                )
            elif self.clock.now_s < session.killed_at_s + KILL_AGAIN_S:
                continue
            self.tell.append(Tell(worker.pod.uid, Kill(culprit.incarnations, culprit.message)))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _ended(self, failure: Verdict | None) -> str | None:
        true = {c["type"] for c in self.status.get("conditions", ()) if c["status"] == "True"}
        if "Complete" in true:
            return SUCCEEDED
        if "Failed" in true or failure is not None:
            return FAILED
        current = self.current
        if current is None or not self.members:
            return None
        if all(_finished(w, current.number) for w in self.members):
            self.finished = (current.number, len(current.members))
        elif self._finished_before(current):
            self.finished = (current.older[0].number, len(current.older[0].pod_uids))
        return None if self.finished is None else SUCCEEDED

    def _finished_before(self, current: Current) -> bool:
        """Whether the last step was committed before anybody entered the newest generation, a planned one: it has come too
        late, finished ranks ignore it, and the set that has finished is the one before."""
        if current.adopted or current.kind != PLANNED or len(current.older) != 1:
            return False
        before = current.older[0]
        set_before = [w for w in self.workers if w.pod is not None and w.pod.uid in before.pod_uids]
        return len(set_before) == len(before.pod_uids) and all(_finished(w, before.number) for w in set_before)

    # --- membership ------------------------------------------------------------------------------------------------

    def _membership(self) -> Decision:
        causes = {_refused(w, self.current.number) for w in self.members} if self.current is not None else set()
        refusal = None
        if causes - {""}:
            unreadable = "checkpoint" in causes
            if unreadable:
                self.memory = replace(self.memory, readers=self._readers())
            readers = self.memory.readers
            self.have_all_tried = unreadable and not any(
                w.available and w.pod is not None and w.pod.uid not in readers
                for w in self.workers
                if self.clock.now_s >= w.barred_until_s
            )
            refusal = Refusal(self.memory.tried or frozenset(), unreadable, readers, self.have_all_tried)
        return next_generation(
            current=self.current,
            workers=self.workers,
            bounds=Bounds(
                self.replicas,
                self.job.min_replicas,
                self.job.elastic,
                self.recovery.rejoin_seconds,
                session=self.tier == "Session",
                per_group=self.per_group,
            ),
            refusal=refusal,
            now_s=self.clock.now_s,
            settings=self.settings,
            step_s=self._step_s,
            hang=self.hang.message if self.hang.together else "",
            links=self.memory.links,
            without_commit=self.num_without_commit,
        )

    def _readers(self) -> frozenset[str]:
        """Return who could not read the checkpoint, with those of the newest generation."""
        document = self.memory.document
        known = document is not None and self.current is not None and document.number == self.current.number
        return self.memory.readers | (
            {m.pod_uid for m in document.readers(self.per_group)} if known and document is not None else set()
        )

    def _announce(self, decision: Announce) -> Document | None:
        try:
            document = build_document(
                announce=decision,
                current=self.current,
                workers=self.workers,
                job_uid=self.job.uid,
                uid=self.fresh_uid,
                processes=self.processes,
                checkpoint=named_checkpoint(self.status),
                session_tier=self.tier == "Session",
                per_group=self.per_group,
            )
        except ValueError:
            return None
        self.status["membership"] = membership_status(document, decision, self.status.get("membership"))
        self.status.setdefault("startTime", self.clock.timestamp())
        if document.number > 1:
            self._restarts()["generations"] += 1
            incident = make_incident(document.number, decision, self.workers, self.clock)
            if decision.cause == HUNG and self.current is not None:
                incident["stacks"] = stack_lines(self.current, self.workers, self.processes)
            self.status["incidents"] = [*self.status.get("incidents", ()), incident][-MAX_INCIDENTS:]
        kind = "Normal" if decision.kind == PLANNED or document.number == 1 else "Warning"
        self.notes.append(EventNote(kind, decision.reason, f"Generation {document.number}: {decision.message}"))
        self.memory = replace(
            self.memory,
            document=document,
            announced_at_s=self.clock.now_s,
            persist_ms=None,
            readers=frozenset() if self.have_all_tried else self.memory.readers,
            launches=self.tier != "Session",
            attempts=1 if self.current is None or self.current.adopted else self.current.attempts + 1,
            tried=names_of(self.current, self.workers, decision.members),
            setbacks=with_setbacks(self.memory.setbacks, self.workers, decision.set_back, self.clock.now_s),
            links=with_links(self.memory.links, self.current, self.workers),
            without_commit=count_after(self.memory.without_commit, decision, broke=self.broke),
        )
        return document

    # --- what people see -------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        newest = self.newest
        if newest is None or self.current is None:
            return
        step_time = breakdown(times_of(self.members, newest.generation))
        self.status["progress"] = progress_status(newest, self.status.get("progress") or {}, self.clock, step_time)
        self.status["samples"] = {"committed": newest.report.samples, "digest": newest.report.digest}
        if self.job.spec.memory_snapshot is not None and newest.generation == self.current.number:
            held = snapshot_status(newest)
            self.status.pop("memorySnapshot", None)
            if held is not None:
                self.status["memorySnapshot"] = held
        policy = self.job.spec.checkpoint
        if policy is None:
            return
        checkpoint = checkpoint_status(
            newest,
            self.status.get("checkpoint"),
            self.current,
            has_started=self.status["membership"].get("startStep") is not None,
            keep=policy.keep,
            clock=self.clock,
        )
        if checkpoint is not None:
            self.status["checkpoint"] = checkpoint
            pruner = next((w.pod for w in self.members if w.connected and w.pod), None)
            if pruner is not None:
                self.tell.append(Tell(pruner.uid, Prune(tuple(checkpoint["kept"]))))

    def _face(self, decision: Decision | None, ended: str | None, failure: Verdict | None) -> None:
        part, notes = face(
            View(
                job=self.job,
                obs=self.obs,
                memory=self.memory,
                clock=self.clock,
                settings=self.settings,
                endpoint=self.endpoint,
                workers=self.workers,
                current=self.current,
                decision=decision,
                ended=ended,
                failure=failure,
                crash=self._crash(),
                stalled=self._stalled(),
                hang=self.hang.message,
                leaving=leaving_words(
                    self.current,
                    self.workers,
                    decision,
                    saves=self.job.spec.checkpoint is not None,
                    per_group=self.per_group,
                ),
                spares=spare_words(self.current, self.workers, self.per_group),
                finished=self.finished,
                saving=self._saving(ended),
                taking=self._taking(),
            ),
            self.status,
        )
        self.status.update(part, agentImage=self.agent_image)
        stored, every_s = self.job.status.to_dict(), self.settings.progress_write_s
        self.status[OBSERVED_AT] = observe(self.status, stored, self.clock, ended=ended is not None, every_s=every_s)
        self.notes += notes

    def _saving(self, ended: str | None) -> Said | None:
        if self.job.spec.checkpoint is None:
            return None
        return judge_saving(
            current=self.current,
            workers=self.workers,
            checkpoint=self.status.get("checkpoint"),
            succeeded=ended == SUCCEEDED,
            now_s=self.clock.now_s,
            settings=self.settings,
        )

    def _taking(self) -> Said | None:
        if self.job.spec.memory_snapshot is None:
            return None
        step = (self.status.get("memorySnapshot") or {}).get("step")
        return judge_snapshots(current=self.current, workers=self.workers, step=step)

    # --- commands and the next look --------------------------------------------------------------------------------

    def _commands(self, ended: str | None, issued: Document | None, ask: frozenset[str]) -> None:
        known = self.memory.document if self.current and self.current.known else None
        self.tell += plan_commands(
            workers=self.workers,
            tier=self.tier,
            document=issued or known,
            released=frozenset(self.status.get("released", ())),
            stop=OUTCOMES.get(ended or ""),
            stalled=self._asks(),
            ask=ask,
            now_s=self.clock.now_s,
        )

    def _look_again(self, decision: Decision | None, dues_s: list[float | None]) -> float:
        now_s = self.clock.now_s
        dues_s = [*dues_s, self.hang.due_s]
        times = [now_s + self.settings.resync_s, *(due_s for due_s in dues_s if due_s is not None)]
        has_ended = self.status.get("phase") in OUTCOMES
        seen_s = due_in_s(self.status, self.clock, ended=has_ended, every_s=self.settings.progress_write_s)
        if seen_s is not None:
            times.append(now_s + max(seen_s, 1.0))
        if isinstance(decision, Wait | Keep) and not isinstance(decision.until, UntilEvent):
            times.append(decision.until)
        for worker in self.workers:
            pod = worker.pod
            if pod and worker.session is None and pod.running_since_s is not None:
                times.append(pod.running_since_s + self.settings.hello_timeout_s)
            if worker.standing == Standing.STARTING and self.tier is None:
                times.append(max(worker.since_s + SCRIPT_AFTER_S, now_s + 2.0))
        if self.current is not None and not self.current.adopted:
            times.append(self.current.announced_at_s + UNADOPTED_S)
        if self._asks() or any(w.standing == Standing.SILENT for w in self.members):
            times.append(now_s + ASK_EVERY_S)
            asked = (w.session.unanswered_since_s for w in self.members if w.session)
            times += [at_s + ANSWER_S for at_s in asked if at_s is not None]
        elif self.newest is not None:
            times.append(self.newest.stalls_at_s)
        if self.tier == "Script":
            times += [script_due_s(w.session) for w in self.members if w.session is not None and w.connected]
        return min(at_s for at_s in times if at_s > now_s)  # what is due has been looked at


def _finished(worker: Worker, generation: int) -> bool:
    """Whether a member has said finished: what it says once stays true, whether it can be reached or not."""
    condition = worker.session.condition if worker.session else None
    said = condition is not None and (condition.phase, condition.generation) == (Phase.FINISHED, generation)
    return worker.standing == Standing.FINISHED or (said and worker.pod is not None and worker.pod.phase != "Failed")


def _has_adopted(worker: Worker, generation: int) -> bool:
    """Whether all processes of a member have adopted. Its agent's file names what *one* of them has (rule MAD): as long as
    the worker forms, another one has not, and may hang."""
    condition = worker.session.condition if worker.session else None
    if condition is None or condition.adopted < generation:
        return False
    forms = condition.phase in (Phase.FORMING, Phase.ARRIVED, Phase.ADOPTING)
    return not (forms and condition.generation == generation)


def _refused(worker: Worker, generation: int) -> str:
    """Return why a member refused to train, "" if it did not: `witness` (rules WITNESS, BEST) or `checkpoint` (RETRY)."""
    session = worker.session
    fault = session.fault if session else None
    refused = session and fault and fault.cause in ("witness", "checkpoint") and session.fault_generation == generation
    return fault.cause if refused and fault else ""
