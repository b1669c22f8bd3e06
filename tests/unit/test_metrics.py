"""What is counted, and what the ops port answers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
import yaml
from prometheus_client import CollectorRegistry

from regroup.protocol.wire import Fault, Report
from regroup_operator import metrics as ops
from regroup_operator.api import parse_job
from regroup_operator.api.status import State
from regroup_operator.endpoint.sessions import apply_report
from regroup_operator.job_metrics import PHASES
from regroup_operator.model.worker import CAUSES
from tests.builders.jobs import stored_job
from tests.builders.plan import make_job, make_status
from tests.simulator.cluster import KEY
from tests.simulator.world import World

ROOT = Path(__file__).resolve().parents[2]
LITERALS = set(re.findall(r'(?:cause=|why=|LOST, [a-z_]+, |BROKEN, since, |or |return )"([A-Z]\w+)"',
                          (ROOT / "operator/regroup_operator/plan/facts/standing.py").read_text())) | set(
    re.findall(r'cause="(\w+)"', "".join(p.read_text() for p in (ROOT / "operator/regroup_operator/plan").rglob("*.py")))
)  # fmt: skip
"""The causes that stand in the source."""
AT = "2025-11-21T13:00:00Z"


def incident(generation: int, **fields: Any) -> dict[str, Any]:
    return {"generation": generation, "at": AT, "decision": "went on with 2", "cause": "ProcessExited", **fields}


def write(
    metrics: ops.Metrics,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    before_restarts: dict[str, Any] | None = None,
    **status: Any,
) -> None:
    metrics.status_written(
        make_status({"incidents": before, "restarts": before_restarts}), make_status({"incidents": after, **status})
    )


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def test_incident_is_counted_once_and_its_recovery_when_the_first_step_is_known() -> None:
    metrics = ops.Metrics()
    began = incident(2, detectMs=20, persistMs=10)
    ended = {**began, "formMs": 50, "transferMs": 20, "firstStepMs": 100}
    write(metrics, [], [began])
    write(metrics, [began], [began])
    assert value(metrics.registry, "regroup_recovery_seconds_count") == 0
    write(metrics, [began], [ended])
    write(metrics, [ended], [ended, incident(3, cause="Resized")])
    assert value(metrics.registry, "regroup_incidents_total", cause="ProcessExited") == 1
    assert value(metrics.registry, "regroup_incidents_total", cause="Resized") == 1
    assert value(metrics.registry, "regroup_recovery_seconds_count") == 1
    assert abs(value(metrics.registry, "regroup_recovery_seconds_sum") - 0.2) < 1e-9


@pytest.mark.parametrize("cause", ["Resized", "Drained", "Resumed"])
def test_planned_change_is_no_recovery(cause: str) -> None:
    metrics = ops.Metrics()
    ended = incident(2, cause=cause, persistMs=10, formMs=50, firstStepMs=100)
    write(metrics, [], [ended])
    assert value(metrics.registry, "regroup_incidents_total", cause=cause) == 1
    assert value(metrics.registry, "regroup_recovery_seconds_count") == 0
    assert value(metrics.registry, "regroup_recovery_part_seconds_count", part="form") == 0


def test_recovery_of_a_script_is_counted_once_its_processes_run() -> None:
    metrics = ops.Metrics()
    began = incident(2, detectMs=20, persistMs=10)
    ended = {**began, "startMs": 1970}
    write(metrics, [], [began])
    write(metrics, [began], [ended])
    write(metrics, [ended], [ended])
    assert value(metrics.registry, "regroup_recovery_seconds_count") == 1
    assert abs(value(metrics.registry, "regroup_recovery_seconds_sum") - 2.0) < 1e-9


def test_ops_port_answers_health_readiness_and_metrics() -> None:
    async def scenario() -> None:
        metrics = ops.Metrics()
        metrics.follow(
            queue_depth=lambda: 3,
            connected_agents=lambda: 8,
            out_of_reach=lambda: 21,
            dropped_reports=lambda: 2,
            leading=lambda: True,
        )
        why: list[str | None] = ["The pods have not been listed yet."]
        runner = await ops.serve(metrics, "127.0.0.1", 0, lambda: why[0])
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/readyz") as answer:
                assert (answer.status, (await answer.text()).strip()) == (503, why[0])
            why[0] = None
            for path in ("/readyz", "/healthz"):
                async with session.get(url + path) as answer:
                    assert (answer.status, await answer.text()) == (200, "ok\n")
            async with session.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
        await runner.cleanup()
        for line in (
            "regroup_queue_depth 3.0", "regroup_connected_agents 8.0", "regroup_agents_out_of_reach 21.0",
            "regroup_dropped_reports_total 2.0", "regroup_leader 1.0",
        ):  # fmt: skip
            assert line in lines

    asyncio.run(scenario())


def job_of(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name}, "status": status}


JOBS: list[dict[str, Any]] = [
    job_of("a", phase="Running", goodput={"percent": 90}, progress={"step": 7, "loss": 0.5}, restarts={"total": 2}),
    job_of("b", phase="Recovering", goodput={"percent": 70}, readyReplicas=3, membership={"generation": 4}),
    job_of("c", phase="Succeeded", goodput={"percent": 10}),
    {"metadata": {"namespace": "team", "name": "new"}},
    job_of("theirs", phase="Recovering") | {"spec": {"runPolicy": {"managedBy": "example.com/another"}}},
]


def test_jobs_by_phase_and_their_goodput_are_read_when_somebody_asks() -> None:
    jobs, metrics = list(JOBS), ops.Metrics()
    metrics.follow_jobs(lambda: jobs, per_job=False)
    assert {p: value(metrics.registry, "regroup_jobs", phase=p) for p in ("Running", "Recovering", "Pending", "Failed")} == {
        "Running": 1, "Recovering": 1, "Pending": 1, "Failed": 0,
    }  # fmt: skip
    assert value(metrics.registry, "regroup_goodput_ratio") == 0.8, "of running jobs"
    assert metrics.registry.get_sample_value("regroup_job_step", {"namespace": "team", "job": "a"}) is None
    jobs.clear()
    assert value(metrics.registry, "regroup_jobs", phase="Running") == 0
    assert metrics.registry.get_sample_value("regroup_goodput_ratio") is None


def test_every_phase_has_a_series() -> None:
    assert set(PHASES) == set(get_args(State))


def test_series_of_a_job_go_with_it() -> None:
    jobs, metrics = list(JOBS), ops.Metrics()
    metrics.follow_jobs(lambda: jobs, per_job=True)
    of_a = {"namespace": "team", "job": "a"}
    names = ("step", "loss", "restarts", "goodput_ratio")
    assert [value(metrics.registry, f"regroup_job_{name}", **of_a) for name in names] == [7, 0.5, 2, 0.9]
    assert value(metrics.registry, "regroup_job_generation", namespace="team", job="b") == 4
    del jobs[0]
    assert metrics.registry.get_sample_value("regroup_job_step", of_a) is None


def test_job_that_does_not_run_has_no_throughput() -> None:
    rates = {"a": "Running", "b": "Suspended", "c": "Succeeded"}
    jobs = [job_of(name, phase=phase, progress={"step": 7, "samplesPerSecond": 9.5}) for name, phase in rates.items()]
    metrics = ops.Metrics()
    metrics.follow_jobs(lambda: [*jobs, job_of("new")], per_job=True)
    found = {
        name: metrics.registry.get_sample_value("regroup_job_samples_per_second", {"namespace": "team", "job": name})
        for name in (*rates, "new")
    }
    assert found == {"a": 9.5, "b": 0.0, "c": 0.0, "new": None}


def test_what_is_wrong_with_jobs_beside_their_training_is_counted() -> None:
    def says(kind: str, status: str, reason: str) -> dict[str, Any]:
        return {"conditions": [{"type": kind, "status": status, "reason": reason}]}

    jobs = [
        job_of("a", phase="Running", **says("CheckpointsSaved", "False", "NotSaved")),
        job_of("b", phase="Recovering", **says("CheckpointsSaved", "False", "NotSaved")),
        job_of("c", phase="Pending", **says("Accepted", "False", "InvalidTemplate")),
        job_of("d", phase="Running", **says("SnapshotsTaken", "True", "Taken")),
        job_of("e", phase="Failed", **says("CheckpointsSaved", "False", "NotSaved")),
        job_of("f", phase="Running", **says("PodsReady", "False", "Starting")),
        job_of("g", phase="Suspended", **says("CheckpointsSaved", "False", "NotSaved")),
    ]
    metrics = ops.Metrics()
    metrics.follow_jobs(lambda: jobs, per_job=False)
    (family,) = (f for f in metrics.registry.collect() if f.name == "regroup_jobs_in_trouble")
    assert {tuple(sample.labels.values()): sample.value for sample in family.samples} == {
        ("CheckpointsSaved", "NotSaved"): 2.0,
        ("Accepted", "InvalidTemplate"): 1.0,
    }


WORDS = [f"text of an agent, number {number}" for number in range(50)]


def test_labels_come_from_closed_sets_whatever_a_status_says() -> None:
    """Prometheus keeps a series for each value: by agents' words, or a status that was edited, there would be no end of them."""
    metrics = ops.Metrics()
    jobs = [
        stored_job(
            status={
                "phase": word,
                "conditions": [{"type": "Accepted", "status": "False", "reason": word, "message": word}],
            }
        )
        for word in WORDS
    ]
    metrics.follow_jobs(lambda: jobs, per_job=False)
    for number, word in enumerate(WORDS, 1):
        write(metrics, [], [incident(number, cause=word)], restarts={"causes": {word: 1}})
    labels = {
        (metric.name, label, text)
        for metric in metrics.registry.collect() for sample in metric.samples for label, text in sample.labels.items()
    }  # fmt: skip
    assert [found for found in labels if found[2] in WORDS] == []
    assert value(metrics.registry, "regroup_incidents_total", cause="Unknown") == 50


