"""Judge failures by the rules of spec.recovery.onExit: which one fails the job, which ones count, which ones are ignored. Pure.

The first rule that matches a failure applies. Only the first failure of a generation can fail the job by a rule. If one rank dies,
others may end as a consequence, with codes that say nothing.

Two kinds of failures are judged as if they were the first. One is a process that was started again after a failure and has been in
no generation since: no other process made it fail. The other is a container that ends after its worker failed in the newest
generation that had a failure. The processes of an evicted pod count as those of before, because the eviction is decided while they
run.

status.restarts.judged has what has been judged, written together with the counts. So the next operator does not forget that a
generation had its first failure. Nor does it judge the end of a container twice (adr/0052).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from regroup.protocol.text import shorten
from regroup_operator.api.spec import ExitRule
from regroup_operator.api.status import JudgedExits
from regroup_operator.model.plan import Failure, IgnoredRow
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.records import EVICTED, PREEMPTED, Pod

SIGNALS = {
    "SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGILL": 4, "SIGTRAP": 5, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8, "SIGKILL": 9,
    "SIGUSR1": 10, "SIGSEGV": 11, "SIGUSR2": 12, "SIGPIPE": 13, "SIGALRM": 14, "SIGTERM": 15, "SIGXCPU": 24, "SIGXFSZ": 25,
    "SIGSYS": 31,
}  # fmt: skip
"""Linux' numbers: where the operator runs is not where the processes do."""
WAITS = {
    "ImagePullBackOff": ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    "CreateContainerError": ("CreateContainerError", "CreateContainerConfigError", "RunContainerError"),
}
"""Maps a rule's reason to the kubelet's reasons. ErrImagePull is only the first try: ImagePullBackOff follows if it fails again."""
UNSCHEDULABLE = "Unschedulable"
EXIT_RULE = "ExitRule"
"""Reason of condition Failed."""
MAX_FAILED = 64
"""So many workers that failed in one generation are written down. Of the others only a newer generation's failure is judged."""
QUIET_S = 120.0
"""Ignored failures further apart are no row: what runs that long has not failed at its start."""


@dataclass(frozen=True)
class Rulings:
    """`counted`: against maxRestarts, by a rule or for want of one. `ignored`: with the index of the rule."""

    judged: JudgedExits
    counted: tuple[Failure, ...] = ()
    ignored: tuple[tuple[int, Failure], ...] = ()
    fails: tuple[int, Failure] | None = None
    """The failure that fails the job, and the index of the rule that says so."""


def judge_exits(
    rules: Sequence[ExitRule],
    failures: Iterable[Failure],
    *,
    judged: JudgedExits,
    generations: Mapping[str, int],
    finished: int = 0,
) -> Rulings:
    """Return the rulings on new failures, in the order of their times.

    `generations` has the newest generation of each worker that is a member of one. The end of its whole container is dated in that
    generation. `finished` is the generation whose steps are over (0: there is none). No failure in it is the consequence of another
    one.
    """
    counted: list[Failure] = []
    ignored: list[tuple[int, Failure]] = []
    fails: tuple[int, Failure] | None = None
    for failure in sorted(failures, key=lambda f: (f.at, f.worker)):
        index = first_match(rules, failure)
        if index is None and is_disruption(failure):
            continue  # a drain, or the loss of a worker
        generation = generations.get(failure.worker, 0) if failure.container else failure.generation
        own, judged = _note(judged, failure, generation, rules, index)
        action = "Restart" if index is None else rules[index].action
        own = own or (failure.generation == finished > 0)
        if index is not None and action == "Fail" and own and fails is None:
            fails = (index, failure)
        if index is not None and action == "Ignore":
            ignored.append((index, failure))
        else:
            counted.append(failure)
    return Rulings(judged, tuple(counted), tuple(ignored), fails)


def _note(
    judged: JudgedExits, failure: Failure, generation: int, rules: Sequence[ExitRule], index: int | None
) -> tuple[bool, JudgedExits]:
    """Return whether the failure is no consequence of another one, and what is known after it."""
    if generation == 0 or generation < judged.generation:
        return generation == 0 or failure.alone, judged  # who is in no generation has no peers
    words = None if index is None else rule_words(rules, index)
    if generation > judged.generation:
        return True, JudgedExits(generation=generation, rule=words, failed={failure.worker: _mark(failure, None)})
    before = judged.failed.get(failure.worker)
    own = failure.alone or before == 0 or (failure.container and before is not None)
    newest = {**judged.failed, failure.worker: _mark(failure, before)}
    kept = dict(list(newest.items())[-MAX_FAILED:])
    return own, JudgedExits(generation=generation, rule=words if own and words else judged.rule, failed=kept)


def _mark(failure: Failure, before: int | None) -> int:
    """Return what JudgedExits.failed has of a worker that has failed. Only a 0 has a meaning: the whole container ended."""
    if before == 0 or (failure.container and not is_disruption(failure)):
        return 0
    return max(failure.incarnation, before or 0, 1)


