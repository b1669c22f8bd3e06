"""What a job's spec says of its beginning and its end, and the judge that knows it independently of the operator.

Which checkpoint of an earlier job it begins with, deadlines, the time after which the job is deleted, which pods stay, the rules of
spec.recovery.onExit, roles that fail the job. A job may fail only for one of these, after what justifies it, and it must fail then.
`Policy` is what a walk's job has of them, and `Judge` watches one world: each write of the status, the end of the job's object, and
what is there each time that it looks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regroup_operator.model.plan import seconds_of
from regroup_operator.model.records import Pod
from tests.simulator.cluster import REFUSED
from tests.simulator.ledger import End
from tests.simulator.operators import WALL

if TYPE_CHECKING:
    from tests.simulator.world import World

Rule = Mapping[str, Any]

SIGKILL, SIGSEGV = 128 + 9, 128 + 11
NUMBERS = {"SIGKILL": SIGKILL, "SIGSEGV": SIGSEGV}
"""Exit codes of what ended by a signal of RULES."""


def _codes(action: str, operator: str, *values: int) -> dict[str, Any]:
    return {"action": action, "exitCodes": {"operator": operator, "values": list(values)}}


IGNORES = _codes("Ignore", "NotIn", 200)
RULES: dict[str, list[dict[str, Any]]] = {
    "": [],
    "a code fails": [_codes("Fail", "In", 42)],
    "a code is ignored, another fails": [_codes("Ignore", "In", 42), _codes("Fail", "In", 42, 43)],
    "unknown codes fail": [_codes("Fail", "NotIn", 0, 1, 137, 143, 255)],
    "a signal fails, the rest is ignored": [
        {"action": "Restart", "signals": ["SIGKILL"]},
        {"action": "Fail", "signals": ["SIGSEGV"]},
        IGNORES,
    ],
    "a kill fails": [{"action": "Fail", "signals": ["SIGKILL"]}],
    "evictions fail": [{"action": "Fail", "reasons": ["Evicted", "Preempted"]}],
    "evictions are ignored, preemptions count": [
        {"action": "Ignore", "reasons": ["Evicted"]},
        {"action": "Restart", "reasons": ["Preempted"]},
    ],
    "images fail": [{"action": "Fail", "reasons": ["ImagePullBackOff"]}],
    "memory fails": [{"action": "Fail", "reasons": ["OOMKilled"]}],
}
"""What spec.recovery.onExit may be, by name."""

THERE, MISSING, CORRUPTED = "is there", "is missing", "is corrupted"
"""What spec.checkpoint.resumeFrom may name. A person repairs what is corrupted once the world is healed."""
RESUMES_CHANCE = 0.15
"""So many of the jobs that have checkpoints, or a script without the library, begin with an earlier job's."""
RULES_CHANCE, DEADLINE_CHANCE, TTL_CHANCE, CLEANS_CHANCE, NEVER_CHANCE = 0.2, 0.08, 0.25, 0.25, 0.5
"""So many of the jobs have such a policy; NEVER_CHANCE: of those with roles."""


@dataclass(frozen=True)
class Policy:
    """What a job's spec says of its end. 0, None, empty: nothing."""

    rules: str = ""
    """One of RULES."""
    active_s: int = 0
    """spec.runPolicy.activeDeadlineSeconds."""
    start_s: int = 0
    """spec.runPolicy.startDeadlineSeconds."""
    ttl_s: int | None = None
    """spec.runPolicy.ttlSecondsAfterFinished."""
    cleans: str = "None"
    """spec.runPolicy.cleanPodPolicy."""
    never: bool = False
    """A role's restartPolicy is Never."""
    resumes: str = ""
    """spec.checkpoint.resumeFrom names a checkpoint that is so."""

    def __str__(self) -> str:
        return (
            (f", {self.rules}" if self.rules else "")
            + (f", has {self.active_s} s" if self.active_s else "")
            + (f", has to start within {self.start_s} s" if self.start_s else "")
            + (f", is deleted {self.ttl_s} s after its end" if self.ttl_s is not None else "")
            + (", no pod outlives it" if self.cleans == "All" else "")
            + (", the role's pods are never restarted" if self.never else "")
            + (f", begins with a checkpoint that {self.resumes}" if self.resumes else "")
        )

    def run_policy(self) -> dict[str, Any]:
        """Return spec.runPolicy."""
        said = {
            "activeDeadlineSeconds": self.active_s or None,
            "startDeadlineSeconds": self.start_s or None,
            "ttlSecondsAfterFinished": self.ttl_s,
            "cleanPodPolicy": self.cleans,
        }
        return {name: value for name, value in said.items() if value is not None}


