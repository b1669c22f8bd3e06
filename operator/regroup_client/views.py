"""Compute the record that clients show of a job from its object, its pods and its events. Pure.

The commands, the page and the Python client show this record and compute nothing of their own, so they never contradict each
other. It is for people: operator and agents read nothing of it. The objects come from the API server, or from the file of a local
job. A field that is missing is shown as unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import SequenceMatcher
from typing import Any, NamedTuple

Object = Mapping[str, Any]

SUCCEEDED, FAILED = "Succeeded", "Failed"
ENDED = (SUCCEEDED, FAILED)
KILLED = "Killed"
"""State of a local job whose `regroup run` was killed: its workers ended with it."""
OVER = (*ENDED, KILLED)
"""States of a job that trains no more."""
COMPLETING, FINISHING = "Completing", "Finishing"
"""States of a job whose steps are over. Condition Complete names what it waits for: scripts or roles."""
NORMAL = {"Accepted": "True", "PodsReady": "True", "AgentsConnected": "True", "Training": "True", "Degraded": "False",
          "CheckpointsSaved": "True", "SnapshotsTaken": "True"}  # fmt: skip
"""Condition -> its status while a job trains well."""
ENDS = ("Complete", "Failed", "Suspended")
TIERS = {
    "Script": "The program runs as it is (tier Script): a change of workers starts all processes again, from its checkpoint.",
    "Session": "The program has a session (tier Session): processes that live on keep their state.",
}
MAX_WARNINGS = 3
MAX_EVENTS = 50
SAME = 80
"""Length of a common text from which on a sentence is said to repeat another one."""


class Member(NamedTuple):
    """A worker of a generation: `attempt` counts the pods of its slot."""

    slot: int
    attempt: int


@dataclass(frozen=True)
class WorkerView:
    """A worker of the newest generation, or a pod of the job that is in none."""

    slot: int
    """Index of the worker in the job, which its replacements inherit."""
    attempt: int
    """Number of the slot's earlier pods."""
    ranks: tuple[int, ...]
    """Ranks of its processes. Empty if it is in no generation."""
    pod: str
    node: str
    phase: str
    """Phase of the pod, such as Running."""


@dataclass(frozen=True)
class IncidentView:
    """A change of membership."""

    generation: int
    """The generation that the change began."""
    at: str
    """Time, as the API writes it (UTC)."""
    cause: str
    """One word, such as Resized or ProcessExited."""
    decision: str
    """One sentence: what happened, and what the operator decided."""
    milliseconds: Mapping[str, float]
    """Duration of each part of the recovery that is known: detect, decide, persist, form, transfer, firstStep, start."""
    workers_before: int | None = None
    workers: int | None = None
    """Number of workers of the generation."""


@dataclass(frozen=True)
class EventView:
    """An event of the job, as `kubectl get events` has it."""

    at: str
    """Time at which it happened last."""
    type: str
    """Normal or Warning."""
    reason: str
    text: str
    count: int


@dataclass(frozen=True)
class Point:
    """A point of the loss curve."""

    step: int
    """Number of committed steps."""
    seconds: int
    """Seconds since the job's start."""
    loss: float | None


@dataclass(frozen=True)
class JobView:
    """The record that clients show of a job. Empty texts and None stand for what is not known."""

    namespace: str
    name: str
    state: str
    """State of the job, such as Running. The page on states explains each."""
    tier: str
    """Script or Session: whether the program uses the library."""
    ready: str
    """Ready and wanted workers, such as 3/4."""
    replicas: int | None
    """Number of workers wanted."""
    generation: int | None
    """Number of the newest generation, the list of workers that train together."""
    ranks: int | None
    """Number of processes in it."""
    directory: str
    """Directory of a local job."""
    steps: str
    """Progress of the job: step/total, the step alone, or a share of the work."""
    step: str
    """The step. +37 is a number of optimizer steps since the processes started."""
    total_steps: int | None
    percent: str
    """Share of the work that is done, such as 37%."""
    loss: str
    """The loss, rounded."""
    eta: str
    """Estimated time left, such as 1h12m."""
    samples_per_second: float | None
    """Committed samples per second."""
    step_time: str
    """Mean duration of a step, and its largest parts."""
    goodput_percent: float | None
    """Share of the job's time that was spent in steps that stay."""
    restarts: int
    """Number of processes, pods and generations that had to start again."""
    exit_code: int | None
    """Exit code of the process that failed the job."""
    checkpoint: str
    """Directory of the newest checkpoint."""
    started_at: str
    """Time at which the first generation was announced."""
    ended_at: str
    """Time at which the job ended."""
    observed_at: str
    """Time at which the operator wrote this."""
    workers: tuple[WorkerView, ...]
    incidents: tuple[IncidentView, ...]
    """Oldest first."""
    curve: tuple[Point, ...]
    events: tuple[EventView, ...]
    """Oldest first, the newest MAX_EVENTS."""
    why: tuple[str, ...]
    """Sentences on why the job is in its state, the most important first."""

    @property
    def has_ended(self) -> bool:
        """True if the job has succeeded or failed."""
        return self.state in ENDED


