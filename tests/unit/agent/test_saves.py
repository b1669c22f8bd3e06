"""When a checkpoint is complete: tables of looks at a directory, and a real directory with and without inotify."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from _regroup_agent import events as ev
from _regroup_agent import save_watcher
from _regroup_agent.save_watcher import SaveWatcher, list_files, watched_directory
from _regroup_agent.saves import LONGEST_S, Files, Listing, Saves, is_ignored
from regroup.protocol import env, wire
from tests.unit.agent.drive import Drive

OLD, NEW = (1, 100), (2, 100)
FIRST: Files = {"a": OLD}


def completed(*looks: tuple[float, Files]) -> list[float]:
    """Return when a checkpoint was complete."""
    saves = Saves()
    return [at_s for at_s, files in looks if saves.look(Listing(files, [], False), at_s)]


@pytest.mark.parametrize(
    ("looks", "want"),
    [
        pytest.param([(0.0, FIRST), (9.0, FIRST)], [], id="a file that was there at first is old"),
        pytest.param([(0.0, {}), (1.0, FIRST), (1.9, FIRST), (2.0, FIRST), (9.0, FIRST)], [2.0], id="a new file, once"),
        pytest.param([(0.0, FIRST), (1.0, {"a": NEW}), (2.0, {"a": NEW})], [2.0], id="a file that was replaced"),
        pytest.param([(0.0, FIRST), (1.0, {"a": (0, 100)}), (2.0, {"a": (0, 100)})], [2.0], id="by one of a slower clock"),
        pytest.param(
            [(0.0, {}), (1.0, {"a": (1, 5)}), (1.9, {"a": (2, 9)}), (2.8, {"a": (2, 9)}), (2.9, {"a": (2, 9)})],
            [2.9],
            id="a file that grows is waited for",
        ),
        pytest.param(
            [(0.0, {}), (1.0, FIRST), (1.9, {"a": OLD, "b": OLD}), (2.5, {"a": OLD, "b": OLD}), (3.0, {"a": OLD, "b": OLD})],
            [3.0],
            id="several files are one checkpoint",
        ),
        pytest.param([(0.0, FIRST), (1.0, {}), (9.0, {})], [], id="a file that is deleted"),
        pytest.param(
            [(0.0, FIRST), (1.0, {"a": OLD, "b": NEW}), (3.0, {"b": NEW})], [3.0], id="an old one is deleted after a new one"
        ),
    ],
)  # fmt: skip
def test_checkpoint_is_complete_once_files_changed_and_settled(
    looks: list[tuple[float, Files]], want: list[float]
) -> None:
    assert completed(*looks) == want


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        pytest.param({"a.pt": OLD, "metrics.json": OLD}, {"metrics.json": NEW}, [], id="metrics"),
        pytest.param({"a.pt": OLD}, {"c-1/trainer_state.json": NEW}, [], id="a new description beside an old checkpoint"),
        pytest.param({}, {"c-1/model.pt": NEW, "c-1/trainer_state.json": NEW}, [2.0], id="a checkpoint and its description"),
        pytest.param({"model.json": OLD}, {"model.json": NEW}, [2.0], id="XGBoost's models are all that there is"),
        pytest.param({}, {"model-1.JSON": NEW}, [2.0], id="the first of them"),
    ],
)  # fmt: skip
def test_description_alone_is_no_checkpoint(before: Files, after: Files, want: list[float]) -> None:
    now = {**before, **after}
    assert completed((0.0, before), (1.0, now), (2.0, now)) == want


def test_checkpoint_is_complete_after_its_description() -> None:
    """transformers writes trainer_state.json last."""
    whole = {"model.pt": NEW, "trainer_state.json": NEW}
    assert completed((0.0, {}), (1.0, {"model.pt": NEW}), (1.9, whole), (2.5, whole), (2.9, whole)) == [2.9]


def test_rewritten_metrics_are_no_checkpoint_however_large() -> None:
    assert ticks(lambda tick: {"a": OLD, "metrics.json": (tick, 900)}) == []


@pytest.mark.parametrize(
    ("files", "want"),
    [
        pytest.param(
            {"b": (4, 1), "c": (5, 1), "hidden": (3, 1)},
            [],
            id="one was deleted, and an old one is listed in its place",
        ),
        pytest.param({"b": (4, 1), "c": (5, 1), "new": (6, 1)}, [2.0], id="a new one"),
        pytest.param({"b": (6, 1), "c": (5, 1), "hidden": (3, 1)}, [2.0], id="one was written anew"),
    ],
)
@pytest.mark.parametrize("is_cut", [True, False], ids=["still cut", "whole again"])
def test_file_that_a_cut_listing_did_not_read_is_not_new(files: Files, want: list[float], is_cut: bool) -> None:
    saves, before = Saves(), {"a": (2, 1), "b": (4, 1), "c": (5, 1)}
    assert not saves.look(Listing(before, [], True), 0.0)
    assert [at_s for at_s in (1.0, 2.0, 9.0) if saves.look(Listing(files, [], is_cut), at_s)] == want


def test_file_is_new_by_its_name_where_all_entries_were_read() -> None:
    """The clock of the node that wrote it may be behind."""
    assert completed((0.0, {"a": (5, 1)}), (1.0, {"a": (5, 1), "b": (3, 1)}), (2.0, {"a": (5, 1), "b": (3, 1)})) == [
        2.0
    ]


def ticks(files_at: Callable[[int], Files]) -> list[float]:
    """Return when a checkpoint was complete, of looks each 0.5 s for 40 s."""
    return completed((0.0, FIRST), *((tick / 2, files_at(tick)) for tick in range(1, 81)))


def test_script_that_saves_often_is_seen_to_save() -> None:
    """None of its files is ever quiet for a second, and no look misses a change."""
    same_name = ticks(lambda tick: {"a": OLD, "ckpt.pt": (tick, 100)})
    assert same_name[0] == 1.0, "the second write proves that the first was complete"
    new_names = ticks(lambda tick: {f"ckpt-{n}.pt": OLD for n in range(tick)})
    assert new_names[0] == LONGEST_S + 0.5
    newest_only = ticks(lambda tick: {f"ckpt-{tick}.pt": OLD})
    assert newest_only[0] == LONGEST_S + 0.5


def test_small_file_that_is_rewritten_hides_no_checkpoint_and_is_none() -> None:
    def files_at(tick: int) -> Files:
        return {"a": OLD, "counter": (tick, 3 + tick % 2)} | ({"ckpt.pt": (9, 900)} if tick >= 20 else {})

    assert ticks(files_at) == [11.0]


def test_slow_write_is_no_checkpoint_before_its_end() -> None:
    assert ticks(lambda tick: {"a": OLD, "ckpt.pt": (tick, 1000 + tick)}) == []


@pytest.mark.parametrize(
    ("name", "want"),
    [("ckpt.pt", False), ("checkpoint-500", False), ("__0_0.distcp", False), ("trainer_state.json", False)]
    + [(name, True) for name in ("ckpt.pt.tmp", ".ckpt.pt.x1", "tmp-checkpoint-500", "CKPT.PART", "train.log", "loss.jsonl")]
    + [(name, True) for name in ("events.out.tfevents.1.host", "wandb", "config.yaml", "hparams.yml")],
)  # fmt: skip
def test_names_that_are_no_checkpoints(name: str, want: bool) -> None:
    assert is_ignored(name) is want


def test_listing_is_bounded_and_follows_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b" / "c" / "d" / "e").mkdir(parents=True)
    for name in ("one.pt", "a/two.pt", "a/b/c/d/five.pt", "a/b/c/d/e/six.pt", "empty.pt", "x.tmp"):
        (tmp_path / name).write_text("" if name == "empty.pt" else "x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    files, directories, is_cut = list_files(str(tmp_path))
    assert not is_cut
    assert {str(Path(path).relative_to(tmp_path)) for path in files} == {"one.pt", "a/two.pt", "a/b/c/d/five.pt"}
    assert [str(Path(path).relative_to(tmp_path)) for path in directories] == [".", "a", "a/b", "a/b/c", "a/b/c/d"]
    monkeypatch.setattr(save_watcher, "MAX_ENTRIES", 3)
    assert len(list_files(str(tmp_path)).files) <= 3
    assert list_files(str(tmp_path)).is_cut
    assert list_files(str(tmp_path / "gone")) == ({}, [str(tmp_path / "gone")], False)


def test_newest_checkpoint_is_listed_where_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (3, 9, 1, 7, 5):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "model.pt").write_text("x")
        os.utime(tmp_path / f"checkpoint-{number}", (number, number))
    monkeypatch.setattr(save_watcher, "MAX_ENTRIES", 7)
    found = list_files(str(tmp_path))
    assert [Path(path).parent.name for path in found.files] == ["checkpoint-9", "checkpoint-7"]
    assert found.is_cut


@contextmanager
def watching(directory: Path, poll_s: float) -> Iterator[threading.Semaphore]:
    """Watch a directory; each completed checkpoint releases the semaphore."""
    saved, looked = threading.Semaphore(0), threading.Event()
    watcher = SaveWatcher(str(directory), saved.release, poll_s=poll_s)
    listed = save_watcher.list_files

    def listing(path: str) -> Listing:
        found = listed(path)
        looked.set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_watcher, "list_files", listing)
        watcher.start()
        watcher.start()
        assert looked.wait(10)
        yield saved
        watcher.stop()


@pytest.mark.parametrize("inotify", [True, False], ids=["inotify", "polling"])
@pytest.mark.parametrize("way", ["rename", "close", "directory"])
def test_checkpoint_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inotify: bool, way: str) -> None:
    """With inotify the next listing would come in 600 s. Without it only listings tell, as for files of another node."""
    if not inotify:
        monkeypatch.setattr(save_watcher._Inotify, "watch", lambda *_: False)
    (tmp_path / "old.pt").write_text("old")
    with watching(tmp_path, poll_s=600.0 if inotify else 0.2) as saved:
        for number in range(2):
            if way == "rename":
                (tmp_path / "new.tmp").write_text(f"new {number}")
                (tmp_path / "new.tmp").replace(tmp_path / "new.pt")
            elif way == "close":
                (tmp_path / "old.pt").write_text(f"new {number}")
            else:
                (tmp_path / "tmp-1").mkdir()
                (tmp_path / "tmp-1" / "model.pt").write_text("new")
                (tmp_path / "tmp-1").replace(tmp_path / f"checkpoint-{number}")
            assert saved.acquire(timeout=20), f"checkpoint {number} was not seen"
        assert not saved.acquire(blocking=False)


# --- what the agent says -------------------------------------------------------------------------------------------


def script(group_rank: int = 0, saves: bool = True, tier: str = "Script") -> Drive:
    drive = Drive(1, saves=saves).feed(ev.Connected()).command(wire.Welcome(tier))
    return drive.generation(1, world_size=9, group_rank=group_rank)


@pytest.mark.parametrize(
    ("drive", "want"),
    [
        pytest.param(script(), True, id="rank 0"),
        pytest.param(script(1), True, id="the second member, where the first one's node tells nothing"),
        pytest.param(script(2), False, id="a file server is not asked by thousands"),
        pytest.param(script(saves=False), False, id="there is no checkpoint directory"),
        pytest.param(script(tier="Session"), False, id="a session loses nothing by growing"),
    ],
)
def test_who_watches_the_directory(drive: Drive, want: bool) -> None:
    assert drive.core.sees_saves is want


def test_every_report_says_how_old_the_newest_checkpoint_is() -> None:
    drive = script()
    assert drive.report.saved_age_s is None
    assert drive.feed(ev.Saved()).wait(0.1).bodies(wire.Changed), "it is said at once"
    assert drive.report.saved_age_s == pytest.approx(0.1)
    assert not drive.wait(7.0).bodies(), "its age alone is no news"
    assert drive.report.saved_age_s == pytest.approx(7.1)
    assert drive.feed(ev.Saved()).wait(0.1).bodies(wire.Changed)


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        pytest.param({env.CHECKPOINT_DIR: "/c", env.ELASTIC: "1"}, "/c", id="elastic"),
        pytest.param({env.CHECKPOINT_DIR: "/c"}, "", id="a fixed size: nothing waits for a checkpoint"),
        pytest.param({env.ELASTIC: "1"}, "", id="no checkpoint directory"),
    ],
)
def test_directory_that_is_watched(environ: dict[str, str], want: str) -> None:
    assert watched_directory(environ) == want
