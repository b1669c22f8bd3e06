"""A node's cache: each name is fetched once, whoever asks, dies or fills the disk."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regroup.data import DataError, cached
from regroup.data.cache import Entry, to_remove

READER = Path(__file__).parent / "cache_reader.py"
BIG = 1 << 30


class Storage:
    """What is slow: counts what is read from it."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.reads: list[str] = []

    def __call__(self, name: str) -> bytes:
        self.reads.append(name)
        return name.encode().ljust(self.size, b".")


@pytest.mark.parametrize(
    ("entries", "most", "want"),
    [
        pytest.param([(1, 10, "a"), (2, 10, "b")], 20, [], id="there is room"),
        pytest.param([(3, 10, "a"), (1, 10, "b"), (2, 10, "c")], 20, ["b"], id="the one that was not used for longest"),
        pytest.param([(3, 10, "a"), (1, 5, "b"), (2, 10, "c")], 9, ["b", "c", "a"], id="as many as it takes"),
        pytest.param([(1, 10, "a")], -5, ["a"], id="no room at all"),
        pytest.param([], 0, [], id="nothing there"),
    ],
)
def test_entries_that_have_to_go(entries: list[tuple[float, int, str]], most: int, want: list[str]) -> None:
    assert [entry.path for entry in to_remove([Entry(*one) for one in entries], most)] == want


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "size")


def test_name_is_read_once(tmp_path: Path) -> None:
    storage = Storage()
    read = cached(storage, tmp_path / "made", BIG)
    assert read("a") == read("a") == storage("a")
    assert read("") == b"." * 1000
    assert storage.reads == ["a", "a", ""], "the second is the test's own"
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="cut off"),
        pytest.param(lambda data: data[:0], id="empty"),
        pytest.param(lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:], id="one bit"),
        pytest.param(lambda data: data[:9] + b"\xff" + data[10:], id="its length"),
        pytest.param(lambda data: data + b"x", id="longer"),
    ],
)
def test_damaged_entry_is_fetched_again(tmp_path: Path, damage: Any) -> None:
    storage = Storage()
    read = cached(storage, tmp_path, BIG)
    read("a")
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert read("a") == read("a") == b"a".ljust(1000, b".")
    assert storage.reads == ["a", "a"]
    assert path.read_bytes() == whole


def test_entry_of_another_name_is_none(tmp_path: Path) -> None:
    """As after a copy by hand: the checksum covers the name."""
    storage = Storage()
    read = cached(storage, tmp_path, BIG)
    read("a")
    (of_a,) = files(tmp_path)
    read("b")
    (of_b,) = set(files(tmp_path)) - {of_a}
    of_b.write_bytes(of_a.read_bytes())
    assert read("b").startswith(b"b")


def test_least_recently_used_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    storage = Storage(1000)
    read = cached(storage, tmp_path, 10_500)
    for name in "abcdefghij":  # ten entries of 1020 bytes are the most
        read(name)
    by_name = dict(
        zip(
            "abcdefghij",
            [next(p for p in files(tmp_path) if f"{n}..".encode() in p.read_bytes()) for n in "abcdefghij"],
        )
    )
    for age, name in enumerate("bcdefghija"):  # in this order they were used
        os.utime(by_name[name], (1000.0 + age, 1000.0 + age))
    storage.reads.clear()
    read("c")
    read("new")
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_500
    left = [name for name, path in by_name.items() if path.exists()]
    assert left == ["a", "c", "e", "f", "g", "h", "i", "j"], "b and d are the oldest; c was used again"
    for number in range(100):
        read(f"more {number}")
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_500


def test_what_does_not_fit_is_not_kept(tmp_path: Path) -> None:
    storage = Storage(1000)
    read = cached(storage, tmp_path, 1000)
    assert read("a") == read("a")
    assert storage.reads == ["a", "a"]
    assert files(tmp_path) == []


def test_directory_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    storage = Storage()
    read = cached(storage, tmp_path / "file" / "cache", BIG)
    assert [read("a"), read("b"), read("a")] == [storage("a"), storage("b"), storage("a")]
    assert capsys.readouterr().out.count("cannot be used (Not a directory). Training goes on") == 1


