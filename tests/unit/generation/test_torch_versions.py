"""What differs between torch versions, with the torch that is installed; `make test-oldest` runs this with the oldest."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

import regroup
from harness.polling import until
from regroup import torch_versions
from regroup.parallel import fsdp
from regroup.protocol import env, local

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "library.md"
OLD = "torch 2.10.1 is older than 2.11, the oldest that Regroup runs with: use an image with torch 2.11 to 2.13."
NEW = "torch 2.14.0.dev20261101 is newer than 2.13, the newest that Regroup is tested with. If something fails, try torch 2.13."


@pytest.mark.parametrize(
    ("version", "refuses", "warns"),
    [
        pytest.param("2.10.1", OLD, "", id="older"),
        pytest.param("1.13.1+cu117", OLD.replace("2.10.1", "1.13.1+cu117"), "", id="much older"),
        pytest.param("2.11.0a0+git5811a8d", "", "", id="the oldest, built by somebody"),
        pytest.param("2.11.0+cu130", "", "", id="the oldest"),
        pytest.param("2.13.2", "", "", id="the newest"),
        pytest.param("2.14.0.dev20261101", "", NEW, id="newer"),
        pytest.param("main", "", "", id="no number"),
    ],
)
def test_range_of_versions(version: str, refuses: str, warns: str) -> None:
    assert torch_versions.judge(version) == (refuses, warns)


def test_torch_that_is_installed_is_in_the_range() -> None:
    """`make test-oldest` runs this with the oldest."""
    assert torch_versions.judge(torch.__version__) == ("", "")


def test_page_has_the_range_and_the_table() -> None:
    page = PAGE.read_text()
    assert torch_versions.table() in page
    oldest, newest = (".".join(map(str, one)) for one in (torch_versions.OLDEST, torch_versions.NEWEST))
    assert f"torch {oldest} to {newest}" in page


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Return what an agent was told, once the one message has been read."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen()
    monkeypatch.setenv(env.SOCKET, str(tmp_path / "agent.sock"))
    monkeypatch.setenv(env.LOCAL_RANK, "1")
    monkeypatch.setenv(env.INCARNATION, "3")
    told: list[Any] = []

    def read() -> None:
        with listener, listener.accept()[0] as connection:
            told.append(local.FROM_TRAINER.decode_line(connection.recv(1 << 16)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def read_all() -> list[Any]:
        thread.join(5.0)
        return told

    return read_all


def test_session_under_a_torch_that_is_too_old_is_refused_and_the_agent_hears_why(
    says: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    monkeypatch.delitem(vars(regroup), "session", raising=False)
    with pytest.raises(regroup.RegroupError) as refused:
        _ = regroup.session
    assert str(refused.value) == OLD
    assert says() == [local.CannotRun(1, 3, OLD)]


@pytest.mark.parametrize(
    "prepare", [fsdp.sum_gradients, lambda model: fsdp.Uses(model, print)], ids=["sums", "uses, which come first"]
)
def test_model_with_fsdp_under_a_torch_without_its_recovery_is_refused(
    says: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch, prepare: Callable[[torch.nn.Module], Any]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.0+cpu")
    model = torch.nn.Linear(1, 1)
    prepare(model)  # one without it may have this torch
    monkeypatch.setattr(fsdp, "modules_of", lambda _model: iter([model]))
    with pytest.raises(
        regroup.RegroupError, match=r"torch 2\.12\.0\+cpu is older than 2\.13, and the model uses fully_shard"
    ):
        prepare(model)
    (told,) = says()
    assert "fully_shard" in told.message


def test_torch_that_is_too_old_is_refused_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.SOCKET, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(regroup.RegroupError, match="is older than"):
        torch_versions.require()


@pytest.mark.parametrize(("local_rank", "said"), [("0", f"regroup: {NEW}\n"), ("1", "")])
def test_torch_that_is_newer_is_a_warning_of_one_process(
    local_rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env.LOCAL_RANK, local_rank)
    monkeypatch.setattr(torch, "__version__", "2.14.0.dev20261101")
    monkeypatch.setattr(torch_versions, "_warned", set())
    for _ in ("session", "device", "mesh"):  # each name that the script uses asks
        torch_versions.require()
    assert capsys.readouterr().err == said


def two_ranks(timeout_s: float) -> list[Any]:
    """Return gloo's backends of two ranks, in this process."""
    store = HashStore()
    made: dict[int, Any] = {}

    def connect(rank: int) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=10)
        made[rank] = ProcessGroupGloo(store, rank, 2, options)
        made[rank].set_timeout(timedelta(seconds=timeout_s))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(2)]


def ended(start: Callable[[], Any]) -> Any:
    work = start()
    until(work.is_completed, "the collective ends")
    return work


def test_collective_that_succeeded_has_no_error() -> None:
    ranks = two_ranks(10.0)
    works = [rank.allreduce([torch.ones(2)]) for rank in ranks]
    for work in works:
        until(work.is_completed, "the collective ends")
        assert torch_versions.error_of(work) is None


def test_error_of_a_collective_that_failed() -> None:
    ranks = two_ranks(0.05)
    failed = ended(lambda: ranks[0].allreduce([torch.ones(2)]))  # the other rank does not come
    assert "imed out" in str(torch_versions.error_of(failed))


class LateWork:
    """A work of torch 2.11 whose `wait` takes longer than its error is waited for: NCCL's abort."""

    def __init__(self) -> None:
        self.returns = threading.Event()

    def exception(self) -> None:
        raise TypeError("Unregistered type : std::exception_ptr")

    def wait(self) -> None:
        self.returns.wait()
        raise RuntimeError("the abort is over")


def test_thread_whose_wait_came_too_late_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "_SLICES", 2)
    monkeypatch.setattr(torch_versions._Waiter, "_current", None)
    work = LateWork()
    before = set(threading.enumerate())
    assert "has not said which one" in str(torch_versions.error_of(work))
    (thread,) = set(threading.enumerate()) - before
    work.returns.set()
    thread.join(5.0)
    assert not thread.is_alive()