NO_POLICY = Policy()


def policy_of(seed: int, *, rules: bool, roles: bool, durable: bool) -> Policy:
    """Return what a seed's job has. `rules`: it may have rules; `roles`: it has roles; `durable`: it may begin with a checkpoint
    of an earlier job."""
    rng = random.Random(f"{seed}/policy")
    has = {name: rng.random() for name in ("rules", "active", "start", "ttl", "cleans", "never")}
    name = rng.choice([name for name in RULES if name])
    resumes = random.Random(f"{seed}/resumes")
    begins = resumes.choice([THERE, THERE, MISSING, CORRUPTED]) if resumes.random() < RESUMES_CHANCE else ""
    if begins == MISSING and (not rules or has["rules"] < RULES_CHANCE):
        begins = THERE  # what a rule ignores or restarts fails no job
    return Policy(
        resumes=begins if durable else "",
        rules=name if rules and has["rules"] < RULES_CHANCE else "",
        active_s=rng.choice([20, 90, 300]) if has["active"] < DEADLINE_CHANCE else 0,
        start_s=rng.choice([10, 60, 300]) if has["start"] < DEADLINE_CHANCE else 0,
        ttl_s=rng.choice([0, 20, 120]) if has["ttl"] < TTL_CHANCE else None,
        cleans=rng.choice(["All", "Running"]) if has["cleans"] < CLEANS_CHANCE else "None",
        never=roles and has["never"] < NEVER_CHANCE,
    )


# --- the judge -----------------------------------------------------------------------------------------------------

LATE_S = 15.0
"""A leader that can write fails the job, or deletes it, within so long after it had to."""
ROUND_S = 1.0
"""The times of a status are whole seconds."""
JUMP_S = 660.0
"""An operator whose clock was set may notice that a deadline is over only when it looks again (Settings.resync_s)."""
RECENT_S = 90.0
"""No operator is away for longer, so that nothing fails a job later than that."""
REFUSED_OFTEN = 8
"""A job that gets no further may fail once so many pods of a slot were refused (adr/0072)."""
STAYS_S = 330.0
"""So long after the end, with everything well, nothing of the job runs any more: a process that stands has 305 s for its end."""


