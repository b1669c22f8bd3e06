"""Make the conditions, the phase and the columns from what is. Pure; the words that people read are all here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Group
from regroup.protocol.text import shorten
from regroup_operator.api.conditions import AGENTS_CONNECTED, PODS_READY, SIZE_REFUSED
from regroup_operator.api.members import format_members
from regroup_operator.api.status import Progress, Samples, Summary
from regroup_operator.model.plan import JobCondition, Verdict
from regroup_operator.model.records import Pod, Settings
from regroup_operator.model.worker import Announce, Current, Decision, Standing, Wait, Worker
from regroup_operator.plan.facts.finished import Finished
from regroup_operator.plan.facts.set_up import not_set_up
from regroup_operator.plan.report.script_group import passed

PENDING, STARTING, RUNNING, RECOVERING, WAITING, FINISHING, COMPLETING, SUSPENDING, SUSPENDED, SUCCEEDED, FAILED = (
    "Pending", "Starting", "Running", "Recovering", "Waiting", "Finishing", "Completing", "Suspending", "Suspended", "Succeeded",
    "Failed",
)  # fmt: skip
AT_REST = (FINISHING, COMPLETING, SUSPENDING, SUSPENDED, SUCCEEDED, FAILED)
"""Phases in which the job does not want to train."""


AT_REST_WORDS = {
    FINISHING: "Scripts come to their end; see condition Complete.",
    COMPLETING: "The script has returned in every worker; see condition Complete.",
    SUSPENDING: "The job is being suspended.",
    SUSPENDED: "The job is suspended.",
    SUCCEEDED: "The job has ended.",
    FAILED: "The job has ended.",
}
WAITING_FOR_ROLES = "WaitingForRoles"
"""Reason of Complete=False: the script has returned in every worker, and roles that are required for completion have not ended."""
WAITING_FOR_CHECKPOINT = "WaitingForCheckpoint"
"""Reason of Degraded=True: workers are ready, and join after the script's next checkpoint."""
HELD_BACK = "HeldBack"
"""Reason of PodsReady=False: pods are missing that are made later, by spec.elasticPolicy."""
INIT_FAILED = "InitContainerFailed"
"""Reason of PodsReady=False."""
NOT_SET_UP = "NotSetUp"
"""Reason of PodsReady=False (plan/facts/set_up.py)."""
PASSING = ("Starting", "Connecting")
"""Reasons of PodsReady=False and AgentsConnected=False of pods on their way."""
LONG_HELLOS = 6
"""An agent that has not called for so many times Settings.hello_timeout_s is not only slow."""
MAX_QUOTED = 1000
"""Characters of a message that quotes others, such as a kubelet or a script."""
ORDINARY = ("Starting", "Ended", FINISHING, COMPLETING, SUSPENDING, SUSPENDED, HELD_BACK)
"""Reasons of PodsReady=False that pass by themselves."""


def phase_of(
    *,
    current: Current | None,
    decision: Decision | None,
    workers: Sequence[Worker],
    trained: bool,
    ended: str | None,
    stalled: bool = False,
    group: str | None = None,
    before: str | None = None,
) -> str:
    """Return status.phase.

    `trained` says that a generation has adopted before. `ended` is one of AT_REST (None: the job wants to train). `stalled` says
    that steps are overdue. That is the fault of the worker that cannot be reached, if there is one, and else the script's own
    affair. `group` says whether a script's processes have formed theirs (script_group.py); it is None for a session.
    `before` is the phase in the status.
    """
    if ended:
        return ended
    if current is None:
        if isinstance(decision, Announce) or any(w.pod and w.pod.phase == "Running" for w in workers):
            return STARTING
        return PENDING
    members = [w for w in workers if w.is_member]
    if isinstance(decision, Wait) and decision.reason in ("TooFewMembers", "NoWitness", "CheckpointUnreadable"):
        return WAITING if trained else STARTING
    if isinstance(decision, Announce) and decision.kind == "forced":
        return RECOVERING if trained else STARTING
    if not trained:
        return STARTING
    broken = any(w.standing in (Standing.BROKEN, Standing.DIED, Standing.HUNG, Standing.LOST) for w in members)
    silent = any(w.standing == Standing.SILENT and not w.has_yet_to_call for w in members)
    if broken or (stalled and silent):
        return RECOVERING
    if group == Group.WAITING:
        # Each generation starts a script's processes anew: a planned one, too, ends those that trained. One with which a worker
        # comes back before the others have formed their group belongs to the recovery.
        later = any(entry.generation < current.number for entry in current.lineage)
        return RECOVERING if later and (current.kind != PLANNED or before == RECOVERING) else STARTING
    if current.adopted or current.kind == "planned":
        return RUNNING
    return RECOVERING


