"""Make the conditions, the phase and the columns from what is. Pure; the words that people read are all here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Group
from regroup.protocol.text import shorten
from regroup_operator.api.conditions import AGENTS_CONNECTED, PODS_READY
from regroup_operator.api.members import format_members
from regroup_operator.model.plan import JobCondition, Verdict
from regroup_operator.model.records import Settings
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
HELD_BACK = "HeldBack"
"""Reason of PodsReady=False: pods are missing that are made later, by spec.elasticPolicy."""
INIT_FAILED = "InitContainerFailed"
"""Reason of PodsReady=False."""
NOT_SET_UP = "NotSetUp"
"""Reason of PodsReady=False (plan/facts/set_up.py)."""
PASSING = ("Starting", "Connecting")
"""Reasons of PodsReady=False and AgentsConnected=False of pods on their way."""
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
) -> str:
    """Return status.phase. `trained`: a generation has adopted before; `ended`: one of AT_REST, None: it wants to train;
    `stalled`: steps are overdue, which is the fault of the worker that cannot be reached, if there is one, and else the script's
    own affair; `group`: whether a script's processes have formed theirs (script_group.py), None for a session."""
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
    silent = any(w.standing == Standing.SILENT and not w.expected for w in members)
    if broken or (stalled and silent):
        return RECOVERING
    if group == Group.WAITING:
        # Each generation starts a script's processes anew: a planned one, too, ends those that trained.
        later = any(entry.generation < current.number for entry in current.lineage)
        return RECOVERING if later and current.kind != PLANNED else STARTING
    if current.adopted or current.kind == "planned":
        return RUNNING
    return RECOVERING


def worker_conditions(
    *,
    workers: Sequence[Worker],
    replicas: int,
    ended: str | None,
    now_s: float,
    settings: Settings,
    endpoint: str,
    refusals: Mapping[str, str],
    spares: int = 0,
    held: str = "",
    failing: Verdict | None = None,
) -> list[JobCondition]:
    """Return PodsReady and AgentsConnected. `ended`: one of AT_REST, None: the job wants its pods; `refusals`: why agents
    were turned away, by pod UID; `held`: why pods are missing that are not made now; `failing`: why pods fail before they run."""
    if ended:
        reason = "Ended" if ended in (SUCCEEDED, FAILED) else ended
        return [JobCondition(kind, "False", reason, AT_REST_WORDS[ended]) for kind in (PODS_READY, AGENTS_CONNECTED)]
    usable = [w for w in workers if w.pod is not None and w.pod.usable]
    pods = [w.pod for w in usable if w.pod]
    stuck = next(
        (p for p in pods if p.waiting_reason and p.waiting_reason not in ("ContainerCreating", "PodInitializing")), None
    )
    failed_init = next((p for p in pods if p.init_failed and p.phase == "Pending"), None)
    unset = next((f"{p.name}: {words}" for p in pods if (words := not_set_up(p, now_s))), "")
    # A pod whose containers crash again and again has the phase Running, too.
    running = [
        w.pod
        for w in usable
        if w.pod and w.pod.phase == "Running" and not w.pod.waiting_reason and (w.pod.node_ready or w.connected)
    ]
    running_uids = {p.uid for p in running}
    unplaced = next((p for p in pods if p.unschedulable), None)
    num_running = len({p.slot for p in running})  # of a slot with two pods one is enough
    counts = f"{min(num_running, replicas)} of {replicas} worker pods run"
    if spares:
        counts += f", {min(max(0, num_running - replicas), spares)} of {spares} spares"
    if num_running >= replicas:
        out = [JobCondition("PodsReady", "True", "AllRunning", f"{counts}.")]
    elif failed_init is not None:
        what = f"init container {failed_init.init_failed} has ended with exit code {failed_init.init_exit_code}"
        out = [JobCondition("PodsReady", "False", INIT_FAILED, f"{counts}; {failed_init.name}: {what}.")]
    elif stuck is not None:
        message = f": {stuck.waiting_message}" if stuck.waiting_message else ""
        out = [_bounded("PodsReady", "False", stuck.waiting_reason, f"{counts}; {stuck.name} cannot start{message}")]
    elif unset:
        out = [JobCondition("PodsReady", "False", NOT_SET_UP, f"{counts}; {unset}")]
    elif unplaced is not None:
        out = [_bounded("PodsReady", "False", "Unschedulable", f"{counts}; {unplaced.name}: {unplaced.unschedulable}")]
    elif failing is not None:
        out = [_bounded("PodsReady", "False", failing.reason, f"{counts}; {failing.message}.")]
    elif held and len(running) == len(pods):
        out = [_bounded("PodsReady", "False", HELD_BACK, f"{counts}; {held}.")]
    else:
        out = [JobCondition("PodsReady", "False", "Starting", f"{counts}.")]
    late = [
        w
        for w in workers
        if w.session is None
        and w.pod is not None
        and w.pod.uid in running_uids
        and w.pod.running_since_s is not None
        and now_s >= w.pod.running_since_s + settings.hello_timeout_s
    ]
    # A member that has not called since the operator's start is on its way: nothing is said of it yet.
    connected = sum(w.connected or w.expected for w in workers)
    refused = [refusals[p.uid] for p in pods if p.uid in refusals]
    if refused:
        verb = "was" if len(refused) == 1 else "were"
        what = f"{len(refused)} of {replicas} agents {verb} rejected: {refused[0]}"
        out.append(JobCondition("AgentsConnected", "False", "Refused", what))
    elif late:
        verb = "has" if len(late) == 1 else "have"
        out.append(
            JobCondition(
                "AgentsConnected",
                "False",
                "NoHello",
                f"{len(late)} of {replicas} agents {verb} not connected to {endpoint} for {settings.hello_timeout_s:.0f} s. "
                "Check egress NetworkPolicy, DNS and service mesh.",
            )
        )
    elif connected >= replicas:
        out.append(
            JobCondition("AgentsConnected", "True", "AllConnected", f"{replicas} of {replicas} agents are connected.")
        )
    else:
        out.append(
            JobCondition("AgentsConnected", "False", "Connecting", f"{connected} of {replicas} agents are connected.")
        )
    return out


