"""Groups of real ranks: what a collective that fails says, and that forming that is interrupted leaves nothing behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from harness.polling import until
from regroup.errors import GroupBroken
from regroup.generation.adoption import Arrival
from regroup.generation.groups import Groups
from regroup.generation.rows import TREE_RANKS
from regroup.protocol.local import Assignment
from tests.builders.generations import make_assignment, make_document


def assignment(store_port: int) -> Assignment:
    """Return the part of rank 0 of two, which hosts the store; the other one never comes."""
    return make_assignment(make_document(store_port), 0)


def forming() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "regroup-form"]


def sockets() -> set[str]:
    return {link for fd in Path("/proc/self/fd").iterdir() if (link := _link(fd)).startswith("socket:")}


def _link(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:
        return ""


def abort_once_it_waits(groups: Groups) -> None:
    """Abort when the barrier was entered: the last thing before the wait for the others."""
    part = groups.assignment
    try:
        store = TCPStore(part.store_host, part.store_port, is_master=False, timeout=timedelta(seconds=30))
        PrefixStore(part.store_prefix, store).wait(["arrived"])
    finally:
        groups.abort()


@pytest.mark.parametrize("moment", ["before the store is open", "while it waits for the others"])
def test_interrupted_form_leaves_no_thread_and_no_socket(moment: str) -> None:
    before = sockets()
    listener = socket.create_server(("127.0.0.1", 0))
    groups = Groups(assignment(listener.getsockname()[1]), "127.0.0.1", torch.device("cpu"))
    if moment == "before the store is open":
        groups.abort()
    else:
        threading.Thread(target=abort_once_it_waits, args=(groups,)).start()
    with pytest.raises(GroupBroken, match=r"interrupted|ended"):
        groups.form(Arrival(None, 0, 0), listener.detach())
    until(lambda: not forming(), "no helper thread waits on its own store")
    groups.close()
    del groups
    until(lambda: sockets() <= before, "no socket is left open", details=lambda: str(sockets() - before))


@pytest.mark.parametrize(
    ("what", "error", "peer"),
    [
        pytest.param("killed", "PeerLost", 1, id="a rank is killed"),
        pytest.param("closed", "PeerLost", 1, id="a rank leaves its groups"),
        pytest.param("type", "BackendError", None, id="the backend refuses the tensor"),
        pytest.param("aborted", "Aborted", None, id="the groups are ended here"),
        pytest.param("ring-killed", "PeerLost", 1, id="a rank is killed in a ring"),
        pytest.param("ring-closed", "PeerLost", 1, id="a rank leaves its groups in a ring"),
        pytest.param("ring-aborted", "Aborted", None, id="the groups are ended here, in a ring"),
        pytest.param("edge-killed", "PeerLost", 1, id="a rank is killed in a pipeline"),
        pytest.param("edge-closed", "PeerLost", 1, id="a rank leaves its groups in a pipeline"),
        pytest.param("edge-aborted", "Aborted", None, id="the groups are ended here, in a pipeline"),
        pytest.param("unformed", "PeerLost", 1, id="a rank is killed before it connects"),
    ],
)
def test_collective_that_fails_says_whether_a_rank_was_lost(what: str, error: str, peer: int | None) -> None:
    lines = run_ranks(3, what)
    assert len(lines) == (3 if what == "type" else 2)
    assert {line["error"] for line in lines} == {error}, lines
    # All are on one host: who was connected to by the lost rank cannot tell which one that was.
    assert {line["peer"] for line in lines} <= {peer, None}, lines
    if what == "unformed":  # who fails first finds the others, and one rank that refuses
        assert peer in {line["peer"] for line in lines}, lines
    if what == "type":
        assert all("no rank was lost: Invalid scalar type" in line["text"] for line in lines), lines


def test_rows_along_a_tree_are_those_of_the_ring() -> None:
    lines = run_ranks(TREE_RANKS, "rows")
    assert sorted(line["rank"] for line in lines) == list(range(TREE_RANKS)), lines


@pytest.mark.parametrize(
    ("what", "errors"),
    [
        pytest.param("rows-killed", {"PeerLost"}, id="a rank is killed before it gives its row"),
        pytest.param("rows-aborted", {"Aborted", "PeerLost"}, id="the groups are ended here, and a row is missing"),
        pytest.param("given-killed", {"PeerLost", None}, id="a rank is killed once it has given its row"),
        pytest.param("first-killed", {"PeerLost"}, id="the first rank is killed when it has all rows"),
    ],
)
def test_lost_rank_ends_every_wait_for_rows_along_a_tree(what: str, errors: set[str | None]) -> None:
    lines = run_ranks(5, what)
    lost = 0 if what.startswith("first-") else 1
    assert sorted(line["rank"] for line in lines) == [rank for rank in range(5) if rank != lost], lines
    assert {line["error"] for line in lines} <= errors, lines
    if what == "rows-aborted":  # who ends them first is taken for lost by the others
        assert "Aborted" in {line["error"] for line in lines}, lines
    else:
        assert {line["peer"] for line in lines} <= {lost, None}, lines


def run_ranks(world_size: int, what: str) -> list[dict[str, Any]]:
    """Return what the ranks of tests.trainer.outcome_ranks said."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.trainer.outcome_ranks", str(world_size), what],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]
