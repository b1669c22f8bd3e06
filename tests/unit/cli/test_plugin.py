"""`kubectl regroup`: the command itself, over a kubectl whose proxy records what it is asked and answers what a cluster would."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from regroup_cli import entry, explain, logs, plugin
from regroup_cli.streams import CLOSED, INTERRUPTED, TERMINATED
from regroup_client import cluster_jobs, log_streams, views

RUNNING: dict[str, Any] = {
    "metadata": {"name": "digits", "namespace": "team-a"},
    "status": {
        "summary": {
            "state": "Running",
            "ready": "3/3",
            "step": "400",
            "loss": "0.123",
            "eta": "12m",
            "progress": "40%",
        },
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
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"phase": "Running", **status},
    }


# --- the words -----------------------------------------------------------------------------------------------------


def test_table_has_a_line_for_each_job_by_name() -> None:
    young = {"metadata": {"name": "alpha", "namespace": "team-b"}}
    head, first, second = explain.table(map(views.job_view, [young, RUNNING]), namespaces=True).splitlines()
    assert head.split()[:3] == ["NAMESPACE", "NAME", "STATE"]
    assert first.split()[:9] == ["team-a", "digits", "Running", "3/3", "4", "400/1000", "0.123", "12m", "2"]
    assert first.endswith("grew to 3 workers")
    assert second.split() == ["team-b", "alpha", "AwaitingOperator", "-", "-", "-", "-", "-", "0", "-"]
    assert explain.table([]) == "There are no training jobs."


def test_line_of_a_job_that_trains() -> None:
    assert views.line(RUNNING) == "Running  3/3 ready  generation 4 (6 ranks)  step 400/1000  loss 0.123  ETA 12m"
    alone = job(membership={"generation": 1, "worldSize": 1, "members": "0"}, summary={"state": "Running"}, progress={})
    assert views.line(alone) == "Running  generation 1 (1 rank)"
    assert views.line({"metadata": {"name": "x"}}) == "AwaitingOperator"


def test_news_are_told_once() -> None:
    assert views.news(RUNNING, 3) == (["Generation 4: Resized: grew to 3 workers"], 4)
    assert views.news(RUNNING, 4) == ([], 4)


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
        pytest.param(job(incidents=[], tier="Script"), [pod("a")], [],
                     ["digits is Running. The program runs as it is (tier Script)", "Nothing is wrong"], id="a program as it is"),
        pytest.param(job(incidents=[], tier="Session"), [pod("a")], [],
                     ["digits is Running. The program has a session (tier Session)", "Nothing is wrong"], id="a session"),
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
        pytest.param(job(conditions=[condition("Complete", "False", "Finishing", "The script still runs in 1 of 2 workers."),
                                     condition("PodsReady", "False", "Finishing", "See Complete.")], incidents=[],
                         summary={"state": "Finishing"}), [], [],
                     ["digits is Finishing.", "Finishing: The script still runs in 1 of 2 workers."], id="where its script runs"),
        pytest.param({"metadata": {"name": "digits"}, "status": {"summary": {"state": "AwaitingOperator"}}}, [], [],
                     ["No operator has looked at digits yet."], id="no operator"),
    ],
)  # fmt: skip
def test_why(given: dict[str, Any], pods: list[dict[str, Any]], events: list[dict[str, Any]], says: list[str]) -> None:
    got = views.why(given, pods, events)
    assert [line[: len(start)] for line, start in zip(got, says, strict=True)] == says


# --- the command ---------------------------------------------------------------------------------------------------

FAKE = Path(__file__).parents[1] / "client" / "fake_kubectl.py"
PATHS = {"jobs": "/apis/regroup.dev/v1alpha1/namespaces/{}/distributedtrainingjobs", "pods": "/api/v1/namespaces/{}/pods",
         "events": "/api/v1/namespaces/{}/events"}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a kubectl on the PATH, its answers, and what its proxy was asked."""
    shutil.copy(FAKE, tmp_path / "kubectl")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answers(tmp_path, {})
    return tmp_path


