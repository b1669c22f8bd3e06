"""The tables and sentences of `kubectl regroup`, from the objects of the API server. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]
HEAD = ("NAME", "STATE", "READY", "GENERATION", "STEP", "LOSS", "ETA", "RESTARTS", "LAST INCIDENT")
MAX_INCIDENT = 60
NORMAL = {"Accepted": "True", "PodsReady": "True", "AgentsConnected": "True", "Training": "True", "Degraded": "False",
          "CheckpointsSaved": "True", "SnapshotsTaken": "True"}  # fmt: skip
"""Condition -> its status while a job trains well."""
ENDS = ("Complete", "Failed", "Suspended")
TIERS = {
    "Script": "The program runs as it is (tier Script): a change of workers starts all processes again, from its checkpoint.",
    "Session": "The program has a session (tier Session): processes that live on keep their state.",
}
COMPLETING, FINISHING = "Completing", "Finishing"
"""States of a job whose steps are over. Condition Complete names what it waits for: scripts or roles."""
SUCCEEDED, FAILED = "Succeeded", "Failed"


def table(jobs: Iterable[Object], *, namespaces: bool = False) -> str:
    """Return one line for each job, by name. With `namespaces` each line begins with the namespace."""
    rows = [(*(("NAMESPACE",) if namespaces else ()), *HEAD)]
    for job in sorted(jobs, key=lambda one: (one["metadata"].get("namespace", ""), one["metadata"]["name"])):
        status = job.get("status") or {}
        summary, progress = status.get("summary") or {}, status.get("progress") or {}
        newest = (status.get("incidents") or [{}])[-1]
        row = (
            job["metadata"]["name"],
            state(job),
            summary.get("ready") or "-",
            _text((status.get("membership") or {}).get("generation")),
            _steps(summary, progress) or "-",
            summary.get("loss") or "-",
            summary.get("eta") or "-",
            _text((status.get("restarts") or {}).get("total", 0)),
            _shortened(newest.get("decision") or "-"),
        )
        rows.append((*((job["metadata"].get("namespace", ""),) if namespaces else ()), *row))
    if len(rows) == 1:
        return "There are no training jobs."
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def line(job: Object) -> str:
    """Return one line on the progress of a job, for `watch`."""
    status = job.get("status") or {}
    summary, membership, progress = (status.get(name) or {} for name in ("summary", "membership", "progress"))
    parts = [state(job)]
    if summary.get("ready"):
        parts.append(f"{summary['ready']} ready")
    if membership:
        parts.append(f"generation {membership['generation']} ({membership['worldSize']} ranks)")
    if steps := _steps(summary, progress):
        parts.append(steps if steps.endswith("%") else f"step {steps}")
    if summary.get("loss"):
        parts.append(f"loss {summary['loss']}")
    if status.get("goodput"):
        parts.append(f"goodput {status['goodput']['percent']}%")
    if summary.get("eta"):
        parts.append(f"ETA {summary['eta']}")
    return "  ".join(parts)


def news(job: Object, known: int) -> tuple[list[str], int]:
    """Return the decisions of incidents above generation `known`, and the newest generation that has an incident."""
    incidents = [i for i in (job.get("status") or {}).get("incidents", ()) if i["generation"] > known]
    said = [f"Generation {i['generation']}: {i.get('cause') or 'Unknown'}: {i['decision']}" for i in incidents]
    return said, max([known, *(i["generation"] for i in incidents)])


def state(job: Object) -> str:
    """Return the text of kubectl's column State."""
    found: str = ((job.get("status") or {}).get("summary") or {}).get("state") or "AwaitingOperator"
    return found


def why(job: Object, pods: Iterable[Object], events: Iterable[Object]) -> list[str]:
    """Return sentences on why a job is in its state, the most important first."""
    name, now = job["metadata"]["name"], state(job)
    status = job.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    out = [" ".join(filter(None, (f"{name} is {now}.", TIERS.get(status.get("tier", "")))))]
    if "conditions" not in status:
        out = [
            f"No operator has looked at {name} yet. See kubectl -n regroup-system get pods,lease. If an operator leads: do its "
            "watchNamespaces include this namespace, and is spec.runPolicy.managedBy absent?"
        ]
    out += [f"{c['reason']}: {c['message']}" for kind in ENDS if (c := conditions.get(kind)) and c["status"] == "True"]
    if now in (COMPLETING, FINISHING) and "Complete" in conditions:
        out.append(f"{conditions['Complete']['reason']}: {conditions['Complete']['message']}")
    elif not any(kind in conditions and conditions[kind]["status"] == "True" for kind in ENDS):
        for kind, normal in NORMAL.items():
            found = conditions.get(kind)
            if found is not None and found["status"] not in (normal, "Unknown"):
                out.append(f"{kind} is {found['status']} ({found['reason']}): {found['message']}")
    out += [sentence for pod in pods if (sentence := _stuck(pod))]
    newest = (status.get("incidents") or [None])[-1]
    if newest is not None:
        rule = f" Matched {newest['rule']}." if newest.get("rule") else ""
        out.append(f"Last incident, {newest['at']}: {newest['decision']}" + _times(newest) + rule)
    warnings = [e for e in events if e.get("type") == "Warning"]
    newest_events = sorted(warnings, key=_when)[-3:]
    out += [
        f"Event, {_when(event)}: {event.get('reason')}: {event.get('note') or event.get('message')}"
        for event in newest_events
    ]
    if len(out) == 1 and now == "Running":
        out.append("Nothing is wrong: " + line(job) + ".")
    return out


def _stuck(pod: Object) -> str:
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


def _when(event: Object) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("eventTime") or event.get("lastTimestamp") or "")


def _steps(summary: Object, progress: Object) -> str:
    """Return how far a job is: its step, and the number of steps if it is known; else the share of the work, or nothing."""
    step, total = summary.get("step"), progress.get("totalSteps")
    if not step:
        return str(summary.get("progress") or "")
    return f"{step}/{total}" if total else str(step)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_INCIDENT else text[: MAX_INCIDENT - 1] + "…"


def newest_pod(pods: Sequence[Object], slot: int) -> str | None:
    """Return the name of a slot's newest pod."""
    of_slot = [pod["metadata"] for pod in pods if pod["metadata"]["labels"].get("regroup.dev/slot") == str(slot)]
    found = max(of_slot, key=lambda one: (one["creationTimestamp"], one["name"]), default=None)
    return None if found is None else str(found["name"])
