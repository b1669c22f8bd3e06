"""The ways between simulated workers: which of them are cut, who notices, and which attempts of observers are answered.

The way between an agent and the operator may be cut alone, too: World.cut_off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from regroup.protocol.wire import SILENT_S

if TYPE_CHECKING:
    from tests.simulator.world import World


class Network:
    """What passes between the pods of a world. Whoever cuts something calls `watch_out`, or observers notice late."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.dark: set[str] = set()
        """Pod UIDs whose node has no power, or whose network is paused: nothing passes in or out."""
        self.paused: set[str] = set()
        """Those of them whose pause is too short to prove anything."""
        self.cut_links: set[frozenset[str]] = set()
        """Pairs of pod UIDs: nothing passes between the two, and both notice."""
        self.deaf_links: set[tuple[str, str]] = set()
        """(a, b): what a sends does not reach b, and only b notices that a is missing."""
        self.deaf_nodes: set[tuple[str, str]] = set()
        """The same between the pods of two nodes, whichever they are."""
        self.refused_s = world.now_s - 1000.0
        """When an observer last met a way that was cut by more than a short pause."""

    @property
    def is_cut(self) -> bool:
        """Whether some way between two workers may be cut."""
        off = any(not node.is_up for node in self._world.pods.nodes.values())
        return off or bool(self.dark or self.cut_links or self.deaf_links or self.deaf_nodes)

    def watch_out(self) -> None:
        """Something is cut, or whole again."""
        for agent in list(self._world.agents.values()):
            if agent.alive:
                agent.observer.wake()

    def answers(self, observer: str, uid: str) -> bool:
        """Return whether an attempt of one pod to reach another is answered by the kernel there: the way must be open in both
        directions."""
        world = self._world
        pods = [world.pods.by_uid.get(one) for one in (observer, uid)]
        lost = any(pod is None or not world.pods.has_power(pod) for pod in pods)
        if lost or self.who_misses(observer, uid) or {observer, uid} & self.dark - self.paused:
            self.refused_s = world.now_s
            return False
        return not {observer, uid} & self.dark

    def who_misses(self, a: str, b: str) -> tuple[str, ...]:
        """Return which of two workers notice that they cannot form a group together."""
        if frozenset((a, b)) in self.cut_links:
            return (a, b)
        nodes = {uid: pod.node for uid in (a, b) if (pod := self._world.pods.by_uid.get(uid)) is not None}
        return tuple(
            to
            for start, to in ((a, b), (b, a))
            if (start, to) in self.deaf_links or (nodes.get(start), nodes.get(to)) in self.deaf_nodes
        )

    def pause(self, uids: Iterable[str], for_s: float) -> None:
        """Nothing passes between these pods and anybody else for a while, the operator included; connections outlast it."""
        world, paused = self._world, set(uids)
        agents = [world.agents[uid] for uid in paused if uid in world.agents]
        self.dark |= paused
        self.paused |= paused if for_s < SILENT_S else set()
        for agent in agents:
            agent.muted = agent.connected or agent.muted

        def go_on() -> None:
            self.dark -= paused
            self.paused -= paused
            for agent in agents:
                if agent.alive and agent.uid not in world.unreachable:
                    agent.unmute()

        self.watch_out()
        world.lasts(for_s, go_on)
