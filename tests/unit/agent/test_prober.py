"""The attempts themselves, against this machine's kernel. What a dead machine does is in tests/trainer/test_observers.py."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator

import pytest

from _regroup_agent import prober
from _regroup_agent.observing import Watch
from _regroup_agent.prober import Prober, QuietPort
from regroup.protocol.wire import Observed

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other ten times as fast."""
    monkeypatch.setattr(prober, "WITHIN_S", 0.05)
    for name in ("EVERY_S", "SELDOM_S"):
        monkeypatch.setattr(f"_regroup_agent.observing.{name}", 0.05)


def attempts_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each attempt's end."""
    ends: list[str] = []

    def noting(name: str, original: Callable[[Watch], float]) -> Callable[[Watch], float]:
        def note(watch: Watch) -> float:
            ends.append(name)
            return original(watch)

        return note

    for name in ("answered", "failed", "skipped"):
        monkeypatch.setattr(Watch, name, noting(name, getattr(Watch, name)))
    return ends


def observe(observed: Observed, ends: list[str], count: int) -> list[tuple[float, ...]]:
    """Observe until so many attempts have ended; return the levels that were said."""
    said: list[tuple[float, ...]] = []

    async def run() -> None:
        one = Prober(lambda watches: said.append(tuple(watch.level for watch in watches)))
        one.observe([observed])
        async with asyncio.timeout(20):
            while len(ends) < count:
                await asyncio.sleep(0.005)
        one.observe([])

    asyncio.run(run())
    return said


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HERE, 0)) as server:
        yield server


def test_quiet_port_refuses_everybody_and_that_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    port, ends = QuietPort(HERE), attempts_of(monkeypatch)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, port.port), timeout=5)
    assert observe(Observed("other", HERE, port.port), ends, 4) == []
    assert ends[:4] == ["answered"] * 4


def test_quiet_port_cannot_be_taken_by_another_program() -> None:
    port = QuietPort(HERE)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HERE, port.port))


def test_connection_that_somebody_accepts_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    ends = attempts_of(monkeypatch)
    assert observe(Observed("other", HERE, listener.getsockname()[1]), ends, 4) == []
    assert ends[:4] == ["answered"] * 4


class _Mute(socket.socket):
    """A socket whose attempts end as they are told to; no packet is sent."""

    code, later = errno.EINPROGRESS, 0

    def connect_ex(self, address: object) -> int:  # noqa: ARG002
        return self.code

    def getsockopt(self, level: int, option: int, *more: int) -> int:  # type: ignore[override]  # noqa: ARG002
        return self.later


@pytest.mark.parametrize(
    ("code", "later", "want"),
    [
        pytest.param(errno.ECONNREFUSED, 0, "answered", id="refused at once"),
        pytest.param(errno.EINPROGRESS, errno.ECONNREFUSED, "answered", id="refused"),
        pytest.param(
            errno.EINPROGRESS, errno.EHOSTUNREACH, "failed", id="a router knows no way: no word of the other machine"
        ),
        pytest.param(errno.ENETUNREACH, 0, "failed", id="this machine has no network"),
        pytest.param(errno.EADDRNOTAVAIL, 0, "skipped", id="this machine has no port left"),
        pytest.param(errno.ENOMEM, 0, "skipped", id="no memory"),
    ],
)
def test_how_an_attempt_ends(monkeypatch: pytest.MonkeyPatch, code: int, later: int, want: str) -> None:
    ends = attempts_of(monkeypatch)
    monkeypatch.setattr(prober, "_open", lambda _: type("Mute", (_Mute,), {"code": code, "later": later})())
    said = observe(Observed("other", HERE, 1), ends, 3)
    assert (ends[:3], said) == ([want] * 3, [])


def test_attempt_without_a_descriptor_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    ends = attempts_of(monkeypatch)
    monkeypatch.setattr(prober, "_open", none)
    assert observe(Observed("other", HERE, 1), ends, 3) == []
    assert ends[:3] == ["skipped"] * 3


def test_who_is_observed_still_is_not_forgotten() -> None:
    """A new generation with the same neighbours does not begin anew: what had answered may be silent since."""
    port, levels = QuietPort(HERE), list[float]()
    stays = Observed("stays", HERE, port.port)

    async def run() -> None:
        one = Prober(lambda watches: levels.extend(watch.level for watch in watches))
        one.observe([stays, Observed("goes", HERE, port.port)])
        watch = one.watches[0]
        one.observe([stays])
        assert one.watches == (watch,)
        one.observe([])
        assert not one.watches

    asyncio.run(run())
    assert levels == []