class Judge:
    """Collects in `wrong` what does not hold: class of failures and sentence."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world, self.policy = world, policy
        self.wrong: list[tuple[str, str]] = []
        self.num_due = 0
        """How many ends had to fail the job."""
        self._began: set[str] = set()
        """Times of the start and of each resumption, as the status says them."""
        self._last: Mapping[str, Any] = {}
        self._has_begun = False
        self._ended_wall: float | None = None
        self._kept: set[str] = set()
        """Pods that stay after the end."""
        self._ended_pods: set[str] = set()
        """Pods of roles that had ended when the status was to be written. One that ends a moment later may be deleted with those
        that run."""
        self._role_failed = False
        self._since_s: dict[str, float] = {}
        self._skew = (world.wall_skew_s, world.now_s - JUMP_S)
        self._num_judged = 0
        self._due: list[tuple[End, Any, float]] = []
        world.on_removed = self._removed
        world.on_write = self.wrote
        world.on_ask = self._asked
        world.pods.on_create = self._made

    @property
    def rules(self) -> Sequence[Rule]:
        return RULES[self.policy.rules]

    @property
    def wall(self) -> float:
        """The operators' clock."""
        return WALL + self.world.now_s + self.world.wall_skew_s

    @property
    def is_waiting(self) -> bool:
        """Whether the job has to fail now, or may have to."""
        return bool(self._due or self._since_s)

    # --- what operators write ------------------------------------------------------------------------------------

    def _asked(self) -> None:
        pods = self.world.pods.of_roles.values()
        self._ended_pods = {p.name for p in pods if not p.alive and not p.terminating}

    def wrote(self, status: Mapping[str, Any]) -> None:
        """An operator has written the status."""
        for said in (status.get("startTime"), _resumed(status)):
            if said is not None and said not in self._began:
                self._began.add(said)
                # An operator may be stopped before its write takes effect.
                if not -ROUND_S < self.wall - seconds_of(said) < RECENT_S:
                    self._wrong("untrue", f"it says {said} of what happened at {self.wall:.1f}")
        pinned = (status.get("resumedFrom") or {}).get("digest")
        if pinned is not None and pinned != self.world.disk.imported_digest:
            self._wrong("untrue", f"it says that the job has begun with {pinned}")
        before, self._last = self._last, status
        due_before = {started: self._due_at(before, started=started) for started in (True, False)}
        self._note_begun(before, status)
        if _has_ended(status) and self._ended_wall is None:
            said = status.get("completionTime")
            # An operator may be stopped before its write takes effect.
            self._ended_wall = min(self.wall, seconds_of(said)) if said else self.wall
            self._kept = set(self._ended_pods)
            if is_well(self.world):  # their agents hear of it, and end
                going = set(status.get("released", ()))
                self._kept |= {self.world.pods.by_uid[uid].name for uid in self.world.agents if uid not in going}
            failed = _condition(status, "Failed")
            if failed.get("status") == "True" and not self._may_fail(failed, due_before):
                self._wrong("failed", f"the job failed ({failed['reason']}): {failed['message']}")
        elif not _has_ended(status):
            self._ended_wall, self._kept = None, set()  # restored from a backup

    def _note_begun(self, before: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Follow whether the job has trained since it was created or resumed."""
        membership, older = status.get("membership") or {}, before.get("membership") or {}
        goes_on = membership.get("generation", 0) >= older.get("generation", 0) and not older.get("suspended")
        has_begun = membership.get("startStep") is not None or (self._has_begun and goes_on)
        self._has_begun = has_begun and not membership.get("suspended")

    def _may_fail(self, failed: Mapping[str, Any], due_before: Mapping[bool, float | None]) -> bool:
        """`due_before`: the deadlines by what the status said before."""
        reason = failed["reason"]
        if reason == "DeadlineExceeded":
            due = due_before[True]
        elif reason == "StartDeadlineExceeded":
            due = due_before[False]
        elif reason == "RoleFailed":
            return self.policy.never and any(map(_failed_alone, self.world.pods.of_roles.values()))
        elif reason == "RepeatedCrash":
            return self.policy.resumes == MISSING and not self.world.ledger.num_commits
        elif reason == "ResumeFromUnread":
            return self.policy.resumes != "" and self.world.script == "plain"
        elif reason == "ExitRule":
            return self._may_be_ruled(failed["message"])
        elif reason == "EndFailed":
            return self._may_fail_in_end()
        elif reason == "PodsEndAgain":
            return self._are_refused_often()
        else:
            return False
        return due is not None and self.wall >= due - ROUND_S

    def _may_fail_in_end(self) -> bool:
        """Return whether a script whose end has failed, or was lost, cannot run again."""
        world = self.world
        checkpoint = world.status.get("checkpoint")
        if world.per_group > 1:
            return checkpoint is None
        return world.is_over and (checkpoint is None or checkpoint["step"] != world.total_steps)

    def _due_at(self, status: Mapping[str, Any], *, started: bool) -> float | None:
        """Return when a deadline is over, by the operators' clock; None: there is none now. `started`: that of a started job."""
        bound_s = self.policy.active_s if started else self.policy.start_s
        start = status.get("startTime")
        if not bound_s or (start is None if started else self._has_begun):
            return None
        said = _condition(status, "Suspended")
        if said and said["reason"] != "Resumed":
            return None  # what was suspended has its whole time before it when it is resumed
        times = [said["lastTransitionTime"]] if said else []
        if started:
            times.append(start)
        return bound_s + max(map(seconds_of, times or [self.world.created]))

    def _may_be_ruled(self, message: str) -> bool:
        """Return whether a rule fails the job for what has just ended, or for a pod that cannot start."""
        world = self.world
        for index, rule in enumerate(self.rules):
            if f"spec.recovery.onExit[{index}] " not in message or rule["action"] != "Fail":
                continue
            if "cannot start" in message:
                return bool(self._blocked(tuple(world.pods.by_uid.values())))
            return any(
                matching(self.rules, end) == index and (world.is_over or self._is_first(end, doubt_s=RECENT_S))
                for end in world.ledger.ends
                if end.at_s >= world.now_s - RECENT_S
            )
        return False

    def _is_first(self, end: End, *, doubt_s: float) -> bool:
        """Return whether an end was no consequence of another one. `doubt_s`: an operator may not know of others that ended so
        shortly before."""
        if end.generation == 0:
            return True
        ends = self.world.ledger.ends
        of_worker = [o for o in ends[: ends.index(end)] if (o.pod, o.generation) == (end.pod, end.generation)]
        own = any(
            end.local_rank in (o.local_rank, None) or (o.local_rank is None and not o.is_disruption) for o in of_worker
        )
        known = [
            o for o in ends[: ends.index(end)]
            if o.generation >= end.generation and (matching(self.rules, o) is not None or not o.is_disruption)
        ]  # fmt: skip
        return own or all(o.at_s > end.at_s - doubt_s for o in known)

    def _blocked(self, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        """Return the pods that fail the job because they cannot pull their image."""
        if not any(rule["action"] == "Fail" and "ImagePullBackOff" in rule.get("reasons", ()) for rule in self.rules):
            return ()
        return tuple(p for p in pods if p.usable and p.waiting_reason == "ImagePullBackOff")

    # --- pods that the kubelet refuses ---------------------------------------------------------------------------

    def _made(self, slot: int) -> None:
        """A worker's pod is made: after two that were refused, later and later."""
        row = self.world.pods.refused.get(slot)
        if row is None or row.count < 2 or row.num_operators != self.world.num_operators:
            return  # the row is in the memory of an operator
        pause_s = min(300.0, 10.0 * 2.0 ** (row.count - 2))
        if self.world.now_s < row.at_s + pause_s - 0.01:
            self._wrong(
                "too many pods",
                f"slot {slot} had {row.count} pods refused in a row, and the next is made after "
                f"{self.world.now_s - row.at_s:.1f} s and not {pause_s:.0f} s",
            )

    def _are_refused_often(self) -> bool:
        """Return whether kubelets have refused so many pods of so many slots that too few workers are left. A new operator begins
        to count anew."""
        world = self.world
        spec, finished = world.store.view["spec"], world.finished
        least: int = (spec.get("elasticPolicy") or {}).get("minReplicas", world.replicas)
        if finished is None:
            spares: int = spec["recovery"].get("spares", 0)
            slots = set(range(world.replicas + spares))
            spare = max(0, len(slots) - least) // world.per_group
        else:
            slots = {member.slot for member in finished.open}
            spare = len(slots) - 1  # that one script returns is progress
        counts = world.pods.num_refused
        often = [slot for slot in slots if counts[slot, world.num_operators] >= REFUSED_OFTEN]
        at_place = [sum(slot % world.per_group == place for slot in often) for place in range(world.per_group)]
        return max(at_place) > spare

    # --- what must have happened by now --------------------------------------------------------------------------

    def look(self, *, led: bool) -> None:
        """Find what has not happened although it had to. `led`: a leader is there and can write."""
        world = self.world
        if self._skew[0] != world.wall_skew_s:
            self._skew = (world.wall_skew_s, world.now_s)
        is_active = led and not world.has_ended and not self._is_suspended()
        if self.policy.active_s:
            self._overdue("DeadlineExceeded", self._due_at(self._last, started=True), is_active)
        if self.policy.start_s and not world.is_over:
            self._overdue("StartDeadlineExceeded", self._due_at(self._last, started=False), is_active)
        if world.has_ended or self._is_suspended():
            self._role_failed = False  # a pod that fails while it is told to stop fails nothing
        self._must("RoleFailed", is_active and self._role_failed)
        is_active &= not world.is_over
        self._must("ExitRule for pods that cannot start", is_active and world.pods.stale is None and self._is_blocked())
        self._look_at_ends(is_active)
        kept = [p.slot for p in world.pods.by_uid.values() if p.phase == "Failed" and not p.terminating]
        if self._holds("kept", is_active and world.pods.stale is None and len(kept) > len(set(kept)), 2 * LATE_S):
            self._wrong("too many pods", f"several failed pods of one slot stay: {sorted(kept)}")

    def role_failed(self) -> None:
        """A pod of a role that is never restarted has failed by its own exit code."""
        self._role_failed = self.policy.never

    def _is_suspended(self) -> bool:
        """Return whether the user wants the job suspended, or it has been told to be."""
        wanted = (self.world.store.view["spec"].get("runPolicy") or {}).get("suspend")
        return bool(wanted) or _condition(self._last, "Suspended").get("reason") in ("Suspending", "Suspended")

    def _overdue(self, reason: str, due: float | None, is_active: bool) -> None:
        is_late = due is not None and self.wall > due
        self._must(reason, is_active and is_late and self.world.now_s > self._skew[1] + JUMP_S)

    def _is_blocked(self) -> bool:
        """Return whether more workers cannot start than the job can do without, by whole groups."""
        world = self.world
        spares: int = world.store.view["spec"]["recovery"].get("spares", 0)
        wanted = [
            p
            for p in world.pods.by_uid.values()
            if p.slot < world.wanted and p.uid not in world.status.get("released", ())
        ]
        groups = {p.slot // world.per_group for p in self._blocked(wanted)}
        return len(groups) * world.per_group > spares

    def _look_at_ends(self, is_active: bool) -> None:
        """Remember each end that must fail the job, and find one that has not. The leader that was told judges it, or the next."""
        world, ends = self.world, self.world.ledger.ends
        for end in ends[self._num_judged :]:
            index = matching(self.rules, end)
            is_due = index is not None and self.rules[index]["action"] == "Fail" and self._is_first(end, doubt_s=0.0)
            if is_due and end.is_calm:
                self.num_due += 1
                self._due.append((end, world.operator, world.now_s))
        self._num_judged = len(ends)
        if not is_active:
            self._due.clear()
        leader = world.operator
        if leader is None or leader.paused:
            leader = None
        for at, (end, operator, since_s) in enumerate(self._due):
            if operator is not leader:
                self._due[at] = (end, leader, world.now_s)
            elif leader is not None and world.now_s > since_s + LATE_S:
                self._wrong("not failed", f"a rule fails the job, and it has not: {end}")

    def _must(self, what: str, now: bool) -> None:
        if self._holds(what, now, LATE_S):
            self._wrong("not failed", f"{what} was due for {LATE_S:.0f} s, and the job goes on")

    def _holds(self, what: str, now: bool, for_s: float) -> bool:
        """Return whether something has held at each look for so long."""
        if not now:
            self._since_s.pop(what, None)
            return False
        return self.world.now_s > self._since_s.setdefault(what, self.world.now_s) + for_s

    # --- after the end -------------------------------------------------------------------------------------------

    def _removed(self) -> None:
        """The operator has deleted the job's object."""
        ttl_s = self.policy.ttl_s
        if ttl_s is None or self._ended_wall is None or self.wall < self._ended_wall + ttl_s - ROUND_S:
            self._wrong("deleted", f"the job is deleted at {self.wall:.1f}, ended {self._ended_wall}, policy {ttl_s}")

    def outlive(self, advance: Callable[[float], None]) -> None:
        """Let time pass after the end, with everything well, and find what should not be there then, or should."""
        world = self.world
        left_s = 0.0
        if self.policy.ttl_s is not None and self._ended_wall is not None:
            left_s = max(0.0, self._ended_wall + self.policy.ttl_s - self.wall)
        if world.store.is_deleted:
            left_s = 0.0
        advance(left_s + LATE_S)
        if (self.policy.ttl_s is not None) != world.store.is_deleted:
            self._wrong(
                "not deleted", f"deleted {world.store.is_deleted}, ttl {self.policy.ttl_s}, {left_s:.0f} s were left"
            )
        advance(STAYS_S)
        there = {p.name: p for p in self._pods()}
        if alive := [name for name, p in there.items() if p.alive or p.terminating]:
            self._wrong("outlives", f"{STAYS_S:.0f} s after the end there are still {alive}")
        if there and (world.store.is_deleted or self.policy.cleans == "All"):
            self._wrong("outlives", f"no pod should be left, and there are {sorted(there)}")
        gone = self._kept - there.keys()
        if gone and not world.store.is_deleted and self.policy.cleans != "All":
            self._wrong("not kept", f"pods that had ended are gone with their logs: {sorted(gone)}")

    def _pods(self) -> tuple[Pod, ...]:
        return (*self.world.pods.by_uid.values(), *self.world.pods.of_roles.values())

    def _wrong(self, sort: str, sentence: str) -> None:
        self.wrong.append((sort, sentence))


def is_well(world: World) -> bool:
    """Return whether all agents can be reached, and nobody asks a pod to leave."""
    return (
        not world.network.is_cut
        and world.pods.stale is None
        and all(a.connected and not a.stopped and not a.muted for a in world.agents.values())
        and all(p.usable and not p.notice for p in world.pods.by_uid.values())
    )


def matching(rules: Sequence[Rule], end: End) -> int | None:
    """Return the index of the first rule that matches; None: none does. What hung was killed by the operator's own wish."""
    code = 128 - end.code if end.code is not None and end.code < 0 else end.code
    for index, rule in enumerate(rules):
        codes = rule.get("exitCodes")
        if end.hung:
            return None
        if end.reason and end.reason in rule.get("reasons", ()):
            return index
        if code is not None and code in {NUMBERS[name] for name in rule.get("signals", ())}:
            return index
        if codes is not None and code is not None and (code in codes["values"]) == (codes["operator"] == "In"):
            return index
    return None


def _failed_alone(pod: Pod) -> bool:
    """Return whether a pod has failed by its own exit code."""
    outside = pod.status_reason in ("Evicted", REFUSED) or pod.disruption or pod.terminating or pod.end_unseen
    return pod.phase == "Failed" and pod.last_exit_code is not None and not outside


def _has_ended(status: Mapping[str, Any]) -> bool:
    return any(_condition(status, kind).get("status") == "True" for kind in ("Complete", "Failed"))


def _resumed(status: Mapping[str, Any]) -> str | None:
    said = _condition(status, "Suspended")
    return said["lastTransitionTime"] if said.get("reason") == "Resumed" else None


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})
