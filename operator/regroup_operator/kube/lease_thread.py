"""The lease in a thread with an event loop and API client of its own, so that renewals do not wait for the main loop.

When thousands of agents connect at once, one turn of the main loop takes seconds, and a renewal needs several turns.
But a main loop that hangs must not lead for ever. So the thread asks it every second for a sign of life, and ends the
process when there was none for `SILENCE_S` (docs/design/adr/0061-lease-in-a-thread.md).

The lease itself is in lease.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from regroup_operator.kube.client import Client
from regroup_operator.kube.lease import Elector, LeaseTimes, die

log = logging.getLogger(__name__)

SILENCE_S = 60.0
"""Silence after which the main loop counts as hanging. In the longest observed storm the turns of one renewal took more than
10 s together. (It had 1,000 agents on two cores, at a load of 20.)"""
PROBE_S = 1.0
"""Time between two questions for a sign of life."""
RELEASE_S = 5.0
"""Longest wait of `release` until the thread has given the lease away. It is more than `Elector.release` takes."""
JOIN_S = 1.0


class LeaseThread:
    """An Elector for the main loop: `await acquire()` until this process leads, run `hold()` from then on, `release()` at the end.

    `leading` and `holder` may be read in any thread.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Client]],
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        *,
        silence_s: float = SILENCE_S,
        die: Callable[[str], None] = die,
    ) -> None:
        """Prepare to elect. `connect` is awaited in the thread's loop, and its client is used and closed there.

        `identity` must differ between any two processes that ever run.
        """
        self._connect = connect
        self._lease = (namespace, name, identity, times)
        self._silence_s, self._probe_s = silence_s, min(PROBE_S, silence_s / 4)
        self._die = die
        self._thread: threading.Thread | None = None
        self._lead: asyncio.Future[None] | None = None
        # These belong to the thread's loop. Other threads only read `_elector`.
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self._client: Client | None = None
        self._elector: Elector | None = None
        self._leading: asyncio.Task[None] | None = None
        # The main loop sets it, the thread clears it.
        self._answered = True

    @property
    def leading(self) -> bool:
        elector = self._elector
        return elector is not None and elector.leading

    @property
    def holder(self) -> str:
        elector = self._elector
        return elector.holder if elector is not None else ""

    async def acquire(self) -> None:
        """Return once this process leads. From then on the thread renews. Called once. Raises the errors of `connect`."""
        assert self._thread is None
        acquired: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        # A daemon: a thread that does not end must not keep a process that wants to end.
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()
        work = self._acquire_and_hold(asyncio.get_running_loop(), threading.get_ident(), acquired)
        self._lead = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        try:
            await asyncio.wait((self._lead, asyncio.wrap_future(acquired)), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._lead.cancel()
            raise
        if self._lead.done():
            await self._lead

    async def hold(self) -> None:
        """Wait until the thread renews no more. Raises its error.

        If `hold` is cancelled, the thread stops renewing. Unless `release` follows, the process ends at the renew
        deadline.
        """
        assert self._lead is not None
        await self._lead

    async def release(self, timeout_s: float = RELEASE_S) -> None:
        """Give the lease away if this process holds it, and end the thread.

        It takes at most `timeout_s`, and a second for the thread.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._finish(), self._loop))
        except TimeoutError:
            log.warning("The lease was not released in %g s and runs out by itself.", timeout_s)
        self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(thread.join, JOIN_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stop.wait()

    async def _acquire_and_hold(self, main: asyncio.AbstractEventLoop, thread: int, acquired: Future[None]) -> None:
        """Acquire and renew. Renewal follows acquisition without a turn of the main loop between them."""
        self._leading = asyncio.current_task()
        watch = asyncio.create_task(self._watch(main, thread))
        try:
            self._client = await self._connect()
            namespace, name, identity, times = self._lease
            self._elector = Elector(self._client, namespace, name, identity, times, die=self._die)
            await self._elector.acquire()
            if not acquired.done():
                acquired.set_result(None)
            await self._elector.hold()
        finally:
            watch.cancel()

    async def _finish(self) -> None:
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.wait((self._leading,))
        if self._elector is not None:
            await self._elector.release()
        if self._client is not None:
            await self._client.close()

    async def _watch(self, main: asyncio.AbstractEventLoop, thread: int) -> None:
        """End the process when the main loop has left the questions of `silence_s` seconds unanswered.

        Questions are counted, not seconds: a process that was stopped has asked none.
        """
        unanswered = 0
        while True:
            if self._answered:
                self._answered, unanswered = False, 0
                with contextlib.suppress(RuntimeError):  # a loop that is closed does not answer either
                    main.call_soon_threadsafe(self._answer)
            elif unanswered * self._probe_s >= self._silence_s:
                silence = f"The event loop has not begun a turn for {self._silence_s:g} s"
                self._die(f"{silence}{_where(thread)}. The lease runs out.")
                return
            unanswered += 1
            await asyncio.sleep(self._probe_s)

    def _answer(self) -> None:
        self._answered = True


def _where(thread: int) -> str:
    """Return " (at FILE:LINE, in FUNCTION)" for the code that `thread` runs, or "" if the thread is gone."""
    frame = sys._current_frames().get(thread)
    return f" (at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name})" if frame else ""