def test_error_of_the_storage_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    def fails(name: str) -> bytes:
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        cached(fails, tmp_path, BIG)("a")
    assert files(tmp_path) == []


def test_what_a_crash_left_is_removed_when_room_is_made(tmp_path: Path) -> None:
    storage = Storage(1000)
    read = cached(storage, tmp_path, 5_000)
    read("a")
    left = files(tmp_path)[0].parent / "dead.part"
    left.write_bytes(bytes(3_000))
    for name in "bcdefg":
        read(name)
    assert not left.exists()
    assert len(files(tmp_path)) >= 3, "what it took is free for others"


def test_it_goes_to_worker_processes(tmp_path: Path) -> None:
    read = cached(str.encode, tmp_path, BIG)
    assert pickle.loads(pickle.dumps(read))("a") == b"a"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(("read", "/tmp", 10), "read of cached.. is a str; it must be a function", id="no function"),
        pytest.param((str.encode, "/tmp", 0), "max_bytes of cached.. is 0", id="no room"),
        pytest.param(
            (str.encode, "/tmp", 1e9), "max_bytes of cached.. is 1000000000.0; it must be a whole", id="a float"
        ),
    ],
)
def test_wrong_argument_is_one_sentence(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        cached(*arguments)


def test_wrong_results_and_names_are_one_sentence(tmp_path: Path) -> None:
    read: Any = cached(lambda _name: "text", tmp_path, BIG)  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match=r"read\('a'\) returned a str; it must return bytes"):
        read("a")
    with pytest.raises(DataError, match="A name for cached"):
        read(3)


