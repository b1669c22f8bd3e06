"""The stage of failures: processes, containers and pods that ended, hangs, and generations that commit nothing. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from regroup.protocol.wire import CANNOT_RUN
from regroup_operator.api.spec import ExitRule
from regroup_operator.api.status import JudgedExits, Restarts, SeenExits
from regroup_operator.model.plan import Crash, Failure, IgnoredRow, PodEnds, ScriptMemory, Verdict, earliest
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.facts import Facts, Inputs, members_of
from regroup_operator.plan.failures.crashes import crash_sentence, is_hopeless, note_crashes, repeats
from regroup_operator.plan.failures.exits import (
    NO_EXITS,
    KnownExits,
    Seen,
    excused_generations,
    exits_status,
    see_failures,
)
from regroup_operator.plan.failures.hangs import HUNG, Hang, find_hang, hangs_in_a_row
from regroup_operator.plan.failures.no_commit import NO_COMMIT, broke_without_commit, no_commit_failure
from regroup_operator.plan.failures.on_exit import (
    EXIT_RULE,
    QUIET_S,
    Rulings,
    blocked_pod,
    blocked_sentence,
    is_disruption,
    judge_exits,
    judged_status,
    note_disrupted_pods,
    note_ignored,
    rule_words,
)
from regroup_operator.plan.failures.pod_ends import LEAST_WINDOW_S, note_pod_ends, pod_ends_failure, without_slots
from regroup_operator.plan.failures.refused_size import SizeVerdict, Trial, judge_trial, may_go_back, steady_at_s
from regroup_operator.plan.failures.restarts import (
    Recent,
    RestartBudget,
    exit_words,
    judge_restarts,
    log_words,
    read_recent,
    restart_cause,
)
from regroup_operator.plan.failures.roles import role_verdict
from regroup_operator.plan.failures.script_hang import find_script_hang, silence_of
from regroup_operator.plan.failures.script_hints import crash_hint, with_returned
from regroup_operator.plan.failures.unread import judge_unread


@dataclass(frozen=True)
class FailureRows:
    """Failures that come again and again."""

    crash: Crash | None
    ignored: IgnoredRow | None
    pod_ends: PodEnds | None
    disrupted: Mapping[int, PodRow]
    """Pods in a row that were evicted or preempted soon after their start, by slot."""


@dataclass(frozen=True)
class Failures:
    """The failures since the last plan, and what follows from them."""

    seen: Seen
    script: ScriptMemory
    rows: FailureRows
    workers: tuple[Worker, ...]
    """The workers of the facts. A worker whose processes hang stands as hung."""
    hang: Hang
    processes: Mapping[str, int] = field(default_factory=dict)
    """Number of processes and containers that have ended since the last plan and count, by cause (restart_cause)."""
    recent: Recent | None = None
    """The failures that count against maxRestarts; None: as they were."""
    crash: str = ""
    """The sentence on a crash that repeats; empty: none does."""
    num_without_commit: int = 0
    """Generations in a row that broke before a step was committed, the newest included; 0: the newest did not."""
    verdict: Verdict | None = None
    """The reason for which the job has to fail; None: it has not to."""
    of_roles: Verdict | None = None
    """The verdict on a role that fails the job. Once all scripts have returned 0, no other failure can."""
    ended: tuple[Failure, ...] = ()
    """The processes and containers that have ended since the last plan, whether they count or not."""
    num_ignored: int = 0
    """Failures since the last plan that a rule ignores."""
    judged: JudgedExits | None = None
    """status.restarts.judged; None: the status has none."""
    exits: SeenExits | None = None
    """status.restarts.exits; None: as it was."""
    ignored: str = ""
    """The sentence on failures that are ignored again and again; empty: there are none."""
    size: SizeVerdict = field(default_factory=SizeVerdict)
    """The verdict on the size of the newest generation."""
    unread: Verdict | None = None
    """The verdict on a script that may have ended well, and has not read the checkpoint that the spec names."""
    due_s: float | None = None
    """The time at which one of these changes though nothing is reported."""

    @property
    def members(self) -> tuple[Worker, ...]:
        """The newest generation's."""
        return members_of(self.workers)