def job_view(
    job: Object,
    pods: Sequence[Object] = (),
    events: Sequence[Object] = (),
    *,
    directory: str = "",
    unread: Sequence[str] = (),
) -> JobView:
    """Return the record of a job. `pods` and `events` are those of the job, as far as they were asked for.

    `directory` is that of a local job, which has no pods and keeps no events. `unread` has a sentence for each kind of object that
    could not be read.
    """
    metadata, status = job["metadata"], job.get("status") or {}
    summary, progress, membership = (status.get(name) or {} for name in ("summary", "progress", "membership"))
    return JobView(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        state=state(job),
        tier=status.get("tier") or "",
        ready=summary.get("ready") or "",
        replicas=(job.get("spec") or {}).get("replicas"),
        generation=membership.get("generation"),
        ranks=membership.get("worldSize"),
        directory=directory,
        steps=steps(job),
        step=str(summary.get("step") or ""),
        total_steps=progress.get("totalSteps"),
        percent=summary.get("progress") or "",
        loss=summary.get("loss") or "",
        eta=summary.get("eta") or "",
        samples_per_second=progress.get("samplesPerSecond"),
        step_time=progress.get("stepTime") or "",
        goodput_percent=(status.get("goodput") or {}).get("percent"),
        restarts=(status.get("restarts") or {}).get("total", 0),
        exit_code=status.get("exitCode"),
        checkpoint=(status.get("checkpoint") or {}).get("directory") or "",
        started_at=status.get("startTime") or "",
        ended_at=status.get("completionTime") or "",
        observed_at=status.get("observedAt") or "",
        workers=workers(job, pods),
        incidents=tuple(map(_incident, status.get("incidents") or ())),
        curve=curve(progress),
        events=tuple(map(_event, sorted(events, key=when)[-MAX_EVENTS:])),
        why=(*why(job, pods, events), *unread),
    )


def to_json(view: JobView) -> dict[str, Any]:
    """Return a view as JSON objects, with names as the API spells them. What is not known is left out."""
    found: dict[str, Any] = _plain(dataclasses.asdict(view))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_camel(key): _plain(one) for key, one in value.items() if one is not None and one != ""}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def state(job: Object) -> str:
    """Return the text of kubectl's column State."""
    status = job.get("status") or {}
    found: str = (status.get("summary") or {}).get("state") or status.get("phase") or "AwaitingOperator"
    return found


def condition(job: Object, kind: str) -> str:
    """Return the status of a condition: True, False, Unknown, or an empty text."""
    found = ((job.get("status") or {}).get("conditions")) or ()
    return next((str(one["status"]) for one in found if one["type"] == kind), "")


def trains(job: Object) -> bool:
    """Return whether a generation of the job trains."""
    return condition(job, "Training") == "True"


def members(text: str) -> tuple[Member, ...]:
    """Return the members of status.membership.members, in the order of their ranks.

    "0-3,5.2" are slots 0 to 3, and pod 2 of slot 5.
    """
    out: list[Member] = []
    for part in filter(None, text.split(",")):
        slot, _, attempt = part.partition(".")
        first, _, last = slot.partition("-")
        out += [Member(one, int(attempt or 0)) for one in range(int(first), int(last or first) + 1)]
    return tuple(out)


def ranks(job: Object) -> dict[Member, tuple[int, ...]]:
    """Return the ranks of each member of the newest generation, in the order of the ranks."""
    membership = (job.get("status") or {}).get("membership") or {}
    found = members(membership.get("members") or "")
    each = membership.get("worldSize", 0) // len(found) if found else 0
    return {member: tuple(range(index * each, (index + 1) * each)) for index, member in enumerate(found)}


