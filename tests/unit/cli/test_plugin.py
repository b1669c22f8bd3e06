"""`kubectl regroup`: the command itself, over a kubectl that records what it is asked and answers what a cluster would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from regroup_cli import entry, explain, plugin

RUNNING: dict[str, Any] = {
    "metadata": {"name": "digits", "namespace": "team-a"},
    "status": {
        "summary": {"state": "Running", "ready": "3/3", "loss": "0.123", "eta": "12m", "progress": "40%"},
        "membership": {"generation": 4, "worldSize": 6, "members": "0-2"},
        "progress": {"step": 400, "totalSteps": 1000},
        "restarts": {"total": 2},
        "incidents": [
            {
                "generation": 3,
                "at": "2026-01-01T10:00:00Z",
                "cause": "ProcessExited",
                "decision": "went on with 2 workers",
            },
            {
                "generation": 4,
                "at": "2026-01-01T10:00:09Z",
                "cause": "Resized",
                "decision": "grew to 3 workers",
                "formMs": 61.5,
            },
        ],
        "conditions": [
            {"type": "Accepted", "status": "True", "reason": "Valid", "message": "The job can run as written."},
            {"type": "PodsReady", "status": "True", "reason": "AllRunning", "message": "3 of 3 worker pods run."},
            {
                "type": "Training",
                "status": "True",
                "reason": "Running",
                "message": "Generation 4 trains with 3 workers.",
            },
            {"type": "Degraded", "status": "False", "reason": "AsWanted", "message": "3 of 3 workers train."},
            {"type": "SnapshotsTaken", "status": "Unknown", "reason": "NoneYet", "message": "None yet."},
        ],
    },
}


def job(name: str = "digits", **changes: Any) -> dict[str, Any]:
    """Return the running job with other fields of its status."""
    return {"metadata": {"name": name, "namespace": "team-a"}, "status": {**RUNNING["status"], **changes}}


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pod(name: str, slot: int = 0, at: str = "2026-01-01T10:00:00Z", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"regroup.dev/slot": str(slot)}, "creationTimestamp": at}
    return {"metadata": metadata, "status": {"phase": "Running", **status}}


# --- the words -----------------------------------------------------------------------------------------------------


def test_table_has_a_line_for_each_job_by_name() -> None:
    young = {"metadata": {"name": "alpha", "namespace": "team-b"}}
    head, first, second = explain.table([young, RUNNING], namespaces=True).splitlines()
    assert head.split()[:3] == ["NAMESPACE", "NAME", "STATE"]
    assert first.split()[:9] == ["team-a", "digits", "Running", "3/3", "4", "400/1000", "0.123", "12m", "2"]
    assert first.endswith("grew to 3 workers")
    assert second.split() == ["team-b", "alpha", "AwaitingOperator", "-", "-", "-", "-", "-", "0", "-"]
    assert explain.table([]) == "There are no training jobs."


def test_line_of_a_job_that_trains() -> None:
    assert explain.line(RUNNING) == "Running  3/3 ready  generation 4 (6 ranks)  step 400/1000  loss 0.123  ETA 12m"
    assert explain.line({"metadata": {"name": "x"}}) == "AwaitingOperator"


def test_news_are_told_once() -> None:
    assert explain.news(RUNNING, 3) == (["Generation 4: Resized: grew to 3 workers"], 4)
    assert explain.news(RUNNING, 4) == ([], 4)


NOT_READY = condition("PodsReady", "False", "Unschedulable", "2 of 3 worker pods run; digits-worker-2-0: no node.")
PULLING = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
UNPLACED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available."}
IGNORED = {
    "generation": 3,
    "at": "2026-01-01T10:00:09Z",
    "decision": "worker 1 lost a process.",
    "rule": "spec.recovery.onExit[0] (Ignore, signals SIGTERM)",
}
EVENTS = [
    {
        "type": "Warning",
        "eventTime": "2026-01-01T10:00:02Z",
        "reason": "ProcessExited",
        "note": "Generation 3: went on.",
    },
    {"type": "Normal", "eventTime": "2026-01-01T10:00:03Z", "reason": "Resized", "note": "Generation 4: grew."},
]


@pytest.mark.parametrize(
    ("given", "pods", "events", "says"),
    [
        pytest.param(job(incidents=[]), [pod("a")], [], ["digits is Running.", "Nothing is wrong: Running  3/3"], id="well"),
        pytest.param(job(conditions=[NOT_READY], incidents=[]), [], [],
                     ["digits is Running.", "PodsReady is False (Unschedulable): 2 of 3"],
                     id="a condition that is not as it should be"),
        pytest.param(job(incidents=[]), [pod("a", phase="Pending", conditions=[UNPLACED])], [],
                     ["digits is", "Pod a is not scheduled: 0/3 nodes"], id="a pod without a node"),
        pytest.param(job(incidents=[]), [pod("a", phase="Pending", containerStatuses=[PULLING])], [],
                     ["digits is", "Pod a, container trainer: ImagePullBackOff: not found"], id="a pod without its image"),
        pytest.param(job(incidents=[]), [pod("a", phase="Failed", reason="Evicted", message="Too little memory.")], [],
                     ["digits is", "Pod a failed: Evicted. Too little memory."], id="a pod that failed"),
        pytest.param(RUNNING, [], EVENTS,
                     ["digits is", "Last incident, 2026-01-01T10:00:09Z: grew to 3 workers (formed in 62 ms)",
                      "Event, 2026-01-01T10:00:02Z: ProcessExited: Generation 3"], id="what has happened"),
        pytest.param(job(incidents=[IGNORED]), [], [],
                     ["digits is", "Last incident, 2026-01-01T10:00:09Z: worker 1 lost a process. Matched spec.recovery.onExit[0]"],
                     id="a failure that a rule matched"),
        pytest.param(job(conditions=[condition("Failed", "True", "TooManyRestarts", "11 failures."), NOT_READY], incidents=[],
                         summary={"state": "Failed"}), [], [],
                     ["digits is Failed.", "TooManyRestarts: 11 failures."], id="its end"),
        pytest.param(job(conditions=[condition("Complete", "False", "WaitingForRoles", "All finished; role eval."),
                                     condition("PodsReady", "False", "Completing", "See Complete.")], incidents=[],
                         summary={"state": "Completing"}), [], [],
                     ["digits is Completing.", "WaitingForRoles: All finished; role eval."], id="what it still waits for"),
        pytest.param({"metadata": {"name": "digits"}, "status": {"summary": {"state": "AwaitingOperator"}}}, [], [],
                     ["No operator has looked at digits yet."], id="no operator"),
    ],
)  # fmt: skip
def test_why(given: dict[str, Any], pods: list[dict[str, Any]], events: list[dict[str, Any]], says: list[str]) -> None:
    got = explain.why(given, pods, events)
    assert [line[: len(start)] for line, start in zip(got, says, strict=True)] == says


def test_newest_pod_of_a_slot() -> None:
    pods = [pod("a-0", 1), pod("a-1", 1, "2026-01-01T11:00:00Z"), pod("b", 2, "2026-01-01T12:00:00Z")]
    assert (explain.newest_pod(pods, 1), explain.newest_pod(pods, 7)) == ("a-1", None)


# --- the command ---------------------------------------------------------------------------------------------------

FAKE = f"""#!{sys.executable}
import json, os, sys
here = os.environ["FAKE_KUBECTL"]
open(here + "/asked", "a").write(json.dumps(sys.argv[1:]) + "\\n")
for name, (code, out, err) in json.load(open(here + "/answers")).items():
    if name in " ".join(sys.argv[1:]):
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a kubectl on the PATH, its answers, and what it was asked."""
    (tmp_path / "kubectl").write_text(FAKE)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_KUBECTL", str(tmp_path))
    answers(tmp_path, {})
    return tmp_path


def answers(cluster: Path, given: Mapping[str, Any], code: int = 0, error: str = "") -> None:
    """Have kubectl answer with these objects: by a word of what it is asked, the first that fits."""
    texts = {word: found if isinstance(found, str) else json.dumps(found, indent=4) for word, found in given.items()}
    (cluster / "answers").write_text(json.dumps({word: [code, text, error] for word, text in texts.items()}))


def asked(cluster: Path) -> list[list[str]]:
    return [json.loads(line) for line in (cluster / "asked").read_text().splitlines()]


def test_list_asks_the_users_own_cluster(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"distributedtrainingjobs": {"items": [RUNNING]}})
    assert plugin.main(["list", "-A", "--context", "prod"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("team-a")
    assert asked(cluster) == [["get", plugin.RESOURCE, "--all-namespaces", "--output=json", "--context=prod"]]


def test_why_reads_job_pods_and_events(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"get pods": {"items": [pod("a")]}, "get events": {"items": EVENTS}, "trainingjobs": RUNNING})
    assert plugin.main(["why", "digits", "-n", "team-a"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "digits is Running."
    assert [one[1].split(".")[0] for one in asked(cluster)] == ["distributedtrainingjobs", "pods", "events"]
    assert all(one[-1] == "--namespace=team-a" for one in asked(cluster))


def stream(*events: tuple[str, Any], indent: int | None = None) -> str:
    """Return what kubectl prints of a watch."""
    return "".join(json.dumps({"type": kind, "object": one}, indent=indent) + "\n" for kind, one in events)


@pytest.mark.parametrize("indent", [None, 4], ids=["a line each", "over many lines"])
def test_watch_tells_each_change_and_ends_with_the_job(
    cluster: Path, capsys: pytest.CaptureFixture[str], indent: int | None
) -> None:
    lost = {"generation": 5, "at": "x", "cause": "PodDeleted", "decision": "went on with 2 workers"}
    recovering = job(summary={"state": "Recovering", "ready": "2/3"}, incidents=[*RUNNING["status"]["incidents"], lost])
    ended = job(summary={"state": "Succeeded", "ready": ""}, incidents=recovering["status"]["incidents"])
    changes = (("ADDED", RUNNING), ("MODIFIED", RUNNING), ("MODIFIED", recovering), ("MODIFIED", ended))
    answers(cluster, {"--watch": stream(*changes, indent=indent)})
    assert plugin.main(["watch", "digits"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Running",
        "Generation 5: PodDeleted: went on with 2 workers",
        "Recovering",
        "Succeeded",
    ]


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        pytest.param(stream(("DELETED", RUNNING)), "was deleted", id="deleted"),
        pytest.param("", "ended without an answer", id="a watch that says nothing"),
    ],
)
def test_watch_that_has_nothing_more_to_tell_ends(
    cluster: Path, capsys: pytest.CaptureFixture[str], says: str, sentence: str
) -> None:
    answers(cluster, {"--watch": says})
    assert plugin.main(["watch", "digits"]) == 1
    assert sentence in capsys.readouterr().err


def test_failed_job_ends_the_watch_with_a_code_of_its_own(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"--watch": stream(("ADDED", job(summary={"state": "Failed"})))})
    assert plugin.main(["watch", "digits"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "ran"),
    [
        pytest.param(["scale", "digits", "5"], ["scale", plugin.RESOURCE, "digits", "--replicas=5"], id="scale"),
        pytest.param(["suspend", "digits"], ["patch", plugin.RESOURCE, "digits", "--type=merge",
                                             '--patch={"spec": {"runPolicy": {"suspend": true}}}'], id="suspend"),
        pytest.param(["resume", "digits"], ["patch", plugin.RESOURCE, "digits", "--type=merge",
                                            '--patch={"spec": {"runPolicy": {"suspend": false}}}'], id="resume"),
        pytest.param(["logs", "digits", "-f"], ["logs", "--selector=regroup.dev/job-name=digits,regroup.dev/role=worker",
                                               "--container=trainer", "--follow", "--tail=20", "--prefix",
                                               "--max-log-requests=50"], id="logs of all"),
        pytest.param(["logs", "digits", "--slot", "1", "--previous"],
                     ["logs", "b", "--container=trainer", "--previous"], id="log of the newest pod of a slot"),
    ],
)  # fmt: skip
def test_what_kubectl_is_told(cluster: Path, argv: list[str], ran: list[str]) -> None:
    answers(cluster, {"get pods": {"items": [pod("a", 1), pod("b", 1, "2026-02-01T10:00:00Z")]}})
    assert plugin.main(argv) == 0
    assert asked(cluster)[-1] == ran


def test_what_kubectl_refuses_is_its_own_sentence(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"get": ""}, code=1, error='Error from server (NotFound): trainingjobs "x" not found\n')
    assert plugin.main(["why", "x"]) == 1
    assert capsys.readouterr().err == 'kubectl regroup: Error from server (NotFound): trainingjobs "x" not found\n'


def test_previous_log_needs_a_slot(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin.main(["logs", "digits", "--previous"]) == 1
    assert "--slot N" in capsys.readouterr().err
    assert not (cluster / "asked").exists()


def test_more_logs_than_can_be_followed_at_once_are_refused(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"get pods": "\n".join(f"pod/p{slot}" for slot in range(plugin.MAX_LOGS + 1))})
    assert plugin.main(["logs", "digits", "--follow"]) == 1
    assert "has 51 pods, and at most 50 logs can be followed at once. Use --slot N." in capsys.readouterr().err


def test_local_command_without_its_packages_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "regroup_cli.__main__", raising=False)
    monkeypatch.setitem(sys.modules, "regroup_operator.api", None)
    assert entry.main() == 2
    assert capsys.readouterr().err.startswith("regroup: the package regroup_operator.api is missing. Run make venv")


def test_machine_without_kubectl_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert plugin.main(["list"]) == 1
    assert "kubectl is not on the PATH" in capsys.readouterr().err


def test_closed_pipe_is_no_traceback(cluster: Path) -> None:
    answers(cluster, {"distributedtrainingjobs": {"items": [job(f"job-{number:05}") for number in range(5000)]}})
    command = f"{sys.executable} -m regroup_cli.plugin list | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout.split()[0], done.stderr) == ("NAME", "")