def judge_failures(facts: Facts) -> Failures:
    """Count what has failed since the last plan, and judge whether it was too much."""
    inputs, obs, rules = facts.inputs, facts.inputs.obs, facts.inputs.job.spec.recovery.on_exit
    known = facts.status.restarts or Restarts()
    was_judged = known.judged
    size, size_due_s = _judge_size(facts)
    known_exits = KnownExits(known.exits or NO_EXITS, size.undecided, size.spared)
    seen = _see(facts, known_exits, was_judged.ends if rules and was_judged is not None else None)
    ended = (*seen.failures, *(failure for _, failure in seen.disrupted))
    rulings = _rule(facts, was_judged or JudgedExits(), ended)
    processes = tuple(failure for failure in rulings.counted if not is_disruption(failure))
    rows = _rows(facts, seen, rulings, processes)
    crash, ignored = rows.crash, rows.ignored
    words = _crash_words(facts, crash)
    restarts = _restarts(facts, rulings.counted) if rulings.counted else None
    of_roles = role_verdict(inputs.job, obs.roles)
    hang, workers = _hang(facts)
    unread, unread_due_s = _unread(facts, workers)
    num_without_commit = _num_without_commit(facts, workers)
    verdict = (  # of the first judge that has one
        _cannot_run(seen.failures, inputs.logs)
        or _ruled(facts, rulings)
        or (restarts and (_hopeless(crash, words) or restarts.verdict))
        or pod_ends_failure(rows.pod_ends, window_s=_ends_window_s(facts))
        or of_roles
        or (Verdict(HUNG, hang.failure) if hang.failure is not None else None)
        or unread
        or _without_commit(num_without_commit, workers)
    )
    return Failures(
        seen,
        seen.script,
        rows,
        workers,
        hang,
        Counter(map(restart_cause, processes)),
        None if restarts is None else restarts.recent,
        words,
        num_without_commit,
        verdict,
        of_roles,
        ended=tuple(failure for failure in ended if not is_disruption(failure)),
        num_ignored=len(rulings.ignored),
        judged=judged_status(rules, rulings.judged, obs.pods),
        exits=exits_status(
            known_exits, obs, seen.script.failed, facts.tier, counted=bool(rulings.counted or rulings.ignored)
        ),
        ignored="" if ignored is None or ignored.count < 2 else f"{ignored.count} failures in a row: {ignored.words}",
        size=size,
        unread=unread,
        due_s=earliest([unread_due_s, size_due_s, _quiet_s(inputs, ignored)], after_s=inputs.clock.now_s),
    )


def _judge_size(facts: Facts) -> tuple[SizeVerdict, float | None]:
    """Judge whether a script refuses the size of the newest generation, and say when it has trained with it."""
    current, policy, inputs = facts.current, facts.inputs.job.spec.elastic_policy, facts.inputs
    if facts.tier != "Script" or policy is None or current is None:
        return SizeVerdict(), None
    good = facts.status.last_good_size or 0
    # The record outlives the refusal (an edit ends that), so that a generation is judged once.
    known = inputs.job.status.refused_size
    steady_s = steady_at_s(facts.status, current, inputs.clock)
    steps = facts.script is not None and facts.script.goes_on
    if steps or (steady_s is not None and inputs.clock.now_s >= steady_s):
        good, steady_s = len(current.members), None
    verdict = SizeVerdict(good)
    is_judged = known is not None and known.generation == current.number
    if not current.suspended and not is_judged and may_go_back(policy, good, len(current.members)):
        verdict = judge_trial(
            Trial(
                current=current,
                members=facts.members,
                good=good,
                wanted=inputs.job.wanted,
                clock=inputs.clock,
                crash=facts.memory.crash,
                rules=inputs.job.spec.recovery.on_exit,
            )
        )
    spared = verdict.spared | ({known.generation} if known is not None else frozenset[int]())
    return replace(verdict, spared=spared), steady_s


def _see(facts: Facts, known_exits: KnownExits, ends: Mapping[str, int] | None) -> Seen:
    """Return what has failed since the last plan. `ends` is the number of judged ends of each pod; None: all are."""
    seen = see_failures(
        facts.inputs.obs,
        facts.memory,
        facts.inputs.clock,
        tier=facts.tier,
        current=facts.current,
        ends=ends,
        released=facts.released,
        known_exits=known_exits,
    )
    if facts.tier != "Script":
        return seen
    return replace(seen, failures=with_returned(seen.failures, facts.current, facts.returned))


def _rule(facts: Facts, judged: JudgedExits, ended: Sequence[Failure]) -> Rulings:
    """Judge the new failures by the rules of spec.recovery.onExit."""
    rules = facts.inputs.job.spec.recovery.on_exit
    containers = frozenset(failure.pod for failure in ended if failure.container) if rules else frozenset[str]()
    finished = facts.finished if facts.ends_alone else None
    return judge_exits(
        rules,
        ended,
        judged=judged,
        generations=_generations(facts, containers),
        finished=finished.generation if finished is not None else 0,
    )


def _unread(facts: Facts, workers: tuple[Worker, ...]) -> tuple[Verdict | None, float | None]:
    """Judge a script that does not read the checkpoint that the spec names, and say when to look again."""
    return judge_unread(
        checkpoint=facts.inputs.job.spec.checkpoint,
        tier=facts.tier,
        current=facts.current,
        members=members_of(workers),
        start_timeout_s=facts.inputs.settings.start_timeout_s,
        now_s=facts.inputs.clock.now_s,
    )