def test_reason_of_an_agent_is_no_cause_unless_it_is_a_word_of_ours(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3).elastic(1, 3), known_session=True)
    world.advance(3.0, step_every_s=0.5)
    assert world.operator is not None
    uid = parse_job(world.store.read()).uid
    for number, (reason, kept) in enumerate([("OOMKilled", "OOMKilled"), ("whatever it likes", None)], start=1):
        pod = world.pods.list(KEY, uid)[0]
        session = world.operator.registry.sessions([pod])[pod.uid]
        fault = Fault("exit", "gone", exit_code=1, local_rank=0, reason=reason, ended=number, generation=1)
        report = Report(uid, pod.uid, session.boot, session.condition, session.seal, session.store_port, fault)
        after = apply_report(session, report, world.now_s)
        assert after is not None
        assert after.fault is not None
        assert (after.fault.reason, after.exits[-1].reason) == (kept, kept or "")


@pytest.mark.parametrize("standing", sorted(LITERALS))
def test_cause_that_the_plan_writes_is_one_of_the_causes(standing: str) -> None:
    assert standing in CAUSES


def test_write_without_an_answer_is_counted_once_it_is_known(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), known_session=True, total_steps=1_000_000, backs_off=True)
    world.advance(5.0, step_every_s=0.5)
    assert world.operator is not None
    metrics = world.operator.controller._observer = ops.Metrics()
    world.store.loses_answers = True
    world.after(3.0, lambda: setattr(world.store, "is_down", False))
    world.kill_process(world.uid(0))
    world.until(lambda: world.training() == "0-0,1-0" and world.generation > 1, 60.0, step_every_s=0.5)
    assert value(metrics.registry, "regroup_incidents_total", cause="ProcessExited") == 1
    assert value(metrics.registry, "regroup_restarts_total", kind="process", cause="Signal") == 1


