"""The groups of a generation that is left while they form: what a helper thread still makes holds nothing."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from harness.polling import until
from regroup.errors import GroupBroken
from regroup.generation.adoption import Arrival
from regroup.generation.groups import Groups
from regroup.generation.sockets import _inodes, device_alone
from regroup.generation.team import form_team
from regroup.protocol.local import Assignment
from tests.builders.generations import make_assignment, make_document


def assignment(port: int) -> Assignment:
    return Assignment(
        number=5, uid="u", kind="planned", member=True, rank=0, world_size=2, local_rank=0, local_world_size=1, group_rank=0,
        pod_uid="p", store_host="127.0.0.1", store_port=port, store_prefix="j/5/u", hosts_store=True, document_digest="d",
        document=None,
    )  # fmt: skip


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def test_store_that_is_there_only_after_the_abort_holds_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next generation may have its store at the same port, in this process."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        port, fd = listening.getsockname()[1], os.dup(listening.fileno())
    groups = Groups(assignment(port), "127.0.0.1", torch.device("cpu"))
    opens, left = threading.Event(), threading.Event()
    opened = groups._open_store

    def late(listen_fd: int | None) -> object:
        opens.set()
        assert left.wait(30)
        return opened(listen_fd)

    monkeypatch.setattr(groups, "_open_store", late)

    def abort() -> None:
        assert opens.wait(30)
        groups.abort()

    aborter = threading.Thread(target=abort)
    aborter.start()
    with pytest.raises(GroupBroken, match="interrupted"):
        groups.form(Arrival(None, 0, 0), fd)
    aborter.join()
    groups.close()
    left.set()
    until(lambda: not any(t.name == "regroup-form" for t in threading.enumerate()), "the helper thread has ended")
    until(lambda: is_free(port), "the port is free", timeout_s=10)


def num_listening() -> int:
    """Return how many of this process's sockets listen."""
    found = 0
    for fd in _inodes():
        with socket.socket(fileno=os.dup(fd)) as one:
            if one.family != socket.AF_UNIX:
                found += one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return found


def test_world_of_one_listens_for_nobody_and_its_collectives_work() -> None:
    device_alone()
    listener = socket.create_server(("127.0.0.1", 0))
    before = num_listening()
    document = make_document(listener.getsockname()[1], 1)
    groups = Groups(make_assignment(document, 0), "127.0.0.1", torch.device("cpu"), {"data": (0,)})
    groups.form(Arrival(None, 0, 0), listener.detach())
    assert groups.sockets.lost() is None
    assert num_listening() == before  # the store

    ours = torch.full((3,), 2.0)
    groups.wait([groups.launch("allreduce", [ours])])
    part = groups.part("data")
    part.wait([part.launch("allreduce", [ours])])
    form_team(groups, [0], "alone").all_reduce(ours)
    users, gathered, objects = ours.clone(), torch.zeros(3), [None]
    dist.all_reduce(users, group=groups.world)
    dist.all_gather([gathered], users, group=groups.world)
    dist.broadcast(users, group=groups.world, group_src=0)
    dist.barrier(group=groups.world)
    assert users.tolist() == gathered.tolist() == ours.tolist() == [2.0] * 3
    dist.all_gather_object(objects, {"rank": 0}, group=groups.world)
    assert objects == [{"rank": 0}]
    groups.close()
    with pytest.raises(GroupBroken):
        groups.launch("allreduce", [ours])