def workers(job: Object, pods: Sequence[Object]) -> tuple[WorkerView, ...]:
    """Return the workers by slot: the members of the newest generation, and pods that are in none."""
    name, of_member = job["metadata"]["name"], ranks(job)
    by_name = {pod["metadata"]["name"]: pod for pod in pods}
    out = {}
    for member, its_ranks in of_member.items():
        pod_name = f"{name}-worker-{member.slot}-{member.attempt}"
        out[member] = _worker(member, its_ranks, pod_name, by_name.get(pod_name) or {})
    for pod_name, pod in by_name.items():
        slot, attempt = pod_name.removeprefix(f"{name}-worker-").partition("-")[::2]
        if slot.isdigit() and attempt.isdigit() and (member := Member(int(slot), int(attempt))) not in out:
            out[member] = _worker(member, (), pod_name, pod)
    return tuple(out[member] for member in sorted(out))


def _worker(member: Member, its_ranks: tuple[int, ...], pod_name: str, pod: Object) -> WorkerView:
    node = (pod.get("spec") or {}).get("nodeName") or ""
    return WorkerView(*member, its_ranks, pod_name, node, (pod.get("status") or {}).get("phase") or "")


def _incident(one: Object) -> IncidentView:
    known = {key.removesuffix("Ms"): value for key, value in one.items() if key.endswith("Ms") and value is not None}
    at, cause = one.get("at") or "", one.get("cause") or "Unknown"
    return IncidentView(
        one["generation"], at, cause, one["decision"], known, one.get("workersBefore"), one.get("workers")
    )


def _event(one: Object) -> EventView:
    count = (one.get("series") or {}).get("count") or one.get("count") or 1
    return EventView(when(one), one.get("type") or "Normal", one.get("reason") or "", said_by(one), count)


def curve(progress: Object) -> tuple[Point, ...]:
    """Return the loss curve of status.progress."""
    out = []
    for text in progress.get("curve") or ():
        step, seconds, *loss = str(text).split()
        out.append(Point(int(step), int(seconds), float(loss[0]) if loss else None))
    return tuple(out)


def line(job: Object) -> str:
    """Return one line on the progress of a job, for `watch` and `regroup run`."""
    status = job.get("status") or {}
    summary, membership = status.get("summary") or {}, status.get("membership") or {}
    parts = [state(job)]
    if summary.get("ready"):
        parts.append(f"{summary['ready']} ready")
    if membership:
        parts.append(f"generation {membership['generation']} ({counted(membership['worldSize'], 'rank')})")
    if found := steps(job):
        parts.append(found if found.endswith("%") else f"step {found}")
    if summary.get("loss"):
        parts.append(f"loss {summary['loss']}")
    if status.get("goodput"):
        parts.append(f"goodput {status['goodput']['percent']}%")
    if summary.get("eta"):
        parts.append(f"ETA {summary['eta']}")
    return "  ".join(parts)


def steps(job: Object) -> str:
    """Return how far a job is: its step, and the number of steps if it is known; else the share of the work, or nothing."""
    status = job.get("status") or {}
    summary, progress = status.get("summary") or {}, status.get("progress") or {}
    step, total = summary.get("step"), progress.get("totalSteps")
    if not step:
        return str(summary.get("progress") or "")
    return f"{step}/{total}" if total else str(step)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def news(job: Object, known: int) -> tuple[list[str], int]:
    """Return the decisions of incidents above generation `known`, and the newest generation that has an incident."""
    incidents = [i for i in (job.get("status") or {}).get("incidents", ()) if i["generation"] > known]
    said = [f"Generation {i['generation']}: {i.get('cause') or 'Unknown'}: {i['decision']}" for i in incidents]
    return said, max([known, *(i["generation"] for i in incidents)])


