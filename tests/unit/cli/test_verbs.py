"""Commands that local jobs and jobs of a cluster share: their words, their JSON, and the sentences for wrong uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regroup_cli import plugin, screen, verbs
from regroup_cli.__main__ import main
from regroup_client import views

OPERATOR = Path(__file__).parents[3] / "operator"
STATUS: dict[str, Any] = {
    "phase": "Running",
    "summary": {"state": "Running", "ready": "2/2", "step": "40", "loss": "0.5", "progress": "40%", "eta": "9m"},
    "progress": {"step": 40, "totalSteps": 100, "samplesPerSecond": 1234.5, "curve": ["1 0 4", "20 10 2", "40 20 0.5"]},
    "membership": {
        "generation": 2, "worldSize": 4, "members": "0,1.1", "uid": "u", "kind": "planned", "digest": "d"},
    "restarts": {"total": 1},
    "incidents": [
        {"generation": 2, "at": "2026-01-01T10:00:00Z", "cause": "Hung", "decision": "worker 1 hung\x1b[31m.",
         "stacks": ["rank 0 (0): collective: all_reduce", "rank 1 (1): outside: read"]},
    ],
    "conditions": [{"type": "Training", "status": "True", "reason": "Running", "message": "m",
                    "lastTransitionTime": "2026-01-01T10:00:00Z", "observedGeneration": 1}],
}  # fmt: skip


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a local job that `regroup list` shows."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    directory = tmp_path / "job"
    directory.mkdir()
    write(directory)
    links = tmp_path / "home" / "regroup" / "jobs"
    links.mkdir(parents=True)
    (links / "1-job").symlink_to(directory)
    return directory


def write(directory: Path, **changes: Any) -> None:
    metadata = {"name": "digits", "namespace": "local", "resourceVersion": "1", "generation": 1, "uid": "u"}
    container = {"name": "trainer", "image": "local", "command": ["python", "train.py"]}
    spec = {
        "replicas": 2,
        "elasticPolicy": {"minReplicas": 1, "maxReplicas": 4},
        "template": {"spec": {"containers": [container]}},
    }
    made = {"metadata": metadata, "spec": spec, "status": {**STATUS, **changes}}
    (directory / "job.json").write_text(json.dumps(made))


def test_local_jobs_are_listed_and_shown(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split()[-1], row.split()[:3], row.split()[-1]) == (
        "DIRECTORY",
        ["digits", "Running", "2/2"],
        str(local),
    )
    assert main(["status", "digits"]) == 0
    shown = capsys.readouterr().out
    assert "Step:       40/100" in shown
    assert "1      2-3     digits-worker-1-1" in shown
    assert "\x1b" not in shown, "text of a job may not steer the terminal"
    assert main(["list", "-o", "json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["items"]] == ["digits"]
    assert main(["status", str(local), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][1]["ranks"] == [2, 3]
    assert main(["why", "digits"]) == 0
    assert capsys.readouterr().out.startswith("digits is Running.")


def test_local_job_is_suspended_resumed_and_resized(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, suspend in (("suspend", True), ("resume", False)):
        assert main([verb, "digits"]) == 0
        assert json.loads((local / "job.json").read_text())["spec"]["runPolicy"]["suspend"] is suspend
        assert capsys.readouterr().out == f"regroup: {verb} is asked for\n"
    assert main(["scale", str(local), "1"]) == 0
    assert capsys.readouterr().out == "regroup: 1 worker wanted\n"
    assert main(["scale", str(local), "3"]) == 0
    assert json.loads((local / "job.json").read_text())["spec"]["replicas"] == 3


def test_stacks_of_the_last_hang(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks", "digits"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rank 0 (0): collective: all_reduce",
        "rank 1 (1): outside: read",
    ]
    write(local, incidents=[])
    assert main(["stacks", "digits"]) == 2
    assert "No hang of the job digits" in capsys.readouterr().err


def test_watch_of_a_local_job_ends_with_it(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(local, summary={"state": "Failed"})
    assert main(["watch", "digits"]) == 1
    assert capsys.readouterr().out.split("  ", 1)[1] == "Failed  generation 2 (4 ranks)  100%\n".replace("  100%", "")


WRONG_LOCAL = [
    ([], "required"),
    (["lists"], "invalid choice"),
    (["status"], "DIR"),
    (["status", "nowhere"], "holds no job"),
    (["why", "/dev/null"], "holds no job"),
    (["watch", "nowhere"], "holds no job"),
    (["logs", "nowhere"], "holds no job"),
    (["logs", "{}", "--rank", "99"], "Rank 99 is not in the newest generation, whose ranks are 0 to 3"),
    (["logs", "{}", "--rank", "-1"], "is not a number of at least 0"),
    (["logs", "{}", "--rank", "1", "--slot", "1"], "not allowed with"),
    (["logs", "{}", "--since", "yesterday"], "is not a duration"),
    (["logs", "{}", "--grep", "("], "is not a regular expression"),
    (["logs", "{}", "--tail", "some"], "is not a number of at least 0"),
    (["logs", "{}", "--previous"], "unrecognized arguments"),
    (["scale", "{}"], "N"),
    (["scale", "{}", "many"], "invalid int value"),
    (["scale", "{}", "0"], "spec.replicas"),
    (["scale", "{}", "9"], "spec.replicas"),
    (["delete", "nowhere"], "holds no job"),
    (["suspend", "nowhere"], "holds no job"),
    (["status", "{}", "-o", "yaml"], "invalid choice"),
    (["list", "-A"], "unrecognized arguments"),
]


@pytest.mark.parametrize(
    ("argv", "sentence"), WRONG_LOCAL, ids=lambda one: " ".join(one) if isinstance(one, list) else ""
)
def test_wrong_use_is_one_sentence(
    local: Path, capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    try:
        code = main([argument.format(local) for argument in argv])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len([line for line in said.splitlines() if not line.startswith(("usage:", " "))]) == 1
    assert "Traceback" not in said


@pytest.mark.parametrize("verb", ["scale", "suspend", "resume"])
def test_job_that_has_ended_is_not_changed(local: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    write(local, phase="Succeeded", summary={"state": "Succeeded"})
    assert main([verb, "digits", *(["3"] if verb == "scale" else [])]) == 2
    assert "The job digits has ended (Succeeded): it cannot be" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*verbs.NAMES, "logs"])
def test_namespace_counts_wherever_it_stands(command: str) -> None:
    rest = [] if command == "list" else ["digits", "3"] if command == "scale" else ["digits"]
    for argv in (["-n", "team", command, *rest], [command, "-n", "team", *rest], [command, *rest, "-n", "team"]):
        args = plugin.parser().parse_args(argv)
        assert (args.command, args.namespace, args.context) == (command, "team", None)


# --- the screen ------------------------------------------------------------------------------------------------------


def view(**changes: Any) -> views.JobView:
    return views.job_view({"metadata": {"name": "digits"}, "status": {**STATUS, **changes}})


def test_screen_shows_the_job() -> None:
    assert screen.lines(view(), 80) == [
        "digits  Running  2/2 ready",
        "step 40/100 (40%)  loss 0.5  ETA 9m  samples/s 1,234  steps/s 2",
        "loss    █▄▁",
        "generation 2 of 4 ranks, 1 restart",
        "  [0] ranks 0-1  digits-worker-0-0",
        "  [1] ranks 2-3  digits-worker-1-1",
        "2026-01-01T10:00:00Z  Hung: worker 1 hung.",
    ]


@pytest.mark.parametrize(("width", "height"), [(20, 3), (1, 1), (200, 50), (40, 0)])
def test_screen_fits_its_terminal(width: int, height: int) -> None:
    many = view(membership={"generation": 3, "worldSize": 64, "members": "0-63"})
    found = screen.lines(many, width, height)
    assert 1 <= len(found) <= max(1, height)
    assert all(len(line) <= width for line in found)


@pytest.mark.parametrize(
    ("text", "width", "want"),
    [
        pytest.param("一二三", 6, "一二三", id="wide letters that fit"),
        pytest.param("一二三", 5, "一二…", id="wide letters"),
        pytest.param("一二三", 4, "一…", id="a wide letter that would be halved"),
        pytest.param("e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301e\u0301", id="accents take no cell"),
        pytest.param("a\tb", 3, "a b", id="a tab is one cell"),
        pytest.param("abcd", 3, "ab…", id="letters"),
    ],
)
def test_screen_counts_cells_and_not_characters(text: str, width: int, want: str) -> None:
    assert screen.cut(text, width) == want


def test_screen_counts_workers_that_it_has_no_room_for() -> None:
    found = screen.lines(view(membership={"generation": 3, "worldSize": 9, "members": "0-8"}), 80)
    assert "  and 1 more worker" in found


@pytest.mark.parametrize(
    ("values", "width", "want"),
    [
        pytest.param([], 10, "", id="nothing"),
        pytest.param([1.0], 10, "", id="one value"),
        pytest.param([1.0, None, 3.0], 10, "▁█", id="an unknown loss"),
        pytest.param([2.0, 2.0], 10, "▁▁", id="a flat curve"),
        pytest.param([float(n) for n in range(100)], 4, "▁▃▆█", id="more values than columns"),
    ],
)
def test_sparkline(values: list[float | None], width: int, want: str) -> None:
    assert screen.sparkline(values, width) == want


def test_commands_for_a_cluster_need_no_further_package() -> None:
    """`pipx install .` installs none."""
    code = (
        "import sys, regroup_cli.plugin, regroup_cli.completion; regroup_cli.plugin.parser(); "
        "print([m for m in sys.modules if m.split('.')[0] in ('regroup', 'regroup_operator', 'pydantic', 'aiohttp', 'torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(OPERATOR)},
    )
    assert done.stdout == "[]\n"
