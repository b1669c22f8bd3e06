"""Order, mismatch, join and goodbye, as the coordinator's table decides them."""

from __future__ import annotations

import itertools
import json
import math
import random
import socket
from dataclasses import replace

import pytest

from regroup.horovod import coordinator
from regroup.horovod import negotiation as n
from regroup.horovod.channel import Frames, send
from regroup.horovod.errors import SHUT_DOWN


def ask(name: str, kind: str = n.ALLREDUCE, **fields: object) -> n.Request:
    given = {"shapes": ((2, 3),), "dtypes": ("float32",), **fields}
    return n.Request(kind, name, **given)  # type: ignore[arg-type]


def test_ranks_that_ask_in_different_orders_get_one_order() -> None:
    for orders in itertools.product(itertools.permutations("abc"), repeat=2):
        table = n.Table(2)
        calls = [(rank, name) for rank, names in enumerate(orders) for name in names]
        random.Random(str(orders)).shuffle(calls)
        given = [order.request.name for rank, name in calls for order in table.take(rank, ask(name))]
        assert sorted(given) == ["a", "b", "c"], orders
        assert not table.asked, "the table has let go of all names"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(
            ask("x", shapes=((2, 4),)),
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3]",
            id="shape",
        ),
        pytest.param(ask("x", dtypes=("int64",)), "Mismatched data types: One rank had type float32", id="type"),
        pytest.param(ask("x", kind=n.BROADCAST), "Mismatched operations: One rank did an ALLREDUCE", id="kind"),
        pytest.param(ask("x", op=1), "Mismatched reduction operation", id="operation"),
        pytest.param(ask("x", factors=(2.0, 1.0)), "Mismatched prescale and/or postscale factors", id="factors"),
        pytest.param(ask("x", root=1), "root ranks: One rank specified root rank 0", id="root"),
        pytest.param(ask("x", device="GPU"), "CPU/GPU device selection", id="device"),
        pytest.param(
            ask("x", shapes=((2, 3), (1,)), dtypes=("float32", "float32")),
            "Mismatched groups",
            id="length of the group",
        ),
        pytest.param(ask("x"), "", id="equal"),
    ],
)
def test_mismatch_is_an_error_of_the_name_in_horovods_words(other: n.Request, words: str) -> None:
    table = n.Table(2)
    assert table.take(0, ask("x")) == []
    (order,) = table.take(1, other)
    assert words in order.error if words else not order.error
    assert not table.asked


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        pytest.param(((5, 3),), "", id="rows may differ"),
        pytest.param(((0, 3),), "", id="no rows"),
        pytest.param(
            ((2, 4),),
            "with dimension 1 equal to 3, but another rank sent a tensor with dimension 1 equal to 4",
            id="columns may not",
        ),
        pytest.param(
            ((2,),), "One rank sent a tensor of rank 2, but another rank sent a tensor of rank 1", id="nor dimensions"
        ),
    ],
)
def test_allgather_lets_rows_differ(shapes: tuple[tuple[int, ...], ...], words: str) -> None:
    table = n.Table(2)
    table.take(0, ask("x", kind=n.ALLGATHER))
    (order,) = table.take(1, ask("x", kind=n.ALLGATHER, shapes=shapes))
    assert words in order.error if words else order.sizes == ((2,), (shapes[0][0],))


def test_joined_ranks_count_as_asking_until_all_have_joined() -> None:
    table, join = n.Table(3), n.Request(n.JOIN, n.JOIN)
    assert table.take(0, ask("x")) == []
    assert table.take(1, ask("x")) == []
    assert [order.request.name for order in table.take(2, join)] == ["x"], "what waited for the rank alone goes on"
    assert table.take(0, ask("y")) == []
    (order,) = table.take(1, ask("y"))
    assert not order.error
    assert table.take(0, ask("z", kind=n.ALLGATHER)) == []
    (order,) = table.take(1, ask("z", kind=n.ALLGATHER))
    assert "Allgather is not supported with Join" in order.error
    assert table.take(1, join) == []
    (order,) = table.take(0, join)
    assert (order.value, order.error) == (0, ""), "the rank that joined last"
    assert table.take(0, ask("w")) == [], "after it every rank counts again"


def test_goodbye_of_a_rank_ends_what_needs_it_and_nothing_else() -> None:
    table = n.Table(3)
    for rank in range(3):
        orders = table.take(rank, n.Request(n.ADD_SET, n.ADD_SET, ranks=(0, 1)))
    assert orders[0].value == 1
    table.take(0, ask("x"))
    (order,) = table.leave(2)
    assert order.error == SHUT_DOWN
    assert [order.error for order in table.take(1, ask("y"))] == [SHUT_DOWN]
    table.take(0, ask("z", set_id=1))
    (order,) = table.take(1, ask("z", set_id=1))
    assert not order.error


def test_ranks_that_all_wait_for_different_names_are_stuck() -> None:
    table = n.Table(2)
    table.take(0, ask("allreduce.a"))
    table.wait(0, (0, "allreduce.a"))
    assert not table.is_stuck(), "the other rank may still ask for a"
    table.take(1, ask("allreduce.b"))
    table.wait(1, (0, "allreduce.b"))
    assert table.is_stuck()
    first, second = table.give_up()
    assert "Ranks [0] asked for allreduce.a; ranks [1] did not, and wait for allreduce.b" in first.error
    assert "Ranks [1] asked for allreduce.b" in second.error
    assert not table.is_stuck()