def training_conditions(
    *,
    phase: str,
    decision: Decision | None,
    current: Current | None,
    replicas: int,
    workers: Sequence[Worker],
    failure: Verdict | None,
    complete: Verdict | None = None,
    finished: Finished | None = None,
    note: str = "",
    group: str | None = None,
    crash: str = "",
    hang: str = "",
    leaving: str = "",
    spares: str = "",
    memory: str = "",
    unsaved: str = "",
    ignored: str = "",
    roles: str = "",
) -> list[JobCondition]:
    """Return Training, Degraded, and Complete or Failed once the job has ended. `complete`: what Complete says already;
    `finished`: who has finished, in a generation that may be the one before the newest; `note`: what
    a refusal said; `group`: as in phase_of; `crash`: what is said of a crash that repeats; `hang`: what is known of a step
    that is overdue; `leaving`: who is asked to leave and still needed; `spares`: who is ready and in no whole group; `memory`:
    which missing worker was killed for lack of it; `unsaved`: why the last checkpoint is missing; `ignored`: what is said of
    failures that recovery.onExit ignores; `roles`: which are required for completion, and while the job waits for them, how far
    they are."""
    out: list[JobCondition] = []
    number, count = (
        _trains(current) if phase == RUNNING else (current.number, len(current.members)) if current else (0, 0)
    )
    if phase == RUNNING and group == Group.UNOBSERVED:
        out.append(
            JobCondition(
                "Training",
                "True",
                "Unobserved",
                f"The processes of generation {number} run on {_workers(count)}. They have not called "
                "torch.distributed.init_process_group where Regroup can see it, so it is not known whether they train.",
            )
        )
    elif phase in AT_REST:
        out.append(JobCondition("Training", "False", phase, AT_REST_WORDS[phase]))
    elif phase == RUNNING:
        out.append(JobCondition("Training", "True", "Running", f"Generation {number} trains with {_workers(count)}."))
    elif group == Group.WAITING and current is not None and current.adopted and not isinstance(decision, Wait):
        formed = passed(current, workers)
        what = f"{formed} of {_workers(count)} passed torch.distributed.init_process_group."
        out.append(JobCondition("Training", "False", phase, f"Generation {number}: {what}"))
    elif isinstance(decision, Wait):
        out.append(JobCondition("Training", "False", decision.reason, " ".join(filter(None, [decision.message, note]))))
    else:
        out.append(
            JobCondition(
                "Training", "False", phase, f"Generation {number}: {phase.lower()}." if number else "No generation yet."
            )
        )
    if crash and phase not in AT_REST:
        out.append(JobCondition("Degraded", "True", "Crashing", crash))
    elif ignored and phase not in AT_REST:
        out.append(_bounded("Degraded", "True", "FailuresIgnored", ignored))
    else:
        out.append(_degraded(phase, current, replicas, workers, hang, leaving, spares, memory))
    if phase == SUCCEEDED and complete is not None:
        out.append(JobCondition("Complete", "True", complete.reason, complete.message))
    elif phase == SUCCEEDED:
        if finished is not None:
            number, count = finished.generation, len(finished.members)
        reason = "FinishedUnsaved" if unsaved else "Finished"
        and_roles = f", and all pods of {roles} have succeeded" if roles else ""
        what = f"The script has returned in all {_workers(count)} of generation {number}{and_roles}."
        out.append(JobCondition("Complete", "True", reason, " ".join(filter(None, [what, unsaved]))))
    elif finished is not None and finished.open and phase != FAILED:
        words = finishing_words(finished, runs=phase == FINISHING)
        what = " ".join(filter(None, [words, _lost_node_words(finished, workers), unsaved]))
        out.append(_bounded("Complete", "False", FINISHING, what))
    elif finished is not None and phase != FAILED:
        what = f"The script has returned in all {_workers(len(finished.members))} of generation {finished.generation}."
        what = f"{what} The job waits for {roles}."
        out.append(_bounded("Complete", "False", WAITING_FOR_ROLES, " ".join(filter(None, [what, unsaved]))))
    if phase == FAILED:
        failure = failure or Verdict("Failed", "The job failed.")
        out.append(JobCondition("Failed", "True", failure.reason, failure.message))
    return out


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