def test_parts_of_a_recovery_and_restarts_are_counted_once() -> None:
    metrics = ops.Metrics()
    ended = incident(2, detectMs=20, persistMs=10, formMs=50, firstStepMs=100)
    first = {"total": 3, "causes": {"Signal": 2, "Deleted": 1}}
    write(metrics, [], [ended], restarts=first)
    second = {"total": 5, "causes": {"Signal": 2, "OOMKilled": 1, "Deleted": 1, "PodFailed": 1}}
    write(metrics, [ended], [ended], before_restarts=first, restarts=second)
    parts = ("detect", "form", "firstStep", "transfer")
    assert [value(metrics.registry, "regroup_recovery_part_seconds_count", part=part) for part in parts] == [1, 1, 1, 0]
    assert abs(value(metrics.registry, "regroup_recovery_part_seconds_sum", part="form") - 0.05) < 1e-9
    counted = {("process", "Signal"): 2, ("process", "OOMKilled"): 1, ("pod", "Deleted"): 1, ("pod", "PodFailed"): 1}
    for (kind, cause), count in counted.items():
        assert value(metrics.registry, "regroup_restarts_total", kind=kind, cause=cause) == count


def names_in(metrics: ops.Metrics) -> set[str]:
    """Every family, as Prometheus names it."""
    metrics.follow(
        queue_depth=lambda: 0,
        connected_agents=lambda: 0,
        out_of_reach=lambda: 0,
        dropped_reports=lambda: 0,
        leading=lambda: False,
    )
    metrics.follow_jobs(lambda: JOBS, per_job=True)
    counters = {family.name: "_total" if family.type == "counter" else "" for family in metrics.registry.collect()}
    return {name + end for name, end in counters.items()}