def test_rank_that_has_said_goodbye_keeps_nobody_waiting_in_a_process_set_without_it() -> None:
    table = n.Table(3)
    for rank in range(3):
        table.take(rank, n.Request(n.ADD_SET, n.ADD_SET, ranks=(0, 1)))
    table.leave(2)
    for rank, name in ((0, "allreduce.a"), (1, "allreduce.b")):
        assert not table.is_stuck()
        table.take(rank, ask(name, set_id=1))
        table.wait(rank, (1, name))
    assert table.is_stuck()


def test_rank_whose_wait_has_ended_is_not_stuck_when_another_asks_for_the_name_again() -> None:
    table = n.Table(2)
    table.take(0, ask("allreduce.w"))
    table.wait(0, (0, "allreduce.w"))
    assert table.take(1, ask("allreduce.w"))[0].error == ""
    table.take(1, ask("allreduce.w"))
    table.wait(1, (0, "allreduce.w"))
    assert not table.is_stuck(), "rank 0 saves a file, and will ask"
    table.wait(0, (0, "allreduce.w"))
    assert not table.is_stuck(), "a late word of the first wait says nothing about the second"
    assert table.take(0, ask("allreduce.w"))[0].error == ""
    assert not table.waits, "the table has let go of all waits"


def test_request_of_a_rank_that_has_said_goodbye_counts_no_more() -> None:
    table = n.Table(2)
    table.take(0, ask("x"))
    assert [order.error for order in table.leave(0)] == [SHUT_DOWN], "rank 0 would not run it"
    assert [order.error for order in table.take(1, ask("x"))] == [SHUT_DOWN]
    assert not table.asked


def test_removed_process_set_ends_what_waits_in_it() -> None:
    table = n.Table(3)
    for rank in range(3):
        table.take(rank, n.Request(n.ADD_SET, n.ADD_SET, ranks=(0, 1)))
    assert table.take(0, ask("x", set_id=1)) == []
    table.wait(0, (1, "x"))
    for rank in range(3):
        orders = table.take(rank, n.Request(n.REMOVE_SET, n.REMOVE_SET, root=1))
    assert [(order.request.name, bool(order.error)) for order in orders] == [("x", True), (n.REMOVE_SET, False)]
    assert "The process set 1 does not exist, or was removed." in orders[0].error
    assert not table.asked
    assert not table.waits
    assert table.leave(0) == []


def test_process_sets_are_added_once_and_removed() -> None:
    table = n.Table(2)
    add = n.Request(n.ADD_SET, n.ADD_SET, ranks=(1,))
    table.take(0, add)
    assert table.take(1, add)[0].value == 1
    table.take(0, add)
    assert "exists already" in table.take(1, add)[0].error
    assert table.take(1, ask("x", set_id=1))[0].error == "", "a set of one rank waits for no other"
    remove = n.Request(n.REMOVE_SET, n.REMOVE_SET, root=1)
    table.take(0, remove)
    assert not table.take(1, remove)[0].error
    assert "does not exist" in table.take(1, ask("x", set_id=1))[0].error
    for ranks in ((), (0, 2), (0, 0)):
        table.take(0, replace(add, ranks=ranks))
        assert "needs different ranks" in table.take(1, replace(add, ranks=ranks))[0].error


def test_requests_and_orders_travel_as_json() -> None:
    request = ask("x", splits=(1, 2), ranks=(0,), factors=(0.5, 2.0), root=1, op=3)
    assert n.request_of(json.loads(json.dumps(n.to_wire(request)))) == request
    order = n.Order(request, "why", ((1, 2), (3,)), 4)
    assert n.order_of(json.loads(json.dumps(n.to_wire(order)))) == order
    with pytest.raises((ValueError, TypeError)):
        n.request_of(["allreduce"])


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        pytest.param({}, 10.0, id="default"),
        pytest.param({coordinator.STALL_S: "2.5"}, 2.5, id="given"),
        pytest.param({coordinator.STALL_S: "0.001"}, 0.1, id="never less than a tenth"),
        pytest.param({coordinator.STALL_S: "0"}, math.inf, id="0 turns it off"),
        pytest.param({coordinator.STALL_S: "inf"}, math.inf, id="endless"),
        pytest.param({coordinator.STALL_S: "1e300"}, math.inf, id="longer than select can wait"),
        pytest.param({coordinator.STALL_S: "nan"}, 10.0, id="no number"),
        pytest.param({coordinator.STALL_S: "soon"}, 10.0, id="a word"),
        pytest.param({coordinator.STALL_S: "5", coordinator.STALL_OFF: "1"}, math.inf, id="turned off"),
        pytest.param({coordinator.STALL_OFF: "0"}, 10.0, id="not turned off"),
    ],
)
def test_stall_time(environ: dict[str, str], want: float) -> None:
    assert coordinator.stall_s(environ) == want


def test_ranks_hear_of_a_coordinator_that_fails() -> None:
    token = bytes(coordinator.HELLO_BYTES)
    listener = coordinator.listen()
    port = listener.getsockname()[1]
    serving = coordinator.Coordinator(listener, 1, token)
    serving.thread.start()
    with socket.create_connection(("localhost", port), timeout=30) as rank:
        rank.sendall(token + bytes(4))
        send(rank, {"nonsense": 1})
        (message,) = Frames().feed(rank.recv(1 << 16))
    assert message == {"broken": "The coordinator on rank 0 has failed: KeyError: 'ask'."}
    serving.thread.join(30)
    assert not serving.thread.is_alive()
