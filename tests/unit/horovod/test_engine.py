"""The end of rank 0, as the engine of another rank sees it."""

from __future__ import annotations

import socket
import threading
from typing import Any, cast

import pytest

from regroup.horovod import negotiation as n
from regroup.horovod.channel import send
from regroup.horovod.collectives import Collectives
from regroup.horovod.engine import Engine
from regroup.horovod.errors import HorovodInternalError
from regroup.horovod.handles import Handle


class Slow:
    """Collectives that last until the test lets them end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def run(self, order: n.Order, handle: Handle | None) -> str:
        del order, handle
        self.began.set()
        assert self.may_end.wait(10)
        return "done"


@pytest.mark.timeout(30)
def test_collective_that_rank_0_has_ended_already_ends_well_and_one_without_an_order_does_not() -> None:
    here, there = socket.socketpair()
    slow = Slow()
    engine = Engine(here, cast(Collectives, slow))
    ordered = engine.ask(Handle(n.Request("allreduce", "last"), ()))
    waiting = engine.ask(Handle(n.Request("allreduce", "never"), ()))
    send(there, {"orders": [n.to_wire(n.Order(ordered.request))]})
    assert slow.began.wait(10)
    there.close()
    with pytest.raises(HorovodInternalError, match="Rank 0 has ended"):
        waiting.wait()
    assert not ordered.done.is_set()
    slow.may_end.set()
    result: Any = ordered.wait()
    assert result == "done"
    with pytest.raises(HorovodInternalError, match="Rank 0 has ended"):
        engine.ask(Handle(n.Request("allreduce", "later"), ()))
    engine.close()