def why(job: Object, pods: Iterable[Object], events: Iterable[Object]) -> list[str]:
    """Return sentences on why a job is in its state, the most important first. A text that was said is not said again."""
    name, now = job["metadata"]["name"], state(job)
    status = job.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    out = [" ".join(filter(None, (f"{name} is {now}.", TIERS.get(status.get("tier", "")))))]
    if "conditions" not in status:
        out = [
            f"No operator has looked at {name} yet. See kubectl -n regroup-system get pods,lease. If an operator leads: do its "
            "watchNamespaces include this namespace, and is spec.runPolicy.managedBy absent?"
        ]
    out += _of_conditions(now, conditions)
    out += [sentence for pod in pods if (sentence := stuck(pod))]
    newest = (status.get("incidents") or [None])[-1]
    if newest is not None:
        rule = f" Matched {newest['rule']}." if newest.get("rule") else ""
        out.append(f"Last incident, {newest['at']}: {newest['decision']}" + _times(newest) + rule)
    warnings = sorted((e for e in events if e.get("type") == "Warning" and not _is_solved(e, job)), key=when)
    for event in _latest(warnings)[-MAX_WARNINGS:]:
        if (text := without_repeats(said_by(event), out)) is not None:
            out.append(f"Event, {when(event)}: {event.get('reason')}: {text}")
    if len(out) == 1 and now == "Running":
        out.append("Nothing is wrong: " + line(job) + ".")
    return out


def _of_conditions(now: str, conditions: Mapping[str, Object]) -> list[str]:
    """Return what conditions say: how the job has ended or what its end waits for, else what is not as it should be."""
    out = [f"{c['reason']}: {c['message']}" for kind in ENDS if (c := conditions.get(kind)) and c["status"] == "True"]
    if now in (COMPLETING, FINISHING) and "Complete" in conditions:
        return [*out, f"{conditions['Complete']['reason']}: {conditions['Complete']['message']}"]
    if out:
        return out
    for kind, normal in NORMAL.items():
        found = conditions.get(kind)
        if found is None or found["status"] in (normal, "Unknown"):
            continue
        message = without_repeats(found["message"], out)
        out.append(f"{kind} is {found['status']} ({found['reason']})" + (f": {message}" if message else "."))
    return out


def _is_solved(event: Object, job: Object) -> bool:
    """Return whether what a warning warns of is over.

    A job that has succeeded has no open warning. A job that trains well has only those that came after its conditions became
    well and after its last step was reported. Of a job that fares badly all warnings are kept: nobody can say which are over."""
    status, now = job.get("status") or {}, state(job)
    if now == SUCCEEDED:
        return True
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    known = [(conditions[kind], normal) for kind, normal in NORMAL.items() if kind in conditions]
    if now != "Running" or not known or any(c["status"] not in (normal, "Unknown") for c, normal in known):
        return False
    at = moment(when(event))
    if at is None:
        return True
    since = [moment(c.get("lastTransitionTime") or "") for c, _ in known]
    since.append(moment((status.get("progress") or {}).get("at") or ""))
    return any(one is not None and at <= one for one in since)


def _latest(events: Sequence[Object]) -> list[Object]:
    """Return the events without those that a later one of the same reason and text repeats."""
    found = {(event.get("reason"), said_by(event)): event for event in events}
    return sorted(found.values(), key=when)


def said_by(event: Object) -> str:
    """Return the text of an event."""
    return str(event.get("note") or event.get("message") or "")


def without_repeats(text: str, said: Iterable[str]) -> str | None:
    """Return a text without the part that was said already, such as a traceback. None: nothing else is left of it."""
    for other in said:
        matcher = SequenceMatcher(None, text, other, autojunk=False)
        same = matcher.find_longest_match()
        if same.size == len(text):
            return None
        if same.size < SAME:
            continue
        before, after = text[: same.a].rstrip(), text[same.a + same.size :].strip(" .\n…")
        if not before and not after:
            return None
        text = " ".join(filter(None, (before, "(quoted above)", after)))
    return text


def stuck(pod: Object) -> str:
    """Return why a pod does not run, or "" if it runs or starts."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if status.get("phase") == "Failed":
        return f"Pod {name} failed: {status.get('reason') or 'see its log'}. {status.get('message') or ''}".strip()
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"Pod {name} is not scheduled: {condition.get('message') or condition.get('reason')}"
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            said = waiting.get("message") or "no message"
            return f"Pod {name}, container {container['name']}: {waiting['reason']}: {said}"
    return ""


def _times(incident: Object) -> str:
    """Return the times of the parts of a recovery, as far as they are known."""
    parts = [
        f"{word} {incident[key]:.0f} ms"
        for key, word in (("detectMs", "seen after"), ("formMs", "formed in"), ("transferMs", "state copied in"))
        if incident.get(key) is not None
    ]
    return f" ({', '.join(parts)})" if parts else ""


def when(event: Object) -> str:
    """Return the time at which an event happened last."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("eventTime") or event.get("lastTimestamp") or "")


def moment(text: str) -> datetime | None:
    """Return a time of the API, or None if there is none."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
