"""Agents that observe each other: the real rule of an observer, on links of the simulated network.

While nothing is cut every attempt is answered, and none is played: an observer counts as having heard its members when it begins.
Once something is cut, observers try until all of them hear everybody again, and pauses fall between two attempts or on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from _regroup_agent import events as ev
from _regroup_agent.observing import EVERY_S, WITHIN_S, Watch
from regroup.protocol.wire import Observed

if TYPE_CHECKING:
    from tests.simulator.agents import Agent


class Observer:
    """One agent's attempts. A stopped agent tries nothing."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.watches: tuple[Watch, ...] = ()
        self._trying: set[Observed] = set()

    def observe(self, observed: Sequence[Observed]) -> None:
        """See prober.Prober."""
        before = {watch.observed: watch for watch in self.watches}
        self.watches = tuple(before.get(one) or Watch(one) for one in observed)
        for watch in self.watches:
            if self._hears(watch):
                watch.begin(self._agent.world.now_s)
                watch.answered()
        self.wake()

    def wake(self) -> None:
        """Something may be cut: try again, each at a moment of its own."""
        world = self._agent.world
        for watch in self.watches:
            if watch.observed not in self._trying:
                self._trying.add(watch.observed)
                world.after(world.pace.some((0.0, EVERY_S)), lambda watch=watch: self._begin(watch))  # type: ignore[misc]

    def _begin(self, watch: Watch) -> None:
        world = self._agent.world
        if not self._agent.alive or watch not in self.watches:
            self._trying.discard(watch.observed)
        elif self._agent.stopped:
            world.after(EVERY_S, lambda: self._begin(watch))
        else:
            watch.begin(world.now_s)
            if self._hears(watch):
                self._ended(watch, watch.answered)
            else:
                world.after(WITHIN_S, lambda: self._ended(watch, watch.failed))

    def _ended(self, watch: Watch, take: object) -> None:
        world = self._agent.world
        assert callable(take)
        if not self._agent.alive or watch not in self.watches or self._agent.stopped:
            world.after(0.0, lambda: self._begin(watch))
            return
        before = watch.level
        next_s = take()
        if watch.level != before:
            self._agent.handle(ev.Watched(self.watches))
        if world.network.is_cut or watch.level:
            world.after(max(0.0, next_s - world.now_s), lambda: self._begin(watch))
        else:
            self._trying.discard(watch.observed)

    def _hears(self, watch: Watch) -> bool:
        """Return whether the other pod's kernel answers: whatever its agent does, where its node and both ways are well."""
        return self._agent.world.network.answers(self._agent.uid, watch.observed.pod_uid)
