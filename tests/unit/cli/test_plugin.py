"""`kubectl regroup`: the command itself, over a kubectl that records what it is asked and answers what a cluster would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from regroup_cli import entry, explain, logs, plugin
from regroup_cli.streams import CLOSED, INTERRUPTED, TERMINATED
from regroup_client import log_streams, views

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

FAKE = f"""#!{sys.executable}
import json, os, signal, sys
here = os.environ["FAKE_KUBECTL"]
open(here + "/asked", "a").write(json.dumps(sys.argv[1:]) + "\\n")
for name, (code, out, err) in json.load(open(here + "/answers")).items():
    if name in " ".join(sys.argv[1:]):
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.stdout.flush()
        if code is None:
            signal.pause()
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


def answers(cluster: Path, given: Mapping[str, Any], code: int | None = 0, error: str = "") -> None:
    """Have kubectl answer with these objects: by a word of what it is asked, the first that fits. Code None: it goes on."""
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
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == [
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


REFUSED = "error: The connection to the server was refused\n"


def script(cluster: Path, *runs: tuple[int, str, str]) -> None:
    """Have kubectl answer with the next code, output and error each time it is started, and then always with the last."""
    (cluster / "runs").write_text(json.dumps(runs))
    (cluster / "kubectl").write_text(
        f"#!{sys.executable}\nimport json, os, sys\npath = os.environ['FAKE_KUBECTL'] + '/runs'\n"
        "(code, out, err), *rest = runs = json.load(open(path))\njson.dump(rest or runs, open(path, 'w'))\n"
        "sys.stdout.write(out)\nsys.stderr.write(err)\nsys.exit(code)\n"
    )


def test_watch_outlives_a_connection_that_breaks(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin, "RETRY_S", 0.01)
    begins, ends = stream(("ADDED", RUNNING)), stream(("ADDED", job(summary={"state": "Succeeded"})))
    script(cluster, (1, begins, REFUSED), (1, "", REFUSED), (0, "", ""), (0, ends, ""))
    assert plugin.main(["watch", "digits"]) == 0
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == ["Running", "Succeeded"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(REFUSED, plugin.UNREACHABLE, id="out of reach"),
        pytest.param('Error from server (NotFound): "digits" not found\n', 1, id="deleted"),
    ],
)
@pytest.mark.parametrize("argv", [["watch", "digits"], ["logs", "digits", "-f"]], ids=lambda argv: argv[0])
def test_command_that_follows_gives_up_with_a_code_of_its_own(
    cluster: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    error: str,
    code: int,
) -> None:
    monkeypatch.setattr(plugin, "RETRY_S", 0.01)
    monkeypatch.setattr(log_streams, "PATIENCE_S", 0.1)
    monkeypatch.setattr(logs.show, "__defaults__", (0.02,))
    first = [stream(("ADDED", RUNNING))] if argv[0] == "watch" else [json.dumps(RUNNING), json.dumps({"items": []})]
    script(cluster, *((0, text, "") for text in first), (1, "", error))
    assert plugin.main(argv) == code
    assert error.removeprefix("error: ").strip() in capsys.readouterr().err


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
        pytest.param(["logs", "digits"], ["logs", "digits-worker-1-1", "--timestamps", "--container=trainer", "--tail=20"],
                     id="logs of all"),
        pytest.param(["logs", "digits", "--slot", "1", "--previous"],
                     ["logs", "digits-worker-1-1", "--timestamps", "--container=trainer", "--previous"],
                     id="log of the newest pod of a slot, before its restart"),
        pytest.param(["logs", "digits", "--since", "1m30s", "--tail", "5"],
                     ["logs", "digits-worker-1-1", "--timestamps", "--container=trainer", "--tail=5", "--since=90s"],
                     id="the newest lines"),
    ],
)  # fmt: skip
def test_what_kubectl_is_told(cluster: Path, argv: list[str], ran: list[str]) -> None:
    pods = [pod("digits-worker-1-0", 1), pod("digits-worker-1-1", 1)]
    answers(cluster, {"get pods": {"items": pods}, "get": RUNNING})
    assert plugin.main(argv) == 0
    assert asked(cluster)[-1] == ran


def test_what_kubectl_refuses_is_its_own_sentence(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"get": ""}, code=1, error='Error from server (NotFound): trainingjobs "x" not found\n')
    assert plugin.main(["why", "x"]) == 1
    assert capsys.readouterr().err == 'kubectl regroup: Error from server (NotFound): trainingjobs "x" not found\n'


def log_lines(*texts: str, second: int = 0) -> str:
    """Return what kubectl prints of a log, a line each second."""
    return "".join(f"2026-01-01T10:00:{second + n:02}.000000000Z {text}\n" for n, text in enumerate(texts))