def _degraded(
    phase: str,
    current: Current | None,
    replicas: int,
    workers: Sequence[Worker],
    hang: str,
    leaving: str,
    spares: str,
    memory: str,
) -> JobCondition:
    """Return whether the job trains with less than it wants. Before it has trained at all there is nothing to compare."""
    if phase in AT_REST:
        return JobCondition(
            "Degraded", "False", "Ended" if phase in (SUCCEEDED, FAILED) else phase, AT_REST_WORDS[phase]
        )
    if phase in (PENDING, STARTING):
        return JobCondition("Degraded", "False", "NotStarted", "Training has not begun.")
    if hang:
        return _bounded("Degraded", "True", "NoProgress", hang)
    if phase == RUNNING and leaving:
        return _bounded("Degraded", "True", "Leaving", leaving)
    _, count = _trains(current)
    if phase == RUNNING and count < replicas:
        reason = "OOMKilled" if memory else "FewerMembers"
        return JobCondition(
            "Degraded",
            "True",
            reason,
            " ".join(filter(None, [f"{count} of {replicas} workers train.", memory, spares])),
        )
    silent = sum(w.is_member and w.standing == Standing.SILENT for w in workers)
    if silent:
        return JobCondition("Degraded", "True", "SilentWorkers", f"{silent} of {replicas} agents cannot be reached.")
    if phase != RUNNING:
        return JobCondition(
            "Degraded", "True", "NotTraining", f"0 of {replicas} workers train; see condition Training."
        )
    return JobCondition("Degraded", "False", "AsWanted", f"{min(count, replicas)} of {replicas} workers train.")


def summary(
    *, phase: str, refused: str | None, ready: int, replicas: int, progress: dict[str, Any], samples: dict[str, Any]
) -> dict[str, str]:
    """Return the texts of kubectl's columns. A job whose workers have finished has none that could be ready or not."""
    step, total, loss = progress.get("step"), progress.get("totalSteps"), progress.get("loss")
    shown = "" if phase in (FINISHING, COMPLETING, SUCCEEDED, FAILED) else f"{ready}/{replicas}"
    out = {"state": refused or phase, "ready": shown, "progress": "", "loss": "", "eta": ""}
    if step is not None and total:
        out["progress"] = f"{100 * step // total}%"
    if loss is not None:
        out["loss"] = f"{loss:.4g}"
    rate, done = progress.get("samplesPerSecond"), samples.get("committed")
    if phase == RUNNING and rate and step and total and done:
        out["eta"] = duration(done / step * max(0, total - step) / rate)
    return out


def duration(seconds: float) -> str:
    """Return a length of time as kubectl writes it: 45s, 12m, 3h5m, 2d4h."""
    whole = round(seconds)
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size}{unit}" + (f"{rest}{small_unit}" if rest else "")
    return f"{whole}s"


def _trains(current: Current | None) -> tuple[int, int]:
    """Return number and members of the generation that trains while the job is Running: until all members have adopted a
    planned one, that is the one before."""
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
