"""The groups of a generation that is left while they form: what a helper thread still makes holds nothing."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch

from harness.polling import until
from regroup.errors import GroupBroken
from regroup.generation.adoption import Arrival
from regroup.generation.groups import Groups
from regroup.protocol.local import Assignment


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
