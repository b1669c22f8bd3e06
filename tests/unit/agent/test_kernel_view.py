"""What /proc tells of real processes: their open files, and those of their children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from _regroup_agent.kernel_view import look_at_files
from _regroup_agent.orphans import descendants, families
from harness.polling import until

SCRIPT = """
import os, sys, tempfile, time
directory = sys.argv[1]
saved = open(directory + "/last.pt", "wb")
saved.write(b"x" * 5000)
saved.flush()
log, data, unnamed = open(directory + "/log", "a"), open(__file__), tempfile.TemporaryFile(dir=directory)
read, write = os.pipe()
if len(sys.argv) == 2:
    import subprocess
    subprocess.Popen([sys.executable, __file__, directory + "/child", "child"], start_new_session=True)
print("there", flush=True)
time.sleep(600)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "child").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    with (tmp_path / "stdout").open("wb") as out:
        one = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(tmp_path)], stdout=out)
    until(lambda: (tmp_path / "stdout").read_text().count("there") == 2, "both processes run")
    yield one
    for pid in [one.pid, *descendants(one.pid)]:
        os.kill(pid, 9)
    one.wait(10)


def test_only_files_that_may_be_checkpoints_are_seen(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (child,) = descendants(process.pid)
    look = look_at_files([process.pid, child])
    assert {(pid, path): position for (pid, _, path), position in look.files.items()} == {
        (process.pid, str(tmp_path / "last.pt")): 5000,
        (child, str(tmp_path / "child" / "last.pt")): 5000,
    }
    assert not look.waits


def test_process_that_has_ended_has_no_files() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(10)
    assert look_at_files([ended.pid]).files == {}


def test_bytes_that_were_written_to_a_disk_are_counted(tmp_path: Path) -> None:
    text = "import sys; open(sys.argv[1], 'wb').write(bytes(1 << 20)); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path / "saved")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == 1
        if Path("/tmp").stat().st_dev == Path("/dev/shm").stat().st_dev:
            pytest.skip("the kernel counts nothing for a file system in memory")
        assert look_at_files([process.pid]).written_bytes[process.pid] >= 1 << 20
        assert process.stdin is not None
        process.stdin.close()


def test_one_long_write_of_a_file_system_in_user_space_is_seen(tmp_path: Path) -> None:
    """A full pipe with a name stands for it: the position does not move, and the thread does not wait for a disk."""
    os.mkfifo(tmp_path / "saved")
    text = "import os, sys; fd = os.open(sys.argv[1], os.O_RDWR); print(1, flush=True); os.write(fd, bytes(1 << 20))"
    with subprocess.Popen([sys.executable, "-c", text, str(tmp_path / "saved")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if not Path(f"/proc/{process.pid}/syscall").exists():
            pytest.skip("this kernel does not tell the calls of a process")
        until(lambda: look_at_files([process.pid]).waits, "the thread is in the call")
        process.kill()


def test_descriptors_without_a_path_are_not_read_further(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    read = Path.read_text

    def noted(path: Path, **how: str) -> str:
        asked.append(str(path))
        return read(path, **how)

    monkeypatch.setattr(Path, "read_text", noted)
    pipe = os.pipe()
    with (tmp_path / "saved").open("wb") as saved:
        look_at_files([os.getpid()])
        assert f"/proc/{os.getpid()}/fdinfo/{saved.fileno()}" in asked
    assert not any(one.endswith(f"/fdinfo/{fd}") for fd in pipe for one in asked)
    for fd in pipe:
        os.close(fd)


def test_families_are_the_trainers_and_all_below_them(process: subprocess.Popen[bytes]) -> None:
    (child,) = descendants(process.pid)
    assert sorted(families({process.pid: ("place", "trainer-0")}, {process.pid})) == sorted([process.pid, child])
    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
    assert {process.pid, child} <= set(families({2**22 + 1: ("place", name)}, set())), (
        "a trainer that has ended left them"
    )
    assert process.pid not in families({2**22 + 1: ("place", "trainer-0")}, set())