def test_page_on_metrics_has_each_metric_and_no_other() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    assert set(re.findall(r"^\| `(regroup_\w+)`", text, re.MULTILINE)) == names_in(ops.Metrics())


def test_every_alert_asks_for_metrics_that_exist_and_has_a_section_in_the_runbook() -> None:
    rules = (ROOT / "helm/regroup/templates/monitoring.yaml").read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    assert len(alerts) >= 8
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"regroup_\w+", rules)}
    assert asked <= names_in(ops.Metrics())
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs/how-to/runbook.md").read_text(), re.MULTILINE)
    assert sections == alerts
    assert re.findall(r'"regroup.runbook" \(list \. "(\w+)"\)', rules) == [alert.lower() for alert in alerts]


def test_alerts_name_phases_that_exist_and_each_phase_of_a_job_in_trouble() -> None:
    rules = (ROOT / "helm/regroup/templates/monitoring.yaml").read_text()
    asked = set(re.findall(r'phase="(\w+)"', rules))
    assert {"Recovering", "Waiting"} <= asked <= set(PHASES)


def test_alerts_link_to_the_published_runbook() -> None:
    helper = (ROOT / "helm/regroup/templates/_helpers.tpl").read_text().split('define "regroup.runbook"')[1]
    assert re.search(
        r'with .*\.Values\.metrics\.rules\.runbookURL \}\}\nrunbook_url: \{\{ printf "%s#%s" \. \$section', helper
    )


def test_labels_of_a_jobs_series_are_not_overwritten_when_they_are_scraped() -> None:
    """Prometheus itself puts labels `namespace` and `job` on what it scrapes: those of the operator."""
    text = (ROOT / "helm/regroup/templates/monitoring.yaml").read_text()
    text = re.sub(r"\{\{.*?\}\}", "x", re.sub(r"(?m)^\s*\{\{.*\}\}\n", "", text))
    (monitor,) = (d for d in yaml.safe_load_all(text) if d["kind"] == "ServiceMonitor")
    assert [endpoint.get("honorLabels") for endpoint in monitor["spec"]["endpoints"]] == [True]