def test_logs_of_all_workers_come_by_time_and_say_whose_they_are(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(
        cluster,
        {
            "get pods": {"items": [pod("digits-worker-0-0", 0), pod("digits-worker-2-0", 2)]},
            "get": RUNNING,
            "logs digits-worker-0-0": log_lines("[rank 1] begins", "[rank 0] step 1\r[rank 0] step 2", second=1),
            "logs digits-worker-2-0": log_lines(
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
    answers(cluster, {"get pods": {"items": [pod("digits-worker-0-0", 0)]}, "get": RUNNING})
    found = json.loads((cluster / "answers").read_text())
    (cluster / "answers").write_text(
        json.dumps({**found, "logs": [1, "", "error: previous terminated container not found\n"]})
    )
    assert plugin.main(["logs", "digits", "--previous"]) == 1
    assert capsys.readouterr().err == "kubectl regroup: previous terminated container not found\n"


def test_rank_that_there_is_not_is_refused(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(cluster, {"get pods": {"items": []}, "get": RUNNING})
    assert plugin.main(["logs", "digits", "--rank", "6"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "kubectl regroup: Rank 6 is not in the newest generation, whose ranks are 0 to 5. Give one of them, or use --slot N.\n"
    )


def test_more_logs_than_can_be_followed_at_once_are_refused(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pods = [pod(f"digits-worker-{slot}-0", slot) for slot in range(log_streams.MAX_STREAMS + 1)]
    answers(cluster, {"get pods": {"items": pods}, "get": RUNNING, "logs": ""})
    assert plugin.main(["logs", "digits", "--follow"]) == 1
    assert (
        "has 51 pods, and at most 50 logs can be followed at once. Use --slot N or --rank N." in capsys.readouterr().err
    )


def test_followed_logs_end_with_the_job(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = job(summary={"state": "Succeeded"})
    pods = [pod("digits-worker-0-0", 0, phase="Succeeded")]
    answers(cluster, {"get pods": {"items": pods}, "get": ended, "logs": log_lines("the end")})
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
        pytest.param("Logged in.\n{}\n", id="a wrapper's remark"),
        pytest.param("{no JSON}\n{}\n", id="no JSON"),
        pytest.param("{" * 100_000 + "}\n", id="much of it"),
    ],
)
def test_answer_that_is_no_json_is_one_sentence(
    cluster: Path, capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    answers(cluster, {"get": text})
    assert plugin.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith(("kubectl regroup: kubectl did not print JSON, but: ", "kubectl regroup: The watch ended"))
    assert said.count("\n") == 1
    assert len(said) < 300


def test_kubectl_that_a_signal_ended_gives_the_code_of_a_shell(cluster: Path) -> None:
    (cluster / "kubectl").write_text("#!/bin/sh\nkill -PIPE $$\n")
    assert plugin.main(["delete", "digits"]) == CLOSED


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
    answers(cluster, {"--watch": stream(("ADDED", RUNNING)), "trainingjobs": {"items": [RUNNING]}})
    reading, writing = os.pipe()
    os.close(reading)
    given = [argument.format(local_job) for argument in arguments]
    ended = finished(command, *given, stdout=writing, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    assert ended == (CLOSED, "")


def test_first_line_arrives_where_the_reader_wants_no_more(cluster: Path) -> None:
    answers(cluster, {"trainingjobs": {"items": [job(f"job-{number:05}") for number in range(5000)]}})
    with started(KUBECTL, "list", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("NAME")
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (CLOSED, "")


def test_user_may_end_a_watch(cluster: Path) -> None:
    answers(cluster, {"--watch": stream(("ADDED", RUNNING))}, code=None)
    with started(KUBECTL, "watch", "digits", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert "Running" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (INTERRUPTED, "")


def test_watch_that_is_terminated_shows_the_cursor_again_and_ends_its_kubectl(cluster: Path) -> None:
    (cluster / "kubectl").write_text(
        f"#!{sys.executable}\nimport os, signal, sys\nopen(os.environ['FAKE_KUBECTL'] + '/pid', 'w').write(str(os.getpid()))\n"
        f"print({stream(('ADDED', RUNNING))!r}, flush=True)\nsignal.pause()\n"
    )
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
    answers(cluster, {"trainingjobs": {"items": [RUNNING]}})
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
    answers(cluster, {"get": {"items": []}})
    assert finished(
        command,
        *(argument.format(local_job) for argument in arguments),
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.close(closed),
    ) == (0, "")


def test_letter_that_the_terminal_does_not_have_is_written_as_its_number(cluster: Path) -> None:
    answers(cluster, {"trainingjobs": {"items": [job("digits", summary={"state": "Läuft"})]}})
    with started(KUBECTL, "list", stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"}) as process:
        shown, said = process.communicate()
    assert (process.returncode, said) == (0, "")
    assert "L\\xe4uft" in shown