def _rows(facts: Facts, seen: Seen, rulings: Rulings, processes: Iterable[Failure]) -> FailureRows:
    """Return the failures that come again: crashes, ignored ones, ends of pods, disruptions. Such a row ends with a suspension:
    people suspend a job to repair what stops it."""
    obs, clock, memory = facts.inputs.obs, facts.inputs.clock, facts.memory
    is_repaired = facts.current is not None and facts.current.suspended and not obs.pods
    sessions = obs.sessions.values()
    committed_s = [s.progress_at_s for s in sessions if s.progress_at_s is not None]
    committed_at = max(map(clock.wall_at, committed_s), default=None)
    is_script = facts.tier == "Script"
    counted_pods = {failure.pod for failure in rulings.counted if is_disruption(failure)}
    return FailureRows(
        crash=note_crashes(
            None if is_repaired else memory.crash,
            [failure for failure in processes if not failure.init],  # it may wait for something by failing
            committed_at=committed_at,
            script=is_script,
            excused=excused_generations(sessions, seen.script.left, facts.tier),
        ),
        ignored=note_ignored(
            None if is_repaired else memory.ignored,
            [
                (failure, _ignored_words(facts.inputs.job.spec.recovery.on_exit, index, failure))
                for index, failure in rulings.ignored
            ],
            committed_at=committed_at,
            now=clock.wall,
        ),
        pod_ends=None if is_repaired else _pod_ends(facts, seen, rulings),
        disrupted=note_disrupted_pods(
            memory.of_slots(lambda s: s.disrupted),
            [pod for pod, failure in seen.disrupted if failure.pod not in counted_pods],
            obs.pods,
            clock.now_s,
            slots=facts.known_slots,
        ),
    )


def _pod_ends(facts: Facts, seen: Seen, rulings: Rulings) -> PodEnds | None:
    """Return the pods that end again and again. What a rule counts is bounded by maxRestarts, and what it ignores is to be
    ignored: neither is among them."""
    slots, minimum, reached = _reached(facts)
    ruled = {f.pod for f in (*rulings.counted, *(f for _, f in rulings.ignored)) if is_disruption(f)}
    telling = {pod.uid for pod in facts.telling_pods} if seen.ended else frozenset[str]()
    return note_pod_ends(
        without_slots(facts.memory.pod_ends, facts.corrected),
        [pod for pod in seen.ended if pod.name not in ruled and pod.uid in telling],
        slots=slots,
        minimum=minimum,
        reached=reached,
        now=facts.inputs.clock.wall,
        window_s=_ends_window_s(facts),
        per_group=facts.per_group,
    )


def _ends_window_s(facts: Facts) -> float | None:
    """Return how long the end of a pod counts (pod_ends.py)."""
    if facts.tier == "Session":
        return None
    return max(LEAST_WINDOW_S, facts.inputs.job.spec.recovery.window_seconds)


def _crash_words(facts: Facts, crash: Crash | None) -> str:
    """Return what is said of a crash that repeats; empty: none does."""
    if crash is None or not repeats(crash):
        return ""
    hint = crash_hint(crash) if facts.tier == "Script" else ""
    where = " ".join(filter(None, [hint, log_words(crash.last, facts.inputs.logs)]))
    return crash_sentence(crash, exit_words(crash.last), where)


def _hopeless(crash: Crash | None, words: str) -> Verdict | None:
    """Return the verdict on a crash that would repeat for ever."""
    if crash is None or not is_hopeless(crash):
        return None
    return Verdict("RepeatedCrash", words, crash.last.script_code, crash.last.pod)


def _restarts(facts: Facts, counted: Sequence[Failure]) -> RestartBudget:
    """Judge whether the failures that count are too many."""
    recovery = facts.inputs.job.spec.recovery
    return judge_restarts(
        recent=read_recent(facts.status.restarts or Restarts()),
        new=counted,
        max_restarts=recovery.max_restarts,
        window_s=recovery.window_seconds,
        now=facts.inputs.clock.wall,
        logs=facts.inputs.logs,
    )


def _without_commit(number: int, workers: tuple[Worker, ...]) -> Verdict | None:
    """Return the verdict on generations in a row that broke before a step was committed."""
    no_commit = no_commit_failure(number, members_of(workers))
    return None if no_commit is None else Verdict(NO_COMMIT, no_commit)


def _quiet_s(inputs: Inputs, ignored: IgnoredRow | None) -> float | None:
    """Return when the status stops speaking of ignored failures, monotonic."""
    return None if ignored is None else inputs.clock.at_s(ignored.at + QUIET_S)