@dataclass(frozen=True, kw_only=True)
class Workforce:
    """The facts behind the conditions PodsReady and AgentsConnected."""

    workers: Sequence[Worker]
    replicas: int
    ended: str | None
    """One of AT_REST; None: the job wants its pods."""
    now_s: float
    settings: Settings
    endpoint: str
    refusals: Mapping[str, str]
    """Sentences with which agents were turned away, by pod UID."""
    spares: int = 0
    held: str = ""
    """The reason for which pods are not made now."""
    failing: Verdict | None = None
    """The reason for which pods fail before they run."""

    @cached_property
    def pods(self) -> list[Pod]:
        """The pods that are there to serve."""
        return [w.pod for w in self.workers if w.pod is not None and w.pod.usable]

    @cached_property
    def running(self) -> list[Pod]:
        """The pods that run. A pod whose containers crash again and again has the phase Running, too."""
        connected = {w.uid for w in self.workers if w.connected}
        return [
            pod
            for pod in self.pods
            if pod.phase == "Running" and not pod.waiting_reason and (pod.node_ready or pod.uid in connected)
        ]


def worker_conditions(workforce: Workforce) -> list[JobCondition]:
    """Return PodsReady and AgentsConnected."""
    if workforce.ended:
        reason = "Ended" if workforce.ended in (SUCCEEDED, FAILED) else workforce.ended
        words = AT_REST_WORDS[workforce.ended]
        return [JobCondition(kind, "False", reason, words) for kind in (PODS_READY, AGENTS_CONNECTED)]
    return [_pods_ready(workforce), _agents_connected(workforce)]


def _pods_ready(workforce: Workforce) -> JobCondition:
    """Return whether as many pods run as are wanted, and else what the first one lacks that does not run."""
    num_running, replicas = (
        len({pod.slot for pod in workforce.running}),
        workforce.replicas,
    )  # of a slot with two pods one is enough
    counts = f"{min(num_running, replicas)} of {replicas} worker pods run"
    if workforce.spares:
        counts += f", {min(max(0, num_running - replicas), workforce.spares)} of {workforce.spares} spares"
    if num_running >= replicas:
        return JobCondition(PODS_READY, "True", "AllRunning", f"{counts}.")
    reason, words = next(_lacks(workforce), ("Starting", "."))
    return _bounded(PODS_READY, "False", reason, f"{counts}{words}")


def _lacks(workforce: Workforce) -> Iterator[tuple[str, str]]:
    """Yield reason and words of why pods do not run, what a person can do something about first."""
    for pod in workforce.pods:
        if pod.init_failed and pod.phase == "Pending":
            what = f"init container {pod.init_failed} has ended with exit code {pod.init_exit_code}"
            said = f": {pod.init_message.rstrip('.')}" if pod.init_message else ""
            yield INIT_FAILED, f"; {pod.name}: {what}{said}."
    for pod in workforce.pods:
        if pod.waiting_reason and pod.waiting_reason not in ("ContainerCreating", "PodInitializing"):
            message = f": {pod.waiting_message}" if pod.waiting_message else ""
            yield pod.waiting_reason, f"; {pod.name} cannot start{message}"
    for pod in workforce.pods:
        if words := not_set_up(pod, workforce.now_s):
            yield NOT_SET_UP, f"; {pod.name}: {words}"
    for pod in workforce.pods:
        if pod.unschedulable:
            yield "Unschedulable", f"; {pod.name}: {pod.unschedulable}"
    if workforce.failing is not None:
        yield workforce.failing.reason, f"; {workforce.failing.message}."
    if workforce.held and len(workforce.running) == len(workforce.pods):
        yield HELD_BACK, f"; {workforce.held}."


