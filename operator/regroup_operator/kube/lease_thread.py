"""The lease in a thread with an event loop and API client of its own: the renewal does not wait for the main loop's turns.

When thousands of agents connect at once, one turn of the main loop takes seconds, and a renewal needs several turns.
A main loop that hangs must not lead for ever, though: the thread asks it every second for a sign of life, and ends the
process when there was none for `SILENCE_S`. Why: docs/design/adr/0061-lease-in-a-thread.md. The lease itself: lease.py.
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
"""A main loop that has not begun a turn for so long hangs. In the longest storm that was seen (1,000 agents on two cores, at a load
of 20) the several turns of one renewal took more than 10 s together."""
PROBE_S = 1.0
"""Between two signs of life of the main loop."""
RELEASE_S = 5.0
"""For so long `release` waits for the thread to give the lease away; more than `Elector.release` takes."""
JOIN_S = 1.0


class LeaseThread:
    """`await acquire()` until this process leads, run `hold()` from then on, `release()` when done: all in the main loop.

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
        """`connect` is awaited in the thread's loop: its client is used and closed there. `identity`: see Elector."""
        self._connect = connect
        self._lease = (namespace, name, identity, times)
        self._silence_s, self._probe_s = silence_s, min(PROBE_S, silence_s / 4)
        self._die = die
        self._thread: threading.Thread | None = None
        self._lead: asyncio.Future[None] | None = None
        # Of the thread's loop; other threads only read `_elector`.
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
        """Return once this process leads; from then on the thread renews. Call it once. Raises what `connect` raises."""
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
        """Return or raise when the thread has stopped to renew; see Elector. Cancelled, the thread stops to renew, and unless
        `release` follows, the process ends at the renew deadline."""
        assert self._lead is not None
        await self._lead

    async def release(self, timeout_s: float = RELEASE_S) -> None:
        """Give the lease away if it is ours, and end the thread: within `timeout_s`, and a second for the thread. See Elector."""
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
        """Renewal follows acquisition without a turn of the main loop between them."""
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
    """Return " (at FILE:LINE, in FUNCTION)" for the code that `thread` runs, empty if it is gone."""
    frame = sys._current_frames().get(thread)
    return f" (at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name})" if frame else ""
