"""Logs of local workers: what `regroup run` keeps of them, and how `regroup logs` reads it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regroup_cli.__main__ import main
from regroup_cli.local_logs import LogFile, drain, keep, write_all
from regroup_client import local_jobs
from regroup_client.jobs import Wanted
from regroup_client.local_logs import LocalLogs
from regroup_client.log_streams import Choice, Follower, read

AT_NS = 1_767_261_600_000_000_000


def home(directory: Path, slot: int, attempt: int = 0, max_bytes: int = 200) -> LogFile:
    path = directory / f"local-worker-{slot}-{attempt}"
    path.mkdir()
    return LogFile(path, max_bytes)


def job(directory: Path, **status: Any) -> dict[str, Any]:
    metadata = {"name": "local", "namespace": "local", "resourceVersion": "1", "generation": 1}
    made = {"metadata": metadata, "spec": {}, "status": status}
    (directory / "job.json").write_text(json.dumps(made))
    return made


def lines(directory: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["logs", *arguments, str(directory)]) == 0
    return capsys.readouterr().out.splitlines()


MEMBERS = {"generation": 2, "worldSize": 2, "members": "0,1.1"}


def test_logs_of_workers_by_time_and_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, membership=MEMBERS, summary={"state": "Succeeded"})
    first, lost, second = home(tmp_path, 0), home(tmp_path, 1), home(tmp_path, 1, 1)
    first.write(b"one\ntwo", AT_NS)
    lost.write(b"lost", AT_NS - 1)
    second.write(b"three\n", AT_NS + 1)
    assert lines(tmp_path, capsys=capsys) == ["[0.0] one", "[0.0] two", "[1.1] three"]
    assert lines(tmp_path, "--all-attempts", capsys=capsys)[0] == "[1] lost"
    assert lines(tmp_path, "--rank", "1", capsys=capsys) == ["[1.1] three"]
    assert lines(tmp_path, "--slot", "0", "--tail", "1", capsys=capsys) == ["[0.0] two"]
    assert lines(tmp_path, "--tail", "0", capsys=capsys) == []
    assert lines(tmp_path, "--since", "10s", capsys=capsys) == []


def test_full_log_is_replaced_and_one_older_part_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, summary={"state": "Succeeded"})
    log = home(tmp_path, 0)
    for number in range(30):
        log.write(f"line {number}".encode(), AT_NS + number)
    found = lines(tmp_path, "--slot", "0", capsys=capsys)
    assert found == [f"[0] line {number}" for number in range(30 - len(found), 30)]
    assert sum(path.stat().st_size for path in tmp_path.glob("*/log*")) <= 400


def test_what_a_worker_writes_is_passed_on_and_kept(tmp_path: Path) -> None:
    log = home(tmp_path, 0)
    (reading, writing), (shown, terminal) = os.pipe(), os.pipe()
    reader = keep(reading, partial(write_all, terminal), log)
    os.write(writing, b"half a ")
    os.write(writing, b"line\n10%\r20%\rno end")
    os.close(writing)
    asyncio.run(drain([reader], log))
    os.close(terminal)
    with os.fdopen(shown, "rb") as stream:
        assert stream.read() == b"half a line\n10%\r20%\rno end\n"
    kept = (tmp_path / "local-worker-0-0" / "log").read_bytes().split(b"\n")
    assert [line.split(b" ", 1)[-1] for line in kept] == [b"half a line", b"10%\r20%\rno end", b""]


@pytest.mark.parametrize(
    ("says", "shown"),
    [
        pytest.param(b"10%\r20%\r", b"10%\r20%\r\n", id="a progress bar that did not end its line"),
        pytest.param(b"10%\rdone\n", b"10%\rdone\n", id="one that did"),
        pytest.param(b"", b"", id="nothing"),
    ],
)
def test_output_of_a_worker_ends_with_a_whole_line(tmp_path: Path, says: bytes, shown: bytes) -> None:
    log = home(tmp_path, 0)
    found: list[bytes] = []
    reading, writing = os.pipe()
    os.write(writing, says)
    os.close(writing)
    keep(reading, found.append, log).join(10)
    assert b"".join(found) == shown


def test_terminal_that_has_gone_loses_nothing_of_the_log(tmp_path: Path) -> None:
    log = home(tmp_path, 0)
    (reading, writing), (shown, terminal) = os.pipe(), os.pipe()
    os.close(shown)
    reader = keep(reading, partial(write_all, terminal), log)
    os.write(writing, b"line\n")
    os.close(writing)
    asyncio.run(drain([reader], log))
    assert (tmp_path / "local-worker-0-0" / "log").read_bytes().endswith(b"Z line\n")


def test_followed_logs_have_later_workers_and_new_files_and_end_with_the_job(tmp_path: Path) -> None:
    log, going = home(tmp_path, 0, max_bytes=300), [True]
    made = job(tmp_path)
    log.write(b"begins", AT_NS)
    reader = LocalLogs(tmp_path, lambda: (made, going[0]), Wanted())
    found: list[str] = []
    seen = threading.Event()

    def follow() -> None:
        for line in Follower(reader, Choice(), None, print, refresh_s=0.05).lines():
            found.append(line.text)
            if line.text == "last":
                seen.set()

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(10):
        log.write(f"line {number}".encode(), AT_NS + 1 + number)
    home(tmp_path, 1).write(b"last", AT_NS + 100)
    assert seen.wait(10)
    going[0] = False
    thread.join(10)
    assert not thread.is_alive()
    assert found[0] == "begins"
    assert [text for text in found if text.startswith("line")] == [f"line {number}" for number in range(10)]


def test_more_logs_than_are_read_at_once_are_all_read(tmp_path: Path) -> None:
    made = job(tmp_path)
    for slot in range(60):
        home(tmp_path, slot).write(b"x", AT_NS + 100 - slot)
    reader = LocalLogs(tmp_path, lambda: (made, False), Wanted())
    assert [line.worker.slot for line in read(reader, Choice(), 20)] == list(range(59, -1, -1))


def test_open_files_do_not_grow_with_the_number_of_logs(tmp_path: Path) -> None:
    made = job(tmp_path)
    for slot in range(150):
        log = home(tmp_path, slot)
        log.write(b"one\ntwo", AT_NS + slot)
        log.close()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 80, limits[1]))
    try:
        reader = LocalLogs(tmp_path, lambda: (made, False), Wanted())
        found = [(line.worker.slot, line.text) for line in read(reader, Choice(), None)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == [(slot, text) for slot in range(150) for text in ("one", "two")]


def test_logs_that_find_no_room_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path, summary={"state": "Succeeded"})
    for slot in range(60):
        home(tmp_path, slot).write(b"x", AT_NS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert main(["logs", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == "regroup: The logs cannot be read (No such file or directory). Use --slot N or --tail LINES.\n"


def test_run_that_was_killed_is_known_to_be_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    directory = tmp_path / "job"
    directory.mkdir()
    made = job(directory, summary={"state": "Running"})
    assert local_jobs.view(directory, made).state == "Running", "it is just being started"
    child = os.fork()
    if child == 0:
        with local_jobs.held(directory):
            (directory / "held").touch()
            threading.Event().wait(60)
    try:
        while not (directory / "held").exists():
            pass
        assert local_jobs.runner(directory) == child
        assert local_jobs.view(directory, made).state == "Running"
        assert local_jobs.directories() == [directory]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert local_jobs.runner(directory) is None
    assert local_jobs.view(directory, made).state == "Killed"
    (directory / "job.json").unlink()
    assert local_jobs.directories() == []


def test_a_run_that_looks_at_its_own_job_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of `regroup run --ui` does so. The kernel drops a process's locks when it closes the file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = tmp_path / "job"
    directory.mkdir()
    ask = "from pathlib import Path; from regroup_client.local_jobs import runner; print(runner(Path.cwd()))"
    with local_jobs.held(directory):
        assert local_jobs.runner(directory) == os.getpid()
        asked = subprocess.run([sys.executable, "-c", ask], cwd=directory, capture_output=True, text=True, check=True)
        assert asked.stdout.strip() == str(os.getpid())
    assert local_jobs.runner(directory) is None