def _agents_connected(workforce: Workforce) -> JobCondition:
    """Return whether the agents of all workers have called."""
    of, timeout_s = f"of {workforce.replicas} agents", workforce.settings.hello_timeout_s
    refused = [workforce.refusals[pod.uid] for pod in workforce.pods if pod.uid in workforce.refusals]
    if refused:
        verb = "was" if len(refused) == 1 else "were"
        message = f"{len(refused)} {of} {verb} rejected: {refused[0]}"
        return JobCondition(AGENTS_CONNECTED, "False", "Refused", message)
    called = {w.uid for w in workforce.workers if w.session is not None}
    silent = [pod for pod in workforce.running if pod.uid not in called and pod.running_since_s is not None]
    late = [pod for pod in silent if workforce.now_s >= (pod.running_since_s or 0.0) + timeout_s]
    if late:
        have = "has" if len(late) == 1 else "have"
        long_s = LONG_HELLOS * timeout_s
        is_long = all(workforce.now_s >= (pod.running_since_s or 0.0) + long_s for pod in late)
        hint = _hello_hint(late, [w for w in workforce.workers if w.connected], is_long=is_long)
        waited_s = long_s if is_long else timeout_s
        message = f"{len(late)} {of} {have} not connected to {workforce.endpoint} for {waited_s:.0f} s. {hint}"
        return _bounded(AGENTS_CONNECTED, "False", "NoHello", message)
    # A member that has not called since the operator's start is on its way: nothing is said of it yet.
    connected = sum(w.connected or w.has_yet_to_call for w in workforce.workers)
    if connected >= workforce.replicas:
        return JobCondition(AGENTS_CONNECTED, "True", "AllConnected", f"{workforce.replicas} {of} are connected.")
    return JobCondition(AGENTS_CONNECTED, "False", "Connecting", f"{connected} {of} are connected.")


def _hello_hint(late: Sequence[Pod], heard: Sequence[Worker], *, is_long: bool) -> str:
    """Return what a person looks at where agents are `late`. A connected agent on each of their nodes shows that the network works.
    Then a busy node is the likely cause, since an agent has to start Python before it can call. A busy node explains no long wait.
    """
    if is_long:
        return f"Read the log of pod {late[0].name}, and check egress NetworkPolicy, DNS and service mesh."
    nodes = sorted({pod.node for pod in late if pod.node})
    where = f"node {nodes[0]} is" if len(nodes) == 1 else f"{len(nodes)} nodes are" if nodes else "its node is"
    slow = "the agent is only slow" if len(late) == 1 else "the agents are only slow"
    if all(pod.node for pod in late) and set(nodes) <= {w.pod.node for w in heard if w.pod is not None}:
        return f"Other agents on the same nodes are connected: {where} probably busy, and {slow}."
    if heard:
        return (
            f"Other agents are connected: {where} busy and {slow}, or there the way to the operator is closed. "
            "Check load, egress NetworkPolicy and service mesh there."
        )
    return "Check egress NetworkPolicy, DNS and service mesh. If the nodes are very busy, the agents may only be slow."


@dataclass(frozen=True, kw_only=True)
class Course:
    """The facts behind the conditions Training, Degraded, Complete and Failed."""

    phase: str
    decision: Decision | None
    current: Current | None
    replicas: int
    workers: Sequence[Worker]
    failure: Verdict | None
    complete: Verdict | None = None
    """The verdict that condition Complete has already."""
    finished: Finished | None = None
    """The end of the steps, in a generation that may be the one before the newest."""
    note: str = ""
    """The text of a refusal."""
    group: str | None = None
    """The state of a script's group, as in phase_of."""
    crash: str = ""
    """The sentence on a crash that repeats."""
    hang: str = ""
    """The sentence on a step that is overdue."""
    leaving: str = ""
    """The sentence on workers that are asked to leave and still needed."""
    spares: str = ""
    """The sentence on workers that are ready and in no whole group, or too few for the next size."""
    size: str = ""
    """The sentence on a job that is to train with fewer workers than spec.replicas."""
    growth: str = ""
    """The sentence on workers that are ready and join after the script's next checkpoint."""
    refused_size: str = ""
    """The sentences on a size that the script refused, if the job does not train with what it wanted."""
    memory: str = ""
    """The sentence on a missing worker that was killed for lack of memory."""
    unsaved: str = ""
    """The reason for which the last checkpoint is missing."""
    ignored: str = ""
    """The sentence on failures that recovery.onExit ignores."""
    roles: str = ""
    """Roles that are required for completion. While the job waits for them, their progress is in it, too."""


