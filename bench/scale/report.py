"""From the measurements of `bench.scale` to its JSON file and its tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

ORDER = ("regroup", "regroup_by_ip", "jobset", "jobset_by_ip", "trainer", "job")
COUNTERPART = {"jobset": "regroup", "jobset_by_ip": "regroup_by_ip", "trainer": "regroup", "job": "regroup_by_ip"}
"""Regroup with, or without, names of pods: as the peer has them."""
COMPARED = ("pods_per_s", "requests_per_pod", "cpu_ms_per_pod", "rss_mib")
SCENARIOS = ("large", "steady", "fail_over")


def result(
    measured: Mapping[str, Mapping[int, Mapping[str, Any]]],
    titles: Mapping[str, str],
    changed: Mapping[str, str],
    scenarios: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
    setup: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the JSON file's content; `measured` is by system and number of jobs, as `load.figures` returns it.

    Of each system the largest number of jobs stands at the top, the others are under `fewer`. `growth` is what a value at the
    largest number is times that at the smallest; `ratio` is a peer's value over Regroup's at the same number, with names of pods if
    the peer has them, else without.
    """
    systems: dict[str, Any] = {}
    for name in ORDER:
        if not measured.get(name):
            continue
        sizes = sorted(measured[name])
        most, least = measured[name][sizes[-1]], measured[name][sizes[0]]
        systems[name] = {
            "title": titles[name],
            **most,
            "growth": {key: _over(most[key], least[key]) for key in COMPARED} if len(sizes) > 1 else {},
            "fewer": {str(size): measured[name][size] for size in sizes[:-1]},
            "changed": changed[name],
        }
    for name, one in systems.items():
        ours = systems.get(COUNTERPART.get(name, ""))
        if ours is not None and one["jobs"] == ours["jobs"]:
            one["ratio"] = {key: _over(one[key], ours[key]) for key in COMPARED}
    return {**systems, "scenarios": dict(scenarios), "failed": dict(failed), "setup": dict(setup)}


def tables(found: Mapping[str, Any]) -> Group:
    """Return what is printed."""
    parts: list[Any] = []
    systems = [name for name in ORDER if name in found]
    if systems:
        parts += [_compared(found, systems), _requests(found, systems)]
    if found["scenarios"]:
        parts.append(_scenarios(found["scenarios"]))
    parts += [f"{name} failed: {why}" for name, why in found["failed"].items()]
    return Group(*parts)


def _compared(found: Mapping[str, Any], systems: list[str]) -> Table:
    setup = found["setup"]
    out = Table(title=f"Jobs of {setup['pods_per_job']} pods, created at once, until every pod runs")
    for heading in ("", "jobs", "pods/s", "true, s", "requests", "own", "CPU, ms", "MiB"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name in systems:
        one = found[name]
        for size in [*one["fewer"].values(), one]:
            out.add_row(
                one["title"],
                str(size["jobs"]),
                f"{size['pods_per_s']:.1f}",
                f"{size['status_s']:.1f}",
                f"{size['requests_per_pod']:.2f}",
                f"{size['own_requests_per_pod']:.2f}",
                f"{size['cpu_ms_per_pod']:.1f}",
                f"{size['rss_mib']:.0f}",
            )
    out.caption = (
        "true: seconds until every status says so. Requests and CPU are per pod. requests: all that reach the API server, "
        "scheduler and kubelets included; own: the system's. own and CPU include the Job controller, where there are Jobs. "
        f"{setup['cpus']} cores, load {setup['load_before']:.1f} before and {setup['load_after']:.1f} after"
    )
    return out


def _requests(found: Mapping[str, Any], systems: list[str]) -> Table:
    out = Table(title="The system's own requests a pod, by verb (the 8 most frequent)")
    out.add_column("")
    out.add_column("requests a pod")
    out.add_column("reconcile p50, p99", justify="right")
    for name in systems:
        reconcile = found[name].get("reconcile_ms")
        times = "" if reconcile is None else f"{reconcile['p50']:.1f} ms, {reconcile['p99']:.0f} ms"
        verbs = list(found[name]["own_requests_per_pod_by_verb"].items())[:8]
        out.add_row(found[name]["title"], ", ".join(f"{verb} {count:.2f}" for verb, count in verbs), times)
    return out


def _scenarios(scenarios: Mapping[str, Mapping[str, Any]]) -> Table:
    out = Table(title="Regroup alone")
    for heading in ("", "figure"):
        out.add_column(heading)
    for name in SCENARIOS:
        for key, value in _flat(scenarios.get(name, {})):
            out.add_row(f"{name}: {key}", f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    return out


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return the numbers of a result of nested mappings, without those of single requests and processes."""
    found: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            if not key.startswith(("requests", "refusals", "troubles")):
                found += _flat(value, f"{prefix}{key} ")
        elif isinstance(value, int | float):
            found.append((f"{prefix}{key}", value))
    return found


def _over(value: float, by: float) -> float | None:
    return round(value / by, 2) if by else None