def first_match(rules: Sequence[ExitRule], failure: Failure) -> int | None:
    """Return the index of the first rule that matches, None: none does. What the operator had killed because it hung matches
    none: it has not ended by itself."""
    if failure.hung:
        return None
    code = failure.shell_code
    for index, rule in enumerate(rules):
        if rule.reasons is not None and failure.reason in rule.reasons:
            return index
        if rule.signals is not None and code in {128 + SIGNALS[name] for name in rule.signals}:
            return index
        codes = rule.exit_codes
        if codes is not None and code is not None and (code in codes.values) == (codes.operator == "In"):
            return index
    return None


def is_disruption(failure: Failure) -> bool:
    """Return whether the pod was ended from outside."""
    return failure.reason in (EVICTED, PREEMPTED)


def blocked_pod(
    rules: Sequence[ExitRule], pods: Iterable[Pod], *, spares: int = 0, per_group: int = 1
) -> tuple[int, Pod, str] | None:
    """Return the first pod that cannot start and fails the job for it, with the index of the rule and the pod's reason. Each pod
    is judged by its first matching rule. `spares`: how many workers the job can do without; they count in whole groups of
    `per_group` workers."""
    found, groups = [], set()
    for pod in pods:
        reason = _blocked_by(pod)
        if not reason or not pod.usable:
            continue
        index = next((i for i, rule in enumerate(rules) if rule.reasons is not None and reason in rule.reasons), None)
        if index is not None and rules[index].action == "Fail":
            found.append((index, pod, reason))
            groups.add(pod.slot // per_group)
    return found[0] if len(groups) * per_group > spares else None


def _blocked_by(pod: Pod) -> str:
    """Return the rule's word for what keeps a pod from starting, else empty."""
    if pod.unschedulable and pod.unscheduled_reason == UNSCHEDULABLE:
        return UNSCHEDULABLE
    return next((word for word, reasons in WAITS.items() if pod.waiting_reason in reasons), "")


def blocked_sentence(rules: Sequence[ExitRule], index: int, pod: Pod, reason: str) -> str:
    """Return why a pod that cannot start fails the job."""
    said = pod.unschedulable if reason == UNSCHEDULABLE else pod.waiting_message
    found = pod.waiting_reason if reason != UNSCHEDULABLE else reason
    message = shorten(f": {said.rstrip('.')}", 600) if said else ""
    return (
        f"Worker {pod.id} (pod {pod.name}) cannot start ({found}{message}); {rule_words(rules, index)} fails the job."
    )


def rule_words(rules: Sequence[ExitRule], index: int) -> str:
    """Return a rule as sentences name it: "spec.recovery.onExit[0] (Fail, exitCodes In 2, 42)"."""
    rule = rules[index]
    if rule.exit_codes is not None:
        words = f"exitCodes {rule.exit_codes.operator} {', '.join(map(str, rule.exit_codes.values))}"
    elif rule.signals is not None:
        words = f"signals {', '.join(rule.signals)}"
    else:
        words = f"reasons {', '.join(rule.reasons or ())}"
    return shorten(f"spec.recovery.onExit[{index}] ({rule.action}, {words})", 400)


def note_ignored(
    row: IgnoredRow | None, new: Sequence[tuple[Failure, str]], *, committed_at: float | None, now: float
) -> IgnoredRow | None:
    """Return the failures in a row that are ignored; None: there is no row. `new`: each with its words; `committed_at`: when a step
    was last committed. Times are seconds since the epoch."""
    for failure, words in new:
        in_row = row is not None and failure.at < row.at + QUIET_S
        row = IgnoredRow(row.count + 1 if row is not None and in_row else 1, failure.at, words)
    if row is None or now >= row.at + QUIET_S or (committed_at is not None and committed_at > row.at):
        return None
    return row


def note_disrupted_pods(
    rows: Mapping[int, PodRow], ended: Iterable[Pod], pods: Iterable[Pod], now_s: float, *, slots: int
) -> dict[int, PodRow]:
    """Return by slot how many pods in a row were evicted or preempted soon after their start, and count nothing.

    `ended` has the new ones. The job has `slots`. A scheduler that makes room for other pods can do so for ever, so pods/early.py
    holds each further pod back longer. Pods that a rule counts are bounded by maxRestarts.

    A pod that has run for long ends the row of its slot, but only while it runs: nobody knows later how long it ran. A pod that was
    preempted or evicted goes from the API, and its row stays for FORGOTTEN_S.
    """
    by_slot: dict[int, list[Pod]] = {}
    for pod in pods if rows else ():
        by_slot.setdefault(pod.slot, []).append(pod)
    out = {
        slot: row
        for slot, row in rows.items()
        if (slot in by_slot or (slot < slots and not row.is_over(now_s)))
        and not any(pod.attempt > row.attempt and _has_lasted(pod, now_s) for pod in by_slot.get(slot, ()))
    }
    for pod in ended:
        out[pod.slot] = PodRow.after(out.get(pod.slot), pod.attempt, now_s, reason=pod.disrupted)
    return out


def _has_lasted(pod: Pod, now_s: float) -> bool:
    return pod.running_since_s is not None and now_s >= pod.running_since_s + QUIET_S


def judged_status(rules: Sequence[ExitRule], judged: JudgedExits, pods: Iterable[Pod]) -> JudgedExits | None:
    """Return status.restarts.judged, None where there are no rules. All ends that the pods show have been judged by now."""
    return judged.with_fields(ends={pod.name: pod.num_ends for pod in pods if pod.num_ends}) if rules else None