def training_conditions(course: Course) -> list[JobCondition]:
    """Return Training, Degraded, and Complete or Failed once the job has ended."""
    out = [_training(course), _degraded(course), *_complete(course)]
    if course.phase == FAILED:
        failure = course.failure or Verdict("Failed", "The job failed.")
        out.append(JobCondition("Failed", "True", failure.reason, failure.message))
    return out


def _training(course: Course) -> JobCondition:
    """Return whether the job trains, and else what it waits for."""
    phase, current, decision, group = course.phase, course.current, course.decision, course.group
    if phase in AT_REST:
        return JobCondition("Training", "False", phase, AT_REST_WORDS[phase])
    if phase == RUNNING:
        number, count = _trains(current)
        if group != Group.UNOBSERVED:
            trains = f"Generation {number} trains with {_workers(count)}."
            return JobCondition("Training", "True", "Running", _joined(trains, course.size))
        message = (
            f"The processes of generation {number} run on {_workers(count)}. They have not called "
            "torch.distributed.init_process_group where Regroup can see it, so it is not known whether they train."
        )
        return JobCondition("Training", "True", "Unobserved", message)
    if isinstance(decision, Wait):
        return JobCondition(
            "Training", "False", decision.reason, _joined(decision.message, course.note or course.refused_size)
        )
    what = "No generation yet."
    if current is not None:
        what = f"Generation {current.number}: {phase.lower()}."
        if group == Group.WAITING and current.adopted:
            formed = f"{passed(current, course.workers)} of {_workers(len(current.members))}"
            what = f"Generation {current.number}: {formed} passed torch.distributed.init_process_group."
    return JobCondition("Training", "False", phase, what)


def _complete(course: Course) -> Iterator[JobCondition]:
    """Yield whether all scripts have returned, and what the job still waits for; nothing while it trains."""
    finished, unsaved, phase = course.finished, course.unsaved, course.phase
    if phase == SUCCEEDED and course.complete is not None:
        yield JobCondition("Complete", "True", course.complete.reason, course.complete.message)
    elif phase == SUCCEEDED:
        members, number = (finished.members, finished.generation) if finished is not None else ((), 0)
        if finished is None and course.current is not None:
            members, number = course.current.members, course.current.number
        and_roles = f", and all pods of {course.roles} have succeeded" if course.roles else ""
        what = f"The script has returned in all {_workers(len(members))} of generation {number}{and_roles}."
        yield JobCondition("Complete", "True", "FinishedUnsaved" if unsaved else "Finished", _joined(what, unsaved))
    elif finished is not None and phase != FAILED:
        reason = FINISHING if finished.open else WAITING_FOR_ROLES
        what = f"The script has returned in all {_workers(len(finished.members))} of generation {finished.generation}. "
        what += f"The job waits for {course.roles}."
        if finished.open:
            what = finishing_words(finished, runs=phase == FINISHING)
        yield _bounded("Complete", "False", reason, _joined(what, _lost_node_words(finished, course.workers), unsaved))


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def finishing_words(finished: Finished, *, runs: bool) -> str:
    """Return in how many members the script still runs, since when, and in which workers; where none `runs`, that it will."""
    of = f"{len(finished.open)} of {_workers(len(finished.members))}"
    where = f"worker{'' if len(finished.open) == 1 else 's'} {format_members(finished.open)}"
    begun = "Some scripts have returned"
    if finished.step:
        begun = f"All steps of generation {finished.generation} are committed"
    if not runs:
        return f"{begun}. The script has not returned in {of} ({where}). It runs again there once the job is resumed."
    return f"{begun}. The script still runs in {of} ({where}), since {finished.at}."


def _lost_node_words(finished: Finished, workers: Sequence[Worker]) -> str:
    """Return which pod on a node that does not answer is waited for, and what a person does; empty: none is."""
    lost = (w.pod for w in workers if w.id in finished.open and w.standing == Standing.LOST and w.pod is not None)
    pod = next((pod for pod in lost if pod.alive and not pod.node_ready), None)
    if pod is None:
        return ""
    return (
        f"Node {pod.node} of worker {pod.id} does not answer, and the script may still run there, so it runs nowhere else "
        "while the pod exists. If the node comes back, do nothing. If it is off, remove the pod, and the script runs again in "
        f"another one: kubectl delete pod --force --namespace={pod.namespace} {pod.name}"
    )


