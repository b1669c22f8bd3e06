"""What `regroup run` makes of its arguments: a job as one would write it, or one sentence."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from regroup_cli.__main__ import main, parser
from regroup_cli.local import FileStore, say
from regroup_cli.run import check_torch, checkpoint_to_resume, job_object, torch_version
from regroup_client.errors import SubmitError
from regroup_operator.api import SpecError, parse_job


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        pytest.param(["--workers", "3"], None, id="without bounds the size is fixed"),
        pytest.param(["--workers", "3", "--min", "2"], (2, 3), id="the most are those wanted"),
        pytest.param(["--workers", "3", "--max", "5"], (1, 5), id="the fewest are one"),
        pytest.param(["--workers", "3", "--min", "2", "--max", "5"], (2, 5), id="both bounds"),
    ],
)
def test_bounds_make_a_job_elastic(arguments: list[str], policy: tuple[int, int] | None) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "true"])))
    assert job.elastic == (policy is not None)
    assert (job.min_replicas, job.max_replicas) == (policy or (3, 3))


def committed(directory: Path, name: str, job_uid: str, at_s: int) -> None:
    path = directory / name
    path.mkdir()
    (path / ".job").write_text(job_uid)
    (path / "COMMIT.json").touch()
    os.utime(path / "COMMIT.json", (at_s, at_s))


def test_newest_checkpoint_of_the_last_run_is_resumed(tmp_path: Path) -> None:
    """Numbers of generations begin anew with each run; inside a run a later generation counts, not a later hour (trace H15)."""
    committed(tmp_path, "step-900.g7-aaaa", "first", 100)
    committed(tmp_path, "step-950.g1-bbbb", "second", 300)
    committed(tmp_path, "step-940.g2-cccc", "second", 200)
    (tmp_path / "step-999.g9-dddd").mkdir()  # never completed
    newest = tmp_path / "step-940.g2-cccc"
    assert checkpoint_to_resume(tmp_path) == newest
    older = tmp_path / "step-900.g7-aaaa"
    assert checkpoint_to_resume(older) == older
    job = parse_job(job_object(parser().parse_args(["run", "--resume", str(tmp_path), "true"])))
    assert job.spec.checkpoint is not None
    assert (job.spec.checkpoint.directory, job.spec.checkpoint.resume_path) == (str(tmp_path), str(newest))
    job = parse_job(job_object(parser().parse_args(["run", "--resume", str(older), "--checkpoint", "/new", "true"])))
    assert job.spec.checkpoint is not None
    assert (job.spec.checkpoint.directory, job.spec.checkpoint.resume_path) == ("/new", str(older))


def test_resuming_where_nothing_is_complete_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-999.g9-dddd").mkdir()
    assert main(["run", "--resume", str(tmp_path), "true"]) == 2
    assert f"--resume ({tmp_path}) holds no complete checkpoint." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        pytest.param(["--workers", "4"], (1, 4, 4), id="no groups"),
        pytest.param(["--workers", "4", "--workers-per-group", "2"], (2, 4, 4), id="fixed"),
        pytest.param(
            ["--workers", "4", "--workers-per-group", "2", "--max", "6"], (2, 2, 6), id="the fewest are one group"
        ),
        pytest.param(["--workers", "3", "--sizes", "2,4"], (1, 2, 4), id="sizes"),
        pytest.param(["--workers", "3", "--sizes", "2,4", "--max", "3"], (1, 2, 3), id="sizes and a bound"),
    ],
)
def test_workers_form_groups(arguments: list[str], want: tuple[int, int, int]) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "true"])))
    assert (job.spec.workers_per_group, job.min_replicas, job.max_replicas) == want


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        pytest.param(["--sizes", "2,4"], 2, id="the smallest size"),
        pytest.param(["--sizes", "2,4", "--workers", "4"], 4, id="named"),
        pytest.param(["--grow-at", "now"], 1, id="no sizes"),
    ],
)
def test_number_of_workers_that_is_not_given(arguments: list[str], want: int) -> None:
    assert parse_job(job_object(parser().parse_args(["run", *arguments, "true"]))).spec.replicas == want


@pytest.mark.parametrize("text", ["", "2,", "two", "4,2", "2,2", "0,2", "-1"])
def test_wrong_sizes_are_one_sentence_with_the_rule(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["run", f"--sizes={text}", "true"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"{text!r} is no ascending list of numbers of at least 1; give one such as 2,4,8")


def test_moment_to_grow(tmp_path: Path) -> None:
    arguments = ["run", "--max", "4", "--grow-at", "checkpoint", "--checkpoint", str(tmp_path), "true"]
    assert job_object(parser().parse_args(arguments))["spec"]["elasticPolicy"]["growAt"] == "Checkpoint"


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        pytest.param([], (None, 60), id="absent"),
        pytest.param(["--stop-signal", "SIGUSR1", "--stop-seconds", "5"], ("SIGUSR1", 5), id="a signal and its time"),
    ],
)
def test_end_of_a_script_is_passed_on(arguments: list[str], want: tuple[str | None, int]) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "true"])))
    stop = job.spec.recovery.graceful_stop
    assert stop is not None
    assert (stop.signal, stop.seconds) == want


@pytest.mark.parametrize(("arguments", "seconds"), [([], None), (["--hang-seconds", "60"], 60)])
def test_bound_of_a_hang_is_passed_on(arguments: list[str], seconds: int | None) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "true"])))
    assert job.spec.recovery.hang_seconds == seconds


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--max", "0"], "--max (0) is less than 1", id="no workers at most"),
        pytest.param(["--min", "0"], "--min (0) is less than 1", id="no workers at least"),
        pytest.param(["--workers", "0"], "--workers (0) is less than 1", id="no workers"),
        pytest.param(["--min", "3", "--max", "2"], "--min (3) is more than --max (2)", id="bounds the wrong way round"),
        pytest.param(
            ["--workers", "1", "--min", "2"], "--workers (1) is less than --min (2)", id="fewer than the fewest"
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SubmitError) as caught:
        job_object(parser().parse_args(["run", *arguments, "true"]))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("option", ["--first-wait", "--join-quiet", "--first-step-seconds"])
@pytest.mark.parametrize("text", ["-5", "nan", "inf", "soon"])
def test_time_that_is_none_is_refused_by_name(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["run", f"{option}={text}", "true"])
    assert ended.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize("script", ["no-such-command", "."], ids=["no command", "a directory"])
def test_script_that_cannot_be_started_is_refused_before_anything_runs(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", script]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"regroup: SCRIPT ({script}) is neither a file that ends in .py or .yaml nor a command")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc-per-node", "2", "{}/none.py"],
        ["env", "A=b", "mpirun", "-np", "2", "python", "{}/none.py"],
        ["deepspeed", "{}/none.py", "--deepspeed"],
        ["python", "-u", "{}/none.py"],
        ["sh", "-c", "cd {} && exec python none.py"],
    ],
    ids=["torchrun", "mpirun", "deepspeed", "python", "a shell"],
)
def test_script_in_a_command_that_is_missing_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"])
    words = [word.format(tmp_path) for word in command]
    assert main(["run", "--state-dir", str(tmp_path / "run"), *words]) == 2
    assert capsys.readouterr().err.startswith(f"regroup: The script in the command ({tmp_path}/none.py) is not a file.")
    (tmp_path / "none.py").touch()
    assert job_object(parser().parse_args(["run", *words]))["spec"]["template"]


def test_state_directory_that_cannot_be_written_to_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["run", "--state-dir", str(file), "true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"regroup: --state-dir ({file}) cannot be written to (")
    assert said.count("\n") == 1


def ended(directory: Path, phase: str) -> None:
    raw = job_object(parser().parse_args(["run", "--workers", "2", "--max", "3", "true"]))
    FileStore(directory / "job.json").create(raw | {"status": {"phase": phase}})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(None, "holds no job. Give the directory that `regroup run` printed", id="no file"),
        pytest.param('{"spec": ', "job.json cannot be read as a job (Expecting value", id="a file that is cut off"),
        pytest.param("", "job.json cannot be read as a job (Expecting value", id="an empty file"),
        pytest.param("\0\x80", "job.json cannot be read as a job (Expecting value", id="no text"),
        pytest.param("[" * 100_000, "job.json cannot be read as a job (maximum recursion depth", id="much of it"),
        pytest.param("[]", "job.json cannot be read as a job (it is no object)", id="a list"),
        pytest.param("null", "job.json cannot be read as a job (it is no object)", id="nothing"),
        pytest.param("{}", "job.json cannot be read as a job (it has no metadata.name)", id="no metadata"),
        pytest.param('{"metadata": {"name": "a", "resourceVersion": "x"}}', "(its metadata.resourceVersion is no number)",
                     id="no version"),
        pytest.param('{"metadata": {"name": "a", "resourceVersion": "1"}}', "(its metadata.generation is no number)",
                     id="no generation"),
        pytest.param('{"metadata": {"name": "a", "resourceVersion": "1", "generation": 1}}', "(it has no spec)", id="no spec"),
        pytest.param('{"metadata": {"name": "a", "resourceVersion": "1", "generation": 1}, "spec": {}, "status": []}',
                     "(its status is no object)", id="no status"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [["status"], ["scale", "2"]], ids=["status", "scale"])
def test_directory_without_a_job_is_one_sentence(
    tmp_path: Path, text: str | None, sentence: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    assert main([command[0], str(tmp_path), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["status", "{}"], ["scale", "{}", "2"], ["checkpoint", "list", "{}"], ["run", "{}.py"]],
    ids=["status", "scale", "checkpoint", "run"],
)  # fmt: skip
def test_name_that_is_too_long_for_the_file_system_is_one_sentence(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / ("x" * 300))
    assert main([argument.format(name) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"status": {"phase": "Dancing"}}, id="its status"),
        pytest.param({"spec": {"template": 5}}, id="its spec"),
        pytest.param({"metadata": {"name": "A", "resourceVersion": "1", "generation": 1}}, id="its name"),
    ],
)
def test_job_whose_file_somebody_has_changed_is_not_resized(
    tmp_path: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ended(tmp_path, "Running")
    file = tmp_path / "job.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(["scale", str(tmp_path), "3"]) == 2
    assert f"{file} has been changed, and is no job any more: " in capsys.readouterr().err
    assert json.loads(file.read_text()).items() >= change.items()


def test_job_of_somebody_else_is_not_resized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, "Running")
    (tmp_path / "job.lock").mkdir()  # what nobody can open; root may write everywhere
    assert main(["scale", str(tmp_path), "3"]) == 2
    said = capsys.readouterr().err
    assert f"DIR ({tmp_path}) cannot be written to (Is a directory). Resize the job as the user who started it." in said


def test_machine_without_a_temporary_directory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert main(["run", "true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("regroup: A temporary directory cannot be made (No such file or directory). Set TMPDIR")
    assert said.count("\n") == 1


def test_checkpoints_in_a_current_directory_that_was_deleted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["run", "--checkpoint", "here", "true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("regroup: --checkpoint (here) is relative, and the current directory cannot be found")
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", [None, "[]"], ids=["deleted", "overwritten"])
def test_run_ends_with_a_sentence_when_somebody_takes_its_file_away(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state" / "job.json"
    change = f"rm -f {file}" if text is None else f"echo '{text}' > {file}"
    script = f"while {change}; do sleep 0.05; done"  # again: what is written at that very moment puts it back
    assert main(["run", "--state-dir", str(file.parent), "sh", "-c", script]) == 2
    said = capsys.readouterr().err
    assert f"{file} cannot be read as a job (" in said
    assert "Leave the directory as it is while its job runs, and start the job again." in said
    assert "Traceback" not in said


def test_job_that_has_ended_is_not_resized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, "Succeeded")
    assert main(["scale", str(tmp_path), "3"]) == 2
    assert "has ended (Succeeded): it cannot be resized" in capsys.readouterr().err
    assert json.loads((tmp_path / "job.json").read_text())["spec"]["replicas"] == 2
    ended(tmp_path, "Running")
    assert main(["scale", str(tmp_path), "3"]) == 0
    assert json.loads((tmp_path / "job.json").read_text())["spec"]["replicas"] == 3


def test_line_is_written_in_one_piece() -> None:
    """Workers write to the same terminal."""
    written: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    say("Running  2/2 ready", Pipe())
    assert written == ["regroup: Running  2/2 ready\n"]


@pytest.mark.parametrize(
    ("command", "version", "refused"),
    [
        pytest.param(["python", "-u", "uses.py"], "2.10.1", True, id="a script of the library"),
        pytest.param(["python", "-m", "regroup.train", "c.yaml"], "2.10.1", True, id="the loop"),
        pytest.param(["python", "-u", "plain.py"], "2.10.1", False, id="a script without the library"),
        pytest.param(["python", "-u", "uses.py"], "2.11.0", False, id="the oldest"),
        pytest.param(["python", "-u", "uses.py"], "2.99.0", False, id="newer: the workers warn"),
        pytest.param(["python", "-u", "uses.py"], "", False, id="no torch: the script says so"),
    ],
)
def test_torch_that_is_too_old_is_refused_before_a_worker_starts(
    command: list[str], version: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("uses.py").write_text("import regroup\n")
    Path("plain.py").write_text("import torch\n")
    if not refused:
        check_torch(command, version)
        return
    with pytest.raises(SpecError, match=r"torch 2\.10\.1 is older than 2\.11"):
        check_torch(command, version)


def test_torch_of_another_interpreter_is_left_to_the_library() -> None:
    assert torch_version([sys.executable, "-u", "train.py"]) == metadata.version("torch")
    assert torch_version(["/opt/other/bin/python", "train.py"]) == ""


def test_run_without_a_checkpoint_does_not_wait_for_torch_at_its_end() -> None:
    """Nobody who interrupts a run waits until torch is imported, which takes seconds."""
    ends = 'import sys; from regroup_cli import run; run._say_way_on({"spec": {}}); sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, "-c", ends]).returncode == 0