def _reached(facts: Facts) -> tuple[int, int, tuple[int, int] | None]:
    """Return the slots that the job has, how many of them it needs to get further, and how far it is (pod_ends.py)."""
    finished = facts.finished
    if finished is not None and facts.tier == "Session":
        # Each script ends by itself: that one of them returns is progress.
        num_done = len(finished.done)
        return facts.known_slots, facts.known_slots - len(finished.open) + 1, (1, num_done)
    start = facts.start_step
    return facts.slots, facts.inputs.job.min_replicas, None if start is None else (0, start)


def _generations(facts: Facts, names: frozenset[str]) -> dict[str, int]:
    """Return by worker the newest generation that has the pod as a member, of the pods with these names."""
    current = facts.current
    if current is None or not names:
        return {}
    members = frozenset(current.members)
    found = {}
    for pod in facts.inputs.obs.pods:
        if pod.name in names:
            older = (one.number for one in current.older if pod.uid in one.pod_uids)
            found[str(pod.id)] = current.number if pod.id in members else max(older, default=0)
    return found


def _cannot_run(failures: Sequence[Failure], logs: str) -> Verdict | None:
    """Return the verdict on processes that the library has ended, and that would fail again whenever they are started; no rule of
    spec.recovery.onExit keeps them."""
    for failure in failures:
        if failure.reason == CANNOT_RUN:
            text = f"{failure.detail} {log_words(failure, logs)}"
            return Verdict(CANNOT_RUN, text, failure.script_code, failure.pod)
    return None


def _ruled(facts: Facts, rulings: Rulings) -> Verdict | None:
    """Return the verdict of a rule of spec.recovery.onExit: on what has ended, or on a pod that cannot start."""
    inputs, rules = facts.inputs, facts.inputs.job.spec.recovery.on_exit
    if rulings.fails is not None:
        index, failure = rulings.fails
        logs = "" if is_disruption(failure) else f" {log_words(failure, inputs.logs)}"
        line = f': "{failure.last_line}"' if failure.last_line else ""
        words = f"{exit_words(failure)}{line}; {rule_words(rules, index)} fails the job.{logs}"
        return Verdict(EXIT_RULE, words, failure.script_code, failure.pod)
    if not rules:
        return None
    needed = (p for p in inputs.obs.pods if p.slot < facts.known_slots and p.uid not in facts.released)
    spares = inputs.job.spec.recovery.spares if facts.finished is None else 0
    blocked = blocked_pod(rules, needed, spares=spares, per_group=facts.per_group)
    return None if blocked is None else Verdict(EXIT_RULE, blocked_sentence(rules, *blocked))


def _ignored_words(rules: Sequence[ExitRule], index: int, failure: Failure) -> str:
    return f"{exit_words(failure)}; {rule_words(rules, index)} does not count it."


def _hang(facts: Facts) -> tuple[Hang, tuple[Worker, ...]]:
    """Find out whether the newest generation hangs. A worker whose processes hang stands as hung from here on."""
    hang = Hang()
    if facts.tier is not None:
        hang = _hang_of_session(facts) if facts.tier == "Session" else _hang_of_script(facts)
    if not hang.culprits:
        return hang, facts.workers
    return hang, tuple(
        replace(w, standing=Standing.HUNG, available=False, since_s=hang.found_s, why=HUNG)
        if w.id in hang.culprits
        else w
        for w in facts.workers
    )


def _hang_of_session(facts: Facts) -> Hang:
    inputs = facts.inputs
    return find_hang(
        current=facts.current,
        workers=facts.workers,
        processes=facts.processes,
        hang_seconds=inputs.job.spec.recovery.hang_seconds,
        in_a_row=hangs_in_a_row(facts.updated, facts.newest_step),
        now_s=inputs.clock.now_s,
        settings=inputs.settings,
        per_group=facts.per_group,
    )


def _hang_of_script(facts: Facts) -> Hang:
    has_pattern = facts.inputs.job.spec.progress is not None and facts.inputs.job.spec.progress.log is not None
    return find_script_hang(
        current=facts.current,
        words=facts.script,
        workers=facts.workers,
        processes=facts.processes,
        hang_seconds=facts.inputs.job.spec.recovery.hang_seconds,
        silence=silence_of(facts.updated.progress, has_pattern=has_pattern),
        now_s=facts.inputs.clock.now_s,
        settings=facts.inputs.settings,
    )


def _num_without_commit(facts: Facts, workers: tuple[Worker, ...]) -> int:
    broke = facts.tier == "Session" and broke_without_commit(
        facts.current, members_of(workers), start_step=facts.start_step, newest_step=facts.newest_step
    )
    return facts.memory.issued.without_commit + 1 if broke else 0