def _degraded(course: Course) -> JobCondition:
    """Return whether the job trains with less than it wants. Before it has trained at all there is nothing to compare."""
    phase, replicas = course.phase, course.replicas
    if phase in AT_REST:
        reason = "Ended" if phase in (SUCCEEDED, FAILED) else phase
        return JobCondition("Degraded", "False", reason, AT_REST_WORDS[phase])
    if course.crash:
        return JobCondition("Degraded", "True", "Crashing", course.crash)
    if course.ignored:
        return _bounded("Degraded", "True", "FailuresIgnored", course.ignored)
    if course.hang:  # also of a script that has not said anything since its start
        return _bounded("Degraded", "True", "NoProgress", course.hang)
    if phase in (PENDING, STARTING):
        return JobCondition("Degraded", "False", "NotStarted", "Training has not begun.")
    if phase == RUNNING and course.leaving:
        return _bounded("Degraded", "True", "Leaving", course.leaving)
    _, count = _trains(course.current)
    if phase == RUNNING and course.refused_size:
        words = f"{min(count, replicas)} of {replicas} workers train." if count < replicas else ""
        return _bounded("Degraded", "True", SIZE_REFUSED, _joined(course.refused_size, words, course.memory))
    if phase == RUNNING and count < replicas:
        reason = "OOMKilled" if course.memory else WAITING_FOR_CHECKPOINT if course.growth else "FewerMembers"
        words = _joined(f"{count} of {replicas} workers train.", course.memory, course.growth or course.spares)
        return JobCondition("Degraded", "True", reason, words)
    silent = sum(w.is_member and w.standing == Standing.SILENT for w in course.workers)
    if silent:
        return JobCondition("Degraded", "True", "SilentWorkers", f"{silent} of {replicas} agents cannot be reached.")
    if phase != RUNNING:
        words = f"0 of {replicas} workers train; see condition Training."
        return JobCondition("Degraded", "True", "NotTraining", words)
    return JobCondition("Degraded", "False", "AsWanted", f"{min(count, replicas)} of {replicas} workers train.")


def summary(
    *, phase: str, refused: str | None, ready: int, replicas: int, progress: Progress | None, samples: Samples | None
) -> Summary:
    """Return the texts of kubectl's columns. A job whose workers have finished has none that could be ready or not."""
    progress = progress or Progress()
    step, total, loss, rate = progress.step, progress.total_steps, progress.loss, progress.samples_per_second
    shown = "" if phase in (FINISHING, COMPLETING, SUCCEEDED, FAILED) else f"{ready}/{replicas}"
    eta = ""
    if phase == RUNNING and rate and step and total and samples is not None and samples.committed:
        eta = duration(samples.committed / step * max(0, total - step) / rate)
    elif phase == RUNNING and progress.remaining_seconds is not None:
        eta = duration(progress.remaining_seconds)
    counted = "" if progress.optimizer_steps is None else f"+{progress.optimizer_steps}"
    share = min(100, 100 * step // total) if step is not None and total else None
    if progress.percent is not None:
        share = int(progress.percent)
    return Summary(
        state=refused or phase,
        ready=shown,
        step=counted if step is None else f"{step}",
        progress="" if share is None else f"{share}%",
        loss="" if loss is None else f"{loss:.4g}",
        eta=eta,
    )


def duration(seconds: float) -> str:
    """Return a length of time as kubectl writes it: 45s, 12m, 3h5m, 2d4h."""
    whole = round(seconds)
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size}{unit}" + (f"{rest}{small_unit}" if rest else "")
    return f"{whole}s"


def _trains(current: Current | None) -> tuple[int, int]:
    """Return number and members of the generation that trains while the job is Running. Until all members have adopted a planned
    generation, that is the one before."""
    if current is None:
        return 0, 0
    if current.adopted or current.kind != PLANNED or not current.older:
        return current.number, len(current.members)
    begun = {entry.generation for entry in current.lineage}
    before = max(current.older, key=lambda older: (older.number in begun, older.number))
    return before.number, len(before.pod_uids)


def _workers(count: int) -> str:
    return f"{count} worker" + ("" if count == 1 else "s")


def _bounded(type_: str, status: str, reason: str, message: str) -> JobCondition:
    """Return a condition whose message quotes others, at a length that a person reads."""
    return JobCondition(type_, status, reason, shorten(message, MAX_QUOTED))