class Reader:
    """`cache_reader` as a process."""

    def __init__(self, directory: Path, how: str, *names: str, wait_s: float = 60.0, max_bytes: int = BIG) -> None:
        self.directory = directory
        settings = [str(directory / "cache"), str(max_bytes), str(wait_s), str(directory / "log"), how]
        command = [sys.executable, str(READER), *settings]
        self.process = subprocess.Popen([*command, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        return line.strip()

    def end(self) -> list[str]:
        out: str = self.process.communicate(timeout=60)[0]
        return out.split()


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Any]:
    started: list[Reader] = []

    def start(how: str, *names: str, **given: Any) -> Reader:
        started.append(Reader(tmp_path, how, *names, **given))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def fetched(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def test_processes_that_fill_it_at_once_fetch_each_name_once(tmp_path: Path, readers: Any) -> None:
    names = [f"n{number}" for number in range(60)]
    running = [readers("plain", *names[first:], *names[:first]) for first in (0, 0, 0, 30)]
    ends = [one.end() for one in running]
    assert all(len(end) == 60 and "wrong" not in end for end in ends)
    assert sorted(fetched(tmp_path)) == sorted(names)
    assert all(not path.name.endswith(".part") for path in files(tmp_path))


def test_processes_that_share_a_small_cache_stay_within_its_bound(tmp_path: Path, readers: Any) -> None:
    names = [f"n{number}" for number in range(40)]
    running = [readers("plain", *names[first:], *names[:first], max_bytes=20_000) for first in (0, 13, 27)]
    ends = [one.end() for one in running]
    assert all(len(end) == 40 and "wrong" not in end for end in ends)
    assert sum(path.stat().st_size for path in files(tmp_path / "cache")) <= 20_000


def test_process_that_waits_takes_over_when_the_one_that_fetches_is_killed(tmp_path: Path, readers: Any) -> None:
    first = readers("blocks", "a")
    assert first.line() == "fetching"
    second = readers("asks", "a", wait_s=3600.0)
    assert second.line() == "asked"
    first.process.kill()
    assert len(second.end()) == 1
    assert fetched(tmp_path) == ["a", "a"]
    assert len(files(tmp_path / "cache")) == 1


def test_process_that_waits_for_one_that_hangs_fetches_by_itself(tmp_path: Path, readers: Any) -> None:
    first = readers("blocks", "a")
    assert first.line() == "fetching"
    second = readers("plain", "a", wait_s=0.1)
    assert len(second.end()) == 1
    assert fetched(tmp_path) == ["a", "a", "a"], "it keeps nothing: the file is the other's"
    assert len(first.end()) == 1
    assert [path.suffix for path in files(tmp_path / "cache")] == [""]


@pytest.mark.parametrize("how", ["halfway", "renaming"])
def test_crash_in_the_middle_leaves_no_entry(tmp_path: Path, readers: Any, how: str) -> None:
    assert readers(how, "a").end() == []
    assert [path.suffix for path in files(tmp_path / "cache")] == [".part"]
    assert "wrong" not in readers("plain", "a").end()
    assert fetched(tmp_path) == ["a", "a"]
    assert [path.suffix for path in files(tmp_path / "cache")] == [""]


def test_full_disk_is_no_error(tmp_path: Path, readers: Any) -> None:
    out = readers("full", "a", "b").end()
    assert " ".join(out).count("cannot be used (File too large). Training goes on") == 1
    assert "wrong" not in out
    assert files(tmp_path / "cache") == []


def test_counter_that_another_process_holds_for_ever_keeps_nobody(tmp_path: Path) -> None:
    """It is stopped while it makes room: names are read and not kept."""
    storage = Storage()
    read = cached(storage, tmp_path, BIG, wait_s=0.05)
    with (tmp_path / "size").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read("a").startswith(b"a")
        assert files(tmp_path) == []
    assert read("a").startswith(b"a")
    assert len(files(tmp_path)) == 1


@pytest.fixture
def shared() -> Iterator[Any]:
    """Start readers as other users: (user, name, ..) -> lines. `directory` has a cache that all of them may write to."""
    with tempfile.TemporaryDirectory() as name:  # no other user may enter pytest's
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "cache").mkdir()
        (directory / "cache").chmod(0o777)
        (directory / "log").touch()
        (directory / "log").chmod(0o666)

        def read(user: int, *names: str, max_bytes: int = BIG) -> list[str]:
            one = Reader(directory, f"user {user}", *names, max_bytes=max_bytes)
            out: str = one.process.communicate(timeout=60)[0]
            assert one.process.returncode == 0
            return out.splitlines()

        read.directory = directory  # type: ignore[attr-defined]
        yield read


@pytest.mark.root
def test_second_user_of_a_directory_reads_what_is_there_and_is_told_that_it_cannot_write(shared: Any) -> None:
    assert len(shared(60001, "a", "b")) == 2
    assert len(shared(60002, "a", "b")) == 2, "it needs to write nothing, so nothing is said"
    assert fetched(shared.directory) == ["a", "b"]
    said, *lengths = shared(60002, "c", "d", "a")
    assert re.fullmatch(
        r"The cache \S+/cache cannot be written by user 60002 \(Permission denied: \S+\)\. "
        r"Training goes on and reads from storage\. Give each user a directory of its own\.",
        said,
    )
    assert len(lengths) == 3
    assert "wrong" not in lengths
    assert fetched(shared.directory) == ["a", "b", "c", "c", "d", "d"], "a reader asks twice, and nothing is kept"
    assert len(files(shared.directory / "cache")) == 2


@pytest.mark.root
def test_user_whose_cache_has_files_of_another_that_cannot_be_removed_goes_on(shared: Any) -> None:
    cache = shared.directory / "cache"
    assert len(shared(60001, "a", "b")) == 2
    (cache / "size").unlink()  # the next one makes it, and counts
    for folder in cache.iterdir():
        folder.chmod(0o700)
    said, *lengths = shared(60002, *(f"n{number}" for number in range(12)), max_bytes=3000)
    assert "cannot be written by user 60002" in said
    assert len(lengths) == 12
    assert "wrong" not in lengths
    assert not [path for path in files(cache) if path.suffix == ".part"]


@pytest.mark.root
def test_directory_that_another_user_cannot_enter_is_no_error(shared: Any) -> None:
    (shared.directory / "cache").chmod(0o700)
    said, length = shared(60002, "a")
    assert "cannot be written by user 60002 (Permission denied" in said
    assert length != "wrong"