def answers(cluster: Path, given: Mapping[str, Any], namespace: str = "team-a") -> None:
    """Have the API server answer with these: "GET jobs/digits" -> an object (status 200), a text, or [status, text]."""
    found: dict[str, Any] = {"namespace": "team-a"}
    for asked, answer in given.items():
        verb, _, place = asked.partition(" ")
        kind, _, name = place.partition("/")
        path = PATHS[kind].format(namespace) + (f"/{name}" if name else "")
        is_ready = isinstance(answer, list)
        found[f"{verb} {path}"] = (
            answer if is_ready else [200, answer if isinstance(answer, str) else json.dumps(answer)]
        )
    (cluster / "answers.json").write_text(json.dumps(found))


def asked(cluster: Path) -> list[tuple[str, str, str]]:
    """Return verb, path and body of each request."""
    lines = (json.loads(line) for line in (cluster / "asked").read_text().splitlines())
    return [(verb, path, body) for verb, path, _, body in lines]


def items(*found: Any) -> dict[str, Any]:
    return {"items": list(found)}


def refused(status: int, reason: str, message: str) -> list[Any]:
    return [status, json.dumps({"reason": reason, "message": message})]


def test_list_asks_the_users_own_cluster(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everywhere = {
        "namespace": "x",
        "GET /apis/regroup.dev/v1alpha1/distributedtrainingjobs": [200, json.dumps(items(RUNNING))],
    }
    (cluster / "answers.json").write_text(json.dumps(everywhere))
    assert plugin.main(["list", "-A", "--context", "prod"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("team-a")
    assert "--context=prod" in (cluster / "words").read_text()


@pytest.mark.parametrize("argv", [["-n", "team-b", "why", "digits"], ["why", "digits", "-n", "team-b"]], ids=" ".join)
def test_why_reads_job_pods_and_events_of_the_namespace(
    cluster: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    found = {"GET pods": items(pod("a")), "GET events": items(*EVENTS), "GET jobs/digits": RUNNING}
    answers(cluster, found, namespace="team-b")
    assert plugin.main(argv) == 0
    assert capsys.readouterr().out.splitlines()[0] == "digits is Running."
    assert [path.split("/")[-1].split("?")[0] for _, path, _ in asked(cluster)] == ["digits", "pods", "events"]


def stream(*events: tuple[str, Any]) -> str:
    """Return what the API server sends of a watch."""
    return "".join(json.dumps({"type": kind, "object": one}) + "\n" for kind, one in events)


def test_watch_tells_each_change_and_ends_with_the_job(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = {"generation": 5, "at": "x", "cause": "PodDeleted", "decision": "went on with 2 workers"}
    recovering = job(summary={"state": "Recovering", "ready": "2/3"}, incidents=[*RUNNING["status"]["incidents"], lost])
    ended = job(summary={"state": "Succeeded", "ready": ""}, incidents=recovering["status"]["incidents"])
    changes = (("ADDED", RUNNING), ("MODIFIED", RUNNING), ("MODIFIED", recovering), ("MODIFIED", ended))
    answers(cluster, {"GET jobs/digits": RUNNING, "WATCH jobs": stream(*changes)})
    assert plugin.main(["watch", "digits"]) == 0
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "Running",
        "Generation 5: PodDeleted: went on with 2 workers",
        "Recovering",
        "Succeeded",
    ]


@pytest.mark.parametrize(
    "found",
    [
        pytest.param({"GET jobs/digits": RUNNING, "WATCH jobs": stream(("DELETED", RUNNING))}, id="while it is watched"),
        pytest.param({"GET jobs/digits": [[200, json.dumps(RUNNING)], refused(404, "NotFound", "it was deleted")],
                      "WATCH jobs": ""}, id="between two watches"),
    ],
)  # fmt: skip
def test_watch_of_a_job_that_is_deleted_ends(
    cluster: Path, capsys: pytest.CaptureFixture[str], found: dict[str, Any]
) -> None:
    answers(cluster, found)
    assert plugin.main(["watch", "digits"]) == 1
    assert "was deleted" in capsys.readouterr().err


BROKEN = [0, ""]
"""An API server that gives no answer."""


def test_watch_outlives_a_connection_that_breaks(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster_jobs, "RETRY_S", 0.01)
    looks = [[200, json.dumps(RUNNING)], BROKEN, [200, json.dumps(RUNNING)]]
    watches = [[200, stream(("ADDED", RUNNING))], BROKEN, [200, stream(("ADDED", job(summary={"state": "Succeeded"})))]]
    answers(cluster, {"GET jobs/digits": looks, "WATCH jobs": watches})
    assert plugin.main(["watch", "digits"]) == 0
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == ["Running", "Succeeded"]


@pytest.mark.parametrize(
    ("then", "code", "sentence"),
    [
        pytest.param(BROKEN, plugin.UNREACHABLE, "gave no answer", id="out of reach"),
        pytest.param(refused(404, "NotFound", '"digits" not found'), 1, '"digits" not found', id="deleted"),
    ],
)
@pytest.mark.parametrize("argv", [["watch", "digits"], ["logs", "digits", "-f"]], ids=lambda argv: argv[0])
def test_command_that_follows_gives_up_with_a_code_of_its_own(
    cluster: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    then: list[Any],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.setattr(cluster_jobs, "RETRY_S", 0.01)
    monkeypatch.setattr(log_streams, "PATIENCE_S", 0.1)
    monkeypatch.setattr(logs.show, "__defaults__", (0.02,))
    looks = [[200, json.dumps(RUNNING)], then]
    answers(cluster, {"GET jobs/digits": looks, "WATCH jobs": BROKEN, "GET pods": items()})
    assert plugin.main(argv) == code
    assert sentence in capsys.readouterr().err


def test_failed_job_ends_the_watch_with_a_code_of_its_own(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"GET jobs/digits": job(summary={"state": "Failed"})})
    assert plugin.main(["watch", "digits"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "place", "change", "says"),
    [
        pytest.param(["scale", "digits", "5"], "jobs/digits/scale", {"replicas": 5}, "5 workers wanted", id="scale"),
        pytest.param(["scale", "digits", "1"], "jobs/digits/scale", {"replicas": 1}, "1 worker wanted", id="scale to one"),
        pytest.param(["suspend", "digits"], "jobs/digits", {"runPolicy": {"suspend": True}}, "suspend is asked for",
                     id="suspend"),
        pytest.param(["resume", "digits"], "jobs/digits", {"runPolicy": {"suspend": False}}, "resume is asked for",
                     id="resume"),
    ],
)  # fmt: skip
def test_changes_are_merge_patches(
    cluster: Path, capsys: pytest.CaptureFixture[str], argv: list[str], place: str, change: dict[str, Any], says: str
) -> None:
    answers(cluster, {"GET jobs/digits": RUNNING, f"PATCH {place}": {}})
    assert plugin.main(argv) == 0
    assert json.loads(asked(cluster)[-1][2]) == {"spec": change}
    assert capsys.readouterr().out == f"regroup: {says}\n"


@pytest.mark.parametrize("verb", ["scale", "suspend", "resume"])
def test_job_that_has_ended_is_not_changed(cluster: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    answers(cluster, {"GET jobs/digits": job(summary={"state": "Failed"})})
    assert plugin.main([verb, "digits", *(["3"] if verb == "scale" else [])]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kubectl regroup: The job digits has ended (Failed): it cannot be")
    assert said.count("\n") == 1
    assert [verb for verb, _, _ in asked(cluster)] == ["GET"]


def test_delete_waits_until_the_job_is_gone_and_leaves_another_of_its_name(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = ({**RUNNING, "metadata": {**RUNNING["metadata"], "uid": uid}} for uid in ("1", "2"))
    looks = [[200, json.dumps(found)] for found in (one, one, other)]
    answers(cluster, {"GET jobs/digits": looks, "DELETE jobs/digits": {}})
    assert plugin.main(["delete", "digits"]) == 0
    assert capsys.readouterr().out == "regroup: digits was deleted; its checkpoints stay\n"
    assert [json.loads(body)["preconditions"] for verb, _, body in asked(cluster) if verb == "DELETE"] == [{"uid": "1"}]


@pytest.mark.parametrize(
    ("argv", "query"),
    [
        pytest.param([], {"tailLines": "20"}, id="logs of all"),
        pytest.param(["--slot", "1", "--previous"], {"previous": "true"}, id="before its restart"),
        pytest.param(
            ["--since", "1m30s", "--tail", "5"], {"tailLines": "5", "sinceSeconds": "90"}, id="the newest lines"
        ),
        pytest.param(["--all-attempts"], {}, id="all"),
    ],
)
def test_what_kubelets_are_asked_for(cluster: Path, argv: list[str], query: dict[str, str]) -> None:
    found = {f"GET pods/digits-worker-1-{attempt}/log": "" for attempt in range(2)}
    pods = items(pod("digits-worker-1-0", 1), pod("digits-worker-1-1", 1))
    answers(cluster, {**found, "GET pods": pods, "GET jobs/digits": RUNNING})
    assert plugin.main(["logs", "digits", *argv]) == 0
    wanted = [path.partition("?") for _, path, _ in asked(cluster) if "/log?" in path]
    assert {path.split("/")[-2] for path, _, _ in wanted} == {
        f"digits-worker-1-{attempt}" for attempt in ([0, 1] if "--all-attempts" in argv else [1])
    }
    assert all(dict(parse_qsl(one)) == {"timestamps": "true", "container": "trainer", **query} for _, _, one in wanted)


def test_what_the_cluster_refuses_is_its_own_sentence(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"GET jobs/x": refused(404, "NotFound", 'trainingjobs "x" not found')})
    assert plugin.main(["why", "x"]) == 1
    assert capsys.readouterr().err == 'kubectl regroup: trainingjobs "x" not found\n'


def log_lines(*texts: str, second: int = 0) -> str:
    """Return what a kubelet has of a log, a line each second."""
    return "".join(f"2026-01-01T10:00:{second + n:02}.000000000Z {text}\n" for n, text in enumerate(texts))


def test_logs_of_all_workers_come_by_time_and_say_whose_they_are(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(
        cluster,
        {
            "GET pods": items(pod("digits-worker-0-0", 0), pod("digits-worker-2-0", 2)),
            "GET jobs/digits": RUNNING,
            "GET pods/digits-worker-0-0/log": log_lines(
                "[rank 1] begins", "[rank 0] step 1\r[rank 0] step 2", second=1
            ),
            "GET pods/digits-worker-2-0/log": log_lines(
                "regroup: Connected.", "\x1b[31m[rank 4]\x1b[0m odd \x1b]0;title\x07end"
            ),
        },
    )
    assert plugin.main(["logs", "digits", "--timestamps"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "10:00:00.000 [2] regroup: Connected.",
        "10:00:01.000 [0.1] begins",
        "10:00:01.000 [2] [rank 4] odd end",
        "10:00:02.000 [0.0] step 2",
    ]
    assert plugin.main(["logs", "digits", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "[0.0] step 2\n"
    assert plugin.main(["logs", "digits", "--grep", "^beg"]) == 0
    assert capsys.readouterr().out == "[0.1] begins\n"


def test_logs_that_no_kubelet_has_are_one_sentence(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = refused(400, "BadRequest", "previous terminated container not found")
    pods = items(pod("digits-worker-0-0", 0))
    answers(cluster, {"GET pods": pods, "GET jobs/digits": RUNNING, "GET pods/digits-worker-0-0/log": gone})
    assert plugin.main(["logs", "digits", "--previous"]) == 1
    assert capsys.readouterr().err == "kubectl regroup: previous terminated container not found\n"


def test_rank_that_there_is_not_is_refused(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"GET pods": items(), "GET jobs/digits": RUNNING})
    assert plugin.main(["logs", "digits", "--rank", "6"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "kubectl regroup: Rank 6 is not in the newest generation, whose ranks are 0 to 5. Give one of them, or use --slot N.\n"
    )


def test_more_logs_than_can_be_followed_at_once_are_refused(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pods = [pod(f"digits-worker-{slot}-0", slot) for slot in range(log_streams.MAX_STREAMS + 1)]
    answers(cluster, {"GET pods": items(*pods), "GET jobs/digits": RUNNING})
    assert plugin.main(["logs", "digits", "--follow"]) == 1
    assert (
        "has 51 pods, and at most 50 logs can be followed at once. Use --slot N or --rank N." in capsys.readouterr().err
    )


def test_followed_logs_end_with_the_job(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = job(summary={"state": "Succeeded"})
    pods = [pod("digits-worker-0-0", 0, phase="Succeeded")]
    found = {"GET pods": items(*pods), "GET jobs/digits": ended, "GET pods/digits-worker-0-0/log": log_lines("the end")}
    answers(cluster, found)
    assert plugin.main(["logs", "digits", "-f"]) == 0
    assert capsys.readouterr().out == "[0] the end\n"


def test_local_command_without_its_packages_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "regroup_cli.__main__", raising=False)
    monkeypatch.setitem(sys.modules, "regroup_operator.api", None)
    assert entry.main() == 2
    assert capsys.readouterr().err.startswith(
        "regroup: the package regroup_operator.api is missing. Install regroup-training"
    )


ASKS = [["list"], ["watch", "digits"], ["logs", "digits"], ["why", "digits"]]
"""Each way of starting kubectl."""


@pytest.mark.parametrize("argv", ASKS, ids=lambda argv: argv[0])
def test_machine_without_kubectl_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert plugin.main(argv) == 1
    said = capsys.readouterr().err
    assert said == "kubectl regroup: kubectl is not on the PATH. Install it, or correct the PATH.\n"


@pytest.mark.parametrize("argv", ASKS, ids=lambda argv: argv[0])
def test_kubectl_that_is_no_program_is_one_sentence(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(cluster))
    (cluster / "kubectl").write_bytes(b"\x7fELF, of another machine")
    assert plugin.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("kubectl regroup: kubectl cannot be started (Exec format error).")
    assert said.count("\n") == 1


@pytest.mark.parametrize("argv", [["list"], ["watch", "digits"], ["why", "digits"]], ids=lambda argv: argv[0])
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("<html>log in first</html>", id="a proxy's page"),
        pytest.param("[]", id="no object"),
        pytest.param("{" * 100_000 + "}\n", id="much of it"),
    ],
)
def test_answer_that_is_no_json_is_one_sentence(
    cluster: Path, capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    answers(cluster, {"GET jobs": text, "GET jobs/digits": text})
    assert plugin.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("kubectl regroup: The API server did not send JSON, but: ")
    assert said.count("\n") == 1
    assert len(said) < 300


# --- what it reads from and writes to ------------------------------------------------------------------------------

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
KUBECTL, LOCAL = "kubectl-regroup", "regroup"


def started(command: str, *arguments: str, **given: Any) -> subprocess.Popen[str]:
    """Start a command as the script that is installed does: it calls the function that pyproject.toml names."""
    module, function = PROJECT["scripts"][command].split(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    given = {"preexec_fn": _hear_interrupts} | given
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, **given)


def _hear_interrupts() -> None:
    """Where the tests run in the background of a shell, they and their children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished(command: str, *arguments: str, **given: Any) -> tuple[int, str]:
    """Return the exit code and what was written to stderr."""
    with started(command, *arguments, **given) as process:
        assert process.stderr is not None
        said = process.stderr.read()
    return process.returncode, said


@pytest.fixture
def local_job(tmp_path: Path) -> Path:
    """A directory with a file as `regroup status` reads it."""
    metadata = {"name": "local", "resourceVersion": "1", "generation": 1}
    (tmp_path / "job.json").write_text(json.dumps({"metadata": metadata, "spec": {}, "status": {}}))
    return tmp_path


AT_THE_END, WHILE_IT_PRINTS = "", "1"
"""PYTHONUNBUFFERED: when it is found that nobody reads."""


@pytest.mark.parametrize(
    ("command", "arguments", "unbuffered"),
    [
        pytest.param(KUBECTL, ["list"], AT_THE_END, id="list"),
        pytest.param(KUBECTL, ["list"], WHILE_IT_PRINTS, id="list, while it prints"),
        pytest.param(KUBECTL, ["watch", "digits"], AT_THE_END, id="watch"),
        pytest.param(KUBECTL, ["--help"], AT_THE_END, id="help"),
        pytest.param(LOCAL, ["status", "{}"], AT_THE_END, id="status"),
        pytest.param(LOCAL, ["status", "{}"], WHILE_IT_PRINTS, id="status, while it prints"),
        pytest.param(LOCAL, ["checkpoint", "list", "{}"], AT_THE_END, id="checkpoint list"),
        pytest.param(LOCAL, ["run", "--help"], AT_THE_END, id="help on local jobs"),
    ],
)
def test_pipe_that_nobody_reads_is_no_error(
    cluster: Path, local_job: Path, command: str, arguments: list[str], unbuffered: str
) -> None:
    """`kubectl regroup list | head -1`."""
    answers(cluster, {"GET jobs/digits": RUNNING, "WATCH jobs": stream(("ADDED", RUNNING)), "GET jobs": items(RUNNING)})
    reading, writing = os.pipe()
    os.close(reading)
    given = [argument.format(local_job) for argument in arguments]
    ended = finished(command, *given, stdout=writing, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    assert ended == (CLOSED, "")


def test_first_line_arrives_where_the_reader_wants_no_more(cluster: Path) -> None:
    answers(cluster, {"GET jobs": items(*(job(f"job-{number:05}") for number in range(5000)))})
    with started(KUBECTL, "list", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("NAME")
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (CLOSED, "")


def test_user_may_end_a_watch(cluster: Path) -> None:
    answers(cluster, {"GET jobs/digits": RUNNING, "WATCH jobs": [None, stream(("ADDED", RUNNING))]})
    with started(KUBECTL, "watch", "digits", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert "Running" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (INTERRUPTED, "")


def test_watch_that_is_terminated_shows_the_cursor_again_and_ends_its_kubectl(cluster: Path) -> None:
    answers(cluster, {"GET jobs/digits": RUNNING, "WATCH jobs": [None, stream(("ADDED", RUNNING))]})
    ours, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    shown = b""
    with started(KUBECTL, "watch", "digits", stdout=terminal, env=environment) as process:
        os.close(terminal)
        while b"Running" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    with contextlib.suppress(OSError):  # Linux says EIO at the end of a terminal
        while data := os.read(ours, 4096):
            shown += data
    os.close(ours)
    assert (process.returncode, said) == (TERMINATED, "")
    assert shown.endswith(b"\x1b[?25h")
    with pytest.raises(ProcessLookupError):
        os.kill(int((cluster / "pid").read_text()), 0)


@pytest.mark.parametrize("command", ["replay", "train"])
def test_user_may_end_what_works_long(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "file")
    with started(LOCAL, command, str(tmp_path / "file")) as process:
        with (tmp_path / "file").open("w"):  # it has begun to read
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
    assert (process.returncode, said) == (INTERRUPTED, "")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [pytest.param(KUBECTL, ["list"], id="list"), pytest.param(LOCAL, ["status", "{}"], id="status")],
)
def test_full_disk_is_one_sentence(cluster: Path, local_job: Path, command: str, arguments: list[str]) -> None:
    answers(cluster, {"GET jobs": items(RUNNING)})
    with open("/dev/full", "w") as full:
        code, said = finished(command, *(argument.format(local_job) for argument in arguments), stdout=full)
    assert code == 2
    assert said.endswith("It cannot write any more (No space left on device). Make room, or write elsewhere.\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "arguments", "closed"),
    [
        pytest.param(KUBECTL, ["list"], 1, id="list without stdout"),
        pytest.param(KUBECTL, ["scale", "digits", "5"], 1, id="scale without stdout"),
        pytest.param(LOCAL, ["status", "{}"], 0, id="status without stdin"),
        pytest.param(LOCAL, ["run", "true"], 2, id="run without stderr"),
    ],
)
def test_stream_that_was_closed_before_the_start_is_not_missed(
    cluster: Path, local_job: Path, command: str, arguments: list[str], closed: int
) -> None:
    answers(cluster, {"GET jobs": items(), "GET jobs/digits": RUNNING, "PATCH jobs/digits/scale": {}})
    assert finished(
        command,
        *(argument.format(local_job) for argument in arguments),
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.close(closed),
    ) == (0, "")


def test_letter_that_the_terminal_does_not_have_is_written_as_its_number(cluster: Path) -> None:
    answers(cluster, {"GET jobs": items(job("digits", summary={"state": "Läuft"}))})
    with started(KUBECTL, "list", stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"}) as process:
        shown, said = process.communicate()
    assert (process.returncode, said) == (0, "")
    assert "L\\xe4uft" in shown


@pytest.mark.parametrize("package", ["jinja2", "aiohttp"])
def test_the_page_says_which_package_is_missing(package: str) -> None:
    """`kubectl regroup` alone is installed without packages."""
    script = f"""if True:
        import sys
        sys.modules[{package!r}] = None
        from regroup_cli import plugin
        from regroup_client.errors import JobError
        try:
            plugin._page(None, plugin.parser().parse_args(["ui"]))
        except JobError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (
        done.stdout
        == f"The page needs the package {package}, which is missing. Install regroup-training with the extra cli.\n"
    )
