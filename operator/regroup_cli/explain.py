"""The texts of `list` and `status`, the same for jobs of a cluster and of this machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from regroup_client.views import JobView, counted

HEAD = ("NAME", "STATE", "READY", "GENERATION", "STEP", "LOSS", "ETA", "RESTARTS", "LAST INCIDENT")
MAX_INCIDENT = 60
SHOWN_INCIDENTS = 5
"""Incidents in the text of `status`, the newest ones."""


def table(views: Iterable[JobView], *, namespaces: bool = False, directories: bool = False) -> str:
    """Return one line for each job, by name.

    With `namespaces` each line begins with the namespace, and with `directories` it ends with the directory of a local job.
    """
    begin, end = (("NAMESPACE",) if namespaces else ()), (("DIRECTORY",) if directories else ())
    rows = [(*begin, *HEAD, *end)]
    for view in sorted(views, key=lambda one: (one.namespace, one.name, one.directory)):
        row = (
            view.name,
            view.state,
            view.ready or "-",
            "-" if view.generation is None else str(view.generation),
            view.steps or "-",
            view.loss or "-",
            view.eta or "-",
            str(view.restarts),
            _shortened(view.incidents[-1].decision if view.incidents else "-"),
        )
        rows.append((*((view.namespace,) if namespaces else ()), *row, *((view.directory,) if directories else ())))
    if len(rows) == 1:
        return "There are no training jobs."
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def status(view: JobView) -> str:
    """Return what is known of one job: the sentences of `why`, numbers, workers with their ranks, and the newest incidents."""
    numbers = {
        "Step": view.steps,
        "Loss": view.loss,
        "ETA": view.eta,
        "Samples/s": "" if view.samples_per_second is None else f"{view.samples_per_second:g}",
        "Step time": view.step_time,
        "Goodput": "" if view.goodput_percent is None else f"{view.goodput_percent:g}%",
        "Workers": f"{view.ready} ready" if view.ready else "",
        "Generation": "" if view.generation is None else f"{view.generation} ({counted(view.ranks or 0, 'rank')})",
        "Restarts": str(view.restarts),
        "Checkpoint": view.checkpoint,
        "Exit code": "" if view.exit_code is None else str(view.exit_code),
        "Seen": view.observed_at,
        "Directory": view.directory,
    }
    lines = [*view.why, "", *(f"{name + ':':<12}{value}" for name, value in numbers.items() if value)]
    if view.workers:
        rows = [("SLOT", "RANKS", "POD", "PHASE", "NODE")]
        for one in view.workers:
            rows.append((str(one.slot), _ranks(one.ranks), one.pod, one.phase or "-", one.node or "-"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += ["", *("   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)]
    if view.incidents:
        lines += ["", "Incidents:", *(f"  {i.at}  {i.cause}: {i.decision}" for i in view.incidents[-SHOWN_INCIDENTS:])]
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _shortened(text: str) -> str:
    text = text.splitlines()[0] if text else text
    return text if len(text) <= MAX_INCIDENT else text[: MAX_INCIDENT - 1] + "…"
