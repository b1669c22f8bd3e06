"""What happens to nodes, links, operators and the API server when something fails there, and when it is well again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulator.cluster import Node
from tests.simulator.operators import Operator
from tests.simulator.world import World

NOT_READY_S = 40.0
"""Until the API calls a node NotReady that says nothing (Kubernetes' node-monitor-grace-period)."""
RENEW_DEADLINE_S = 10.0
"""A leader that cannot renew its lease for so long ends itself (OperatorSettings.lease_renew_deadline_s)."""


# --- nodes ---------------------------------------------------------------------------------------------------------


def node_off(world: World, name: str, for_s: float) -> bool:
    """Take the power from a node: nobody on it says another word. Return False if it had none."""
    node = world.pods.nodes[name]
    if not node.is_up:
        return False
    node.is_up = False
    for pod in world.pods.on_node(name):
        agent = world.agents.get(pod.uid)
        if agent is not None and agent.alive:
            world.lose_power(agent)
    world.network.watch_out()
    world.after(NOT_READY_S, lambda: None if node.is_up else say_ready(world, name, False))
    world.lasts(for_s, lambda: node_on(world, name))
    return True


def node_on(world: World, name: str) -> None:
    """Give it power again: its containers, which ended with 255, are started."""
    node = world.pods.nodes[name]
    node.is_up = True
    world.pods.restart_roles(name)
    say_ready(world, name, True)
    for pod in world.pods.on_node(name):
        if pod.terminating:
            world.vanish(pod.uid)
        elif pod.phase == "Running":
            world.restart_container(pod.uid, 255)
        elif pod.phase == "Pending":
            world.run_pod(pod.uid)


def say_ready(world: World, name: str, ready: bool) -> None:
    """Have the API call a node Ready, or NotReady."""
    world.pods.nodes[name].is_ready = ready
    for pod in world.pods.on_node(name):
        world.pods.by_uid[pod.uid] = replace(pod, node_ready=ready)
    for pod in world.pods.roles_on(name):
        world.pods.of_roles[pod.uid] = replace(pod, node_ready=ready)
    if ready:
        world.pods.schedule_all()
    world.dirty()


def some_nodes(world: World, name: str, *, every: bool) -> list[Node]:
    """Return one node, or all of them."""
    return list(world.pods.nodes.values()) if every else [world.pods.nodes[name]]


def cordon(world: World, node: Node, for_s: float) -> None:
    """Have no pod scheduled to a node for a while."""
    node.is_cordoned = True

    def uncordon() -> None:
        node.is_cordoned = False
        world.pods.schedule_all()

    world.lasts(for_s, uncordon)


def taint(world: World, node: Node, for_s: float, *, forbids: bool, ends: bool) -> None:
    """Give a node a taint that announces its end. `forbids`: no pod is scheduled there; `ends`: when its time is over its pods are
    deleted. Pods that come later were placed there all the same: it does not concern them (kube/pods.py)."""
    node.has_notice, node.is_cordoned = True, forbids
    concerned = {pod.uid for pod in world.pods.on_node(node.name)}
    _say_tainted(world, concerned, "team/ends")

    def untaint() -> None:
        node.has_notice = node.is_cordoned = False
        if ends:
            for uid in concerned:
                world.terminate(uid)
        _say_tainted(world, concerned, "")
        world.pods.schedule_all()

    world.lasts(for_s, untaint)


def _say_tainted(world: World, uids: set[str], key: str) -> None:
    for uid in uids & world.pods.by_uid.keys():
        world.pods.by_uid[uid] = replace(world.pods.by_uid[uid], drain_taint=key)
    world.dirty()


# --- links ---------------------------------------------------------------------------------------------------------


def meet_cut_links(world: World) -> None:
    """Groups whose members cannot reach each other any more notice."""
    for group in list(world.groups.values()):
        complete = len(group.ranks) == group.world_size and not group.is_broken and not group.is_over
        if complete and all(t.alive for t in group.ranks.values()):
            group.meet_cut_links()


def cut_nodes(world: World, start: str, to: str, for_s: float) -> None:
    """Nothing that a pod on one node sends reaches those on another, also a pod that comes later."""
    world.network.deaf_nodes.add((start, to))
    world.network.watch_out()
    world.after(world.pace.probe_s, lambda: meet_cut_links(world))
    world.lasts(for_s, lambda: world.network.deaf_nodes.discard((start, to)))


# --- operators and the API server ----------------------------------------------------------------------------------


def lead(world: World) -> None:
    """Have another operator lead, once the API server answers."""
    if world.operator is None:
        if world.store.is_down:
            world.after(1.0, lambda: lead(world))
        else:
            world.start_operator()


def take_over(world: World, leader: Operator) -> None:
    """The lease of a paused leader has run out."""
    if world.operator is leader and leader.paused:
        world.operator = None
        lead(world)


def wake(world: World, leader: Operator) -> None:
    """A paused leader goes on. If another one leads it ends itself, after what it was in the middle of."""
    world.store.suspends_next_write = False
    if leader.dead:
        return
    leader.go_on()
    for agent in list(world.agents.values()):
        if agent.operator is leader:
            agent.flush()
    if leader is not world.operator:
        world.kill_operator(leader)


def lose_api(world: World, for_s: float, *, loses_an_answer: bool) -> None:
    """The API server answers nobody. A leader that cannot renew its lease ends."""
    store, leader = world.store, world.operator
    store.loses_answers, store.is_down = loses_an_answer, not loses_an_answer

    def back() -> None:
        store.loses_answers = store.is_down = False
        lead(world)

    def renew() -> None:
        if store.is_down and leader is not None and leader is world.operator and not leader.paused:
            world.kill_operator(leader)

    world.after(RENEW_DEADLINE_S, renew)
    world.lasts(for_s, back)


def lag_watch(world: World, for_s: float) -> bool:
    """The operators' watch of pods stands still. Return False if it does already."""
    if world.pods.stale is not None:
        return False
    world.pods.stale = tuple(world.pods.by_uid.values())

    def catch_up() -> None:
        world.pods.stale = None
        world.dirty()

    world.lasts(for_s, catch_up)
    return True


def restore(world: World, status: dict[str, Any]) -> None:
    """etcd is restored from a backup, and the operator starts anew."""
    for operator in list(world.operators):
        world.kill_operator(operator)
    restored = status.get("membership", {}).get("generation", 0)
    world.ledger.unwritten |= {number for number in world.ledger.generations if number > restored}
    world.store.replace_status(status)
    world.after(1.0, lambda: lead(world))
