"""Who is named when a group does not form: a decision by answers, and the answers of real sockets on this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from regroup.generation.reach import Answer, knock, lost_rank

HERE = "127.0.0.1"
YES, NO, NOBODY = Answer.ACCEPTED, Answer.REFUSED, Answer.NONE


def member_of(rank: int) -> str:
    """Two ranks of each worker."""
    return f"pod-{rank // 2}"


@pytest.mark.parametrize(
    ("answers", "rank"),
    [
        pytest.param({}, None, id="nobody is there to be asked"),
        pytest.param({2: YES, 4: YES}, None, id="all answer"),
        pytest.param({2: YES, 4: NOBODY}, 4, id="a link is broken"),
        pytest.param({2: NO, 4: NOBODY}, 4, id="a link is broken, and another rank has left because of it"),
        pytest.param({2: NOBODY, 4: NOBODY}, 2, id="two links are broken"),
        pytest.param({2: YES, 4: NO}, 4, id="a process has ended"),
        pytest.param({2: YES, 4: NO, 5: NO}, 4, id="two processes of one worker"),
        pytest.param({2: NO, 4: NO}, None, id="two workers: one may have left because of the other"),
    ],
)
def test_which_rank_is_named(answers: dict[int, Answer], rank: int | None) -> None:
    assert lost_rank(answers, member_of) == rank


@pytest.fixture
def full() -> Iterator[int]:
    """A port at which nobody answers: connections wait for a place in its queue, which is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind((HERE, 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        first.connect((HERE, port))
        second.setblocking(False)
        second.connect_ex((HERE, port))
        yield port


@pytest.fixture
def closed() -> int:
    with socket.create_server((HERE, 0)) as listener:
        return int(listener.getsockname()[1])


def test_answers_of_real_sockets(full: int, closed: int) -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        began_s = time.monotonic()
        assert knock({0: (HERE, port), 3: (HERE, closed)}) == {0: YES, 3: NO}
        assert time.monotonic() - began_s < 1
        assert knock({0: (HERE, port), 1: (HERE, closed), 2: (HERE, full)}, 0.3) == {0: YES, 1: NO, 2: NOBODY}


def test_many_are_asked_a_part_at_a_time_until_one_does_not_answer(full: int) -> None:
    with socket.create_server((HERE, 0), backlog=1000) as listener:
        here = (HERE, listener.getsockname()[1])
        assert len(knock(dict.fromkeys(range(300), here))) == 300
        answers = knock({rank: (HERE, full) if rank == 7 else here for rank in range(300)}, 0.3)
        assert answers[7] == NOBODY
        assert len(answers) < 300
