"""The search for the rank that cannot be reached, when a group does not form. It asks the network, not an error's text.

Each rank listens for gloo before it arrives at the store, and as long as it is in the generation. A plain connection to that port
takes a round trip. Without an answer the link is broken; if the kernel refuses, the rank has ended or left. `gloo` closes the
connection together with its device.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from enum import Enum

KNOCK_S = 2.0
"""Longest time that all answers together are waited for."""
_AT_ONCE = 128
_REFUSALS = (errno.ECONNREFUSED, errno.ECONNRESET)


class Answer(Enum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    NONE = "none"


def lost_rank(answers: Mapping[int, Answer], member_of: Callable[[int], str]) -> int | None:
    """Return the rank that kept the group from forming; None: it is not known. `member_of`: a rank's worker.

    A link that is broken comes first: who left because of it refuses. Of those that refuse, the first to go is known only
    where they are of one worker. Pure.
    """
    silent = [rank for rank, answer in answers.items() if answer == Answer.NONE]
    if silent:
        return min(silent)
    gone = [rank for rank, answer in answers.items() if answer == Answer.REFUSED]
    return min(gone) if len({member_of(rank) for rank in gone}) == 1 else None


def knock(addresses: Mapping[int, tuple[str, int]], timeout_s: float = KNOCK_S) -> dict[int, Answer]:
    """Return each rank's answer to a connection to its address. Ends early once one has not answered in time."""
    ends_s = time.monotonic() + timeout_s
    answers: dict[int, Answer] = {}
    ranks = list(addresses)
    while ranks and Answer.NONE not in answers.values():
        now, ranks = ranks[:_AT_ONCE], ranks[_AT_ONCE:]
        answers |= _knock({rank: addresses[rank] for rank in now}, ends_s)
    return answers


def _knock(addresses: Mapping[int, tuple[str, int]], ends_s: float) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for rank, (host, port) in addresses.items():
                attempt = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
                attempt.setblocking(False)
                selector.register(attempt, selectors.EVENT_WRITE, rank)
                attempt.connect_ex((host, port))
            while len(answers) < len(addresses):
                ready = selector.select(max(0.0, ends_s - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    answers[key.data] = _answer(key.fileobj)
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
    return {rank: answers.get(rank, Answer.NONE) for rank in addresses}


def _answer(attempt: socket.socket) -> Answer:
    error = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error == 0:
        return Answer.ACCEPTED
    return Answer.REFUSED if error in _REFUSALS else Answer.NONE
