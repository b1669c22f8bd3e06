"""`regroup run --ui`: the page of a run shows the run, and ends with it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from harness.polling import until
from regroup_client.local_jobs import FILE

SCRIPT = """
import pathlib, time
print("hello from a worker", flush=True)
while not pathlib.Path("stop").exists():
    time.sleep(0.1)
"""


def test_a_port_that_is_used_is_one_sentence_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "regroup_cli", "run", "--gpus", "none"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, said in (
            (["--ui", "--state-dir", "kept"], f"--port ({port}) cannot be used (Address already in use)."),
            ([], f"--port ({port}) is the port of the page. Give --ui, too, or leave --port out."),
        ):
            done = subprocess.run(
                [*command, *options, "--port", port, "train.py"],
                cwd=tmp_path,
                timeout=60,
                capture_output=True,
                text=True,
            )
            assert done.returncode not in (0, -9), done
            assert said in done.stderr
            assert "job in" not in done.stdout + done.stderr
            assert "Traceback" not in done.stderr
    assert not (tmp_path / "kept" / FILE).exists(), "the same command with another port would find a job"


def test_the_page_of_a_run_shows_it_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    said = tmp_path / "said"
    command = [sys.executable, "-m", "regroup_cli", "run", "--ui", "--gpus", "none", "train.py"]
    with said.open("w") as out, subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out) as process:
        try:
            until(lambda: "page: http" in said.read_text(), "the page has an address")
            found = re.search(
                r"page: (http://127\.0\.0\.1:\d+/[\w-]+/jobs/here/local-[0-9a-f]{8})(\?code=\S+)", said.read_text()
            )
            assert found is not None
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            browser.open(found[1] + found[2]).read()

            def shows(path: str, text: str) -> bool:
                return text in browser.open(found[1] + path).read().decode()

            until(lambda: shows("/logs", "hello from a worker"), "the page shows the log")
            assert shows("", "local is ")
            assert not shows("", "Killed")
        finally:
            (tmp_path / "stop").touch()
        assert process.wait(60) == 0, said.read_text()
    with pytest.raises(urllib.error.URLError):
        browser.open(found[1], timeout=5)
