"""The faults of a walk: data that can be printed, read back and replayed, and what each does to a world.

A fault names its victims by position (`at`, counted modulo those that there are when it comes), so that the rest of a list
still means something when some of it is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from _regroup_agent.statefile import UNKNOWN, Saved
from regroup_operator.model.records import Pod
from tests.simulator import hazards
from tests.simulator.agents import Agent
from tests.simulator.trainers import Trainer
from tests.simulator.world import FOREVER, World

MOMENTS = ("heard", "entered", "formed", "adopted", "attached", "checkpoint", "committed", "near-end")
"""In the middle of what a fault can come: World.happened."""
MOMENT_S = 8.0
"""How long a fault waits for its moment."""


@dataclass(frozen=True)
class Fault:
    kind: str
    after_s: float = 0.0
    """Seconds after the fault before it, or after the job's next commit if it is `calm`."""
    calm: bool = True
    """It waits until the job has committed after the faults before it."""
    at: int = 0
    """Which worker, node or link: by position."""
    other: int = 0
    """Which one of a pair, or which process of a worker."""
    for_s: float = FOREVER
    """How long it lasts, where it passes."""
    size: int = 1
    """To how many workers `scale` scales; how many versions back a backup is."""
    moment: str = ""
    """One of MOMENTS: it comes right then."""
    turns: int = 0
    """How many things have happened at its moment when it comes."""

    def __str__(self) -> str:
        """Return the form that `parse` reads: kind and what differs from the defaults."""
        words = [self.kind]
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            if value != f.default:
                words.append(f"{f.name}={value:g}" if isinstance(value, float) else f"{f.name}={value}")
        return " ".join(words)


def parse(text: str) -> Fault:
    """Return the fault that `str` made the text of. Raises ValueError with one sentence."""
    kind, *words = text.split()
    if kind not in KINDS:
        raise ValueError(f"{kind} is no kind of fault. Known: {', '.join(sorted(KINDS))}.")
    read: dict[str, Callable[[str], Any]] = {
        "after_s": float, "for_s": float, "at": int, "other": int, "size": int, "turns": int, "moment": str,
        "calm": lambda word: word == "True",
    }  # fmt: skip
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in read or not value:
            raise ValueError(f"{word} is no field of a fault. Write name=value with one of {', '.join(sorted(read))}.")
        try:
            values[name] = read[name](value)
        except ValueError as error:
            raise ValueError(f"{text} cannot be read: {error}.") from None
    return Fault(kind, **values)


# --- whom it hits --------------------------------------------------------------------------------------------------


def living(world: World) -> list[Agent]:
    return [a for _, a in sorted(world.agents.items()) if a.alive]


def pick_agent(world: World, fault: Fault) -> Agent | None:
    agents = living(world)
    return agents[fault.at % len(agents)] if agents else None


def pick_trainer(world: World, fault: Fault) -> Trainer | None:
    agent = pick_agent(world, fault)
    trainers = [t for _, t in sorted(agent.trainers.items()) if t.alive] if agent else []
    return trainers[fault.other % len(trainers)] if trainers else None


def pick_pod(world: World, fault: Fault) -> Pod | None:
    pods = sorted(world.pods.by_uid.values(), key=lambda p: p.id)
    return pods[fault.at % len(pods)] if pods else None


def pick_node(world: World, fault: Fault) -> str:
    names = sorted(world.pods.nodes)
    return names[fault.at % len(names)]


def pick_pair(world: World, fault: Fault) -> tuple[str, str] | None:
    uids = [a.uid for a in living(world)]
    if len(uids) < 2:
        return None
    first = fault.at % len(uids)
    return uids[first], uids[(first + 1 + fault.other % (len(uids) - 1)) % len(uids)]


# --- what it does --------------------------------------------------------------------------------------------------


def kill(world: World, fault: Fault) -> None:
    """SIGKILL of one trainer process."""
    trainer = pick_trainer(world, fault)
    if trainer is not None:
        trainer.agent.exited(trainer, -9)


def kill_two(world: World, fault: Fault) -> None:
    """SIGKILL of two trainer processes at once."""
    kill(world, fault)
    kill(world, replace(fault, at=fault.at + 1 + fault.other))


def kill_all(world: World, fault: Fault) -> None:  # noqa: ARG001
    """SIGKILL of all trainer processes at once."""
    for agent in living(world):
        for trainer in list(agent.trainers.values()):
            agent.exited(trainer, -9)


def container(world: World, fault: Fault) -> None:
    """The agent's container is killed; the kubelet starts it again."""
    agent = pick_agent(world, fault)
    if agent is not None:
        world.container_ended(agent, 137)


def freeze_trainer(world: World, fault: Fault) -> None:
    """SIGSTOP of a trainer process, SIGCONT after a while or never (it hangs)."""
    trainer = pick_trainer(world, fault)
    if trainer is not None and not trainer.stopped:
        trainer.stop()
        world.lasts(fault.for_s, lambda: trainer.proceed())


def freeze_agent(world: World, fault: Fault) -> None:
    """SIGSTOP of an agent: its stream stays open; SIGCONT after a while or never."""
    agent = pick_agent(world, fault)
    if agent is not None and not agent.stopped:
        agent.stop()
        world.lasts(fault.for_s, agent.go_on)


def delete_pod(world: World, fault: Fault) -> None:
    """kubectl delete pod: SIGTERM and a grace."""
    pod = pick_pod(world, fault)
    if pod is not None:
        world.terminate(pod.uid)


def vanish(world: World, fault: Fault) -> None:
    """kubectl delete pod --force."""
    pod = pick_pod(world, fault)
    if pod is not None:
        world.vanish(pod.uid)


def power_off(world: World, fault: Fault) -> None:
    """A node loses power; it comes back after a while or never."""
    hazards.node_off(world, pick_node(world, fault), fault.for_s)


def reboot(world: World, fault: Fault) -> None:
    """A node reboots within seconds: every container on it ends with 255 and starts again."""
    hazards.node_off(world, pick_node(world, fault), min(fault.for_s, 12.0))


def not_ready(world: World, fault: Fault) -> None:
    """The API calls a node NotReady although it is well (its kubelet restarts, it flaps)."""
    node = world.pods.nodes[pick_node(world, fault)]
    if node.is_up:
        hazards.say_ready(world, node.name, False)
        world.lasts(fault.for_s, lambda: hazards.say_ready(world, node.name, True) if node.is_up else None)


def break_stream(world: World, fault: Fault) -> None:
    """The connection between an agent and the operator breaks; the agent calls again."""
    agent = pick_agent(world, fault)
    if agent is not None:
        agent.disconnect()


def cut_operator(world: World, fault: Fault) -> None:
    """Nothing passes between an agent and the operator; both find out when their kernels do."""
    agent = pick_agent(world, fault)
    if agent is not None and agent.uid not in world.unreachable:
        world.unreachable.add(agent.uid)
        agent.mute()
        world.lasts(fault.for_s, lambda: world.reach_again(agent.uid))


def cut_link(world: World, fault: Fault) -> None:
    """Two workers cannot reach each other."""
    pair = pick_pair(world, fault)
    if pair is not None:
        link = frozenset(pair)
        world.cut_links.add(link)
        world.after(world.pace.probe_s, lambda: hazards.meet_cut_links(world))
        world.lasts(fault.for_s, lambda: world.cut_links.discard(link))


def cut_one_way(world: World, fault: Fault) -> None:
    """What one worker sends does not reach another; only that one notices."""
    pair = pick_pair(world, fault)
    if pair is not None:
        world.deaf_links.add(pair)
        world.after(world.pace.probe_s, lambda: hazards.meet_cut_links(world))
        world.lasts(fault.for_s, lambda: world.deaf_links.discard(pair))


def slow_starts(world: World, fault: Fault) -> None:
    """For a while every process that starts takes a minute to import."""
    world.slow_start_s = 60.0
    world.lasts(min(fault.for_s, 30.0), lambda: setattr(world, "slow_start_s", 0.0))


def kill_operator(world: World, fault: Fault) -> None:
    """The operator is killed; another one leads after a while."""
    if world.operator is not None:
        world.kill_operator()
        world.lasts(min(fault.for_s, 60.0), lambda: hazards.lead(world))


def pause_operator(world: World, fault: Fault) -> None:
    """The leader is paused, where `turns` is odd in the middle of its next write; after its lease another one leads, and it wakes
    up beside it."""
    leader = world.operator
    if leader is None or leader.paused:
        return
    if fault.turns % 2:
        world.store.suspends_next_write = True
    else:
        leader.pause()
    world.after(15.0, lambda: hazards.take_over(world, leader))
    world.lasts(min(fault.for_s, 40.0), lambda: hazards.wake(world, leader))


def api_down(world: World, fault: Fault) -> None:
    """The API server does not answer for a while; the last write before it, where `turns` is odd, took effect unanswered."""
    hazards.lose_api(world, min(fault.for_s, 20.0), loses_an_answer=bool(fault.turns % 2))


def restore(world: World, fault: Fault) -> None:
    """The job's status is that of an older backup, and the operator starts anew."""
    if len(world.store.history) >= fault.size:
        hazards.restore(world, world.store.history[-fault.size])


def scale(world: World, fault: Fault) -> None:
    """spec.replicas changes."""
    policy = world.store.view["spec"].get("elasticPolicy")
    if policy and not world.has_ended:
        world.scale(max(policy["minReplicas"], min(policy["maxReplicas"], fault.size)))


def resize(world: World, fault: Fault) -> None:
    """spec.replicas and minReplicas change together."""
    if not world.store.view["spec"].get("elasticPolicy") or world.has_ended:
        return
    minimum = 1 + fault.at % 3

    def change(spec: dict[str, Any]) -> None:
        spec["elasticPolicy"]["minReplicas"] = minimum
        spec["replicas"] = max(minimum, min(spec["elasticPolicy"]["maxReplicas"], fault.size))

    world.store.change_spec(change)
    world.dirty()


def hang_all(world: World, fault: Fault) -> None:  # noqa: ARG001
    """SIGSTOP of all trainer processes, for ever."""
    for agent in living(world):
        for trainer in agent.trainers.values():
            if trainer.alive and not trainer.stopped:
                trainer.stop()


def lose_file(world: World, fault: Fault) -> None:
    """A container restarts, and its agent's state file cannot be read."""
    agent = pick_agent(world, fault)
    if agent is not None:
        agent.saved = Saved(UNKNOWN, UNKNOWN, incarnation=int(world.now_s) + 1_000_000)
        world.container_ended(agent, 137)


def disk_full(world: World, fault: Fault) -> None:
    """An agent's disk is full at its next write: nothing is promised that is not on disk, so its container ends."""
    agent = pick_agent(world, fault)
    if agent is not None:
        world.full.add(agent.uid)
        world.lasts(fault.for_s, lambda: world.full.discard(agent.uid))


def cut_nodes(world: World, fault: Fault) -> None:
    """What pods on one node send does not reach those on another."""
    names = sorted(world.pods.nodes)
    start = fault.at % len(names)
    to = (start + 1 + fault.other % (len(names) - 1)) % len(names)
    hazards.cut_nodes(world, names[start], names[to], fault.for_s)


def lag_watch(world: World, fault: Fault) -> None:
    """The operators' watch of pods lags behind: they plan from what was."""
    hazards.lag_watch(world, fault.for_s)


def clock_jump(world: World, fault: Fault) -> None:
    """The wall clock of the operators' machine is set by an hour, forwards or back."""
    skew_s = 3600.0 if fault.turns % 2 else -3600.0
    world.wall_skew_s += skew_s
    world.lasts(fault.for_s, lambda: setattr(world, "wall_skew_s", world.wall_skew_s - skew_s))


def truncate_checkpoint(world: World, fault: Fault) -> None:  # noqa: ARG001
    """The newest checkpoint is damaged."""
    world.disk.truncate_newest()


def lose_checkpoints(world: World, fault: Fault) -> None:
    """Nobody can read the volume for a while."""
    world.disk.hide(fault.for_s)


def blind_worker(world: World, fault: Fault) -> None:
    """One worker cannot read the volume."""
    agent = pick_agent(world, fault)
    if agent is not None:
        world.disk.blind.add(agent.uid)
        world.lasts(fault.for_s, lambda: world.disk.blind.discard(agent.uid))


@dataclass(frozen=True)
class Kind:
    act: Callable[[World, Fault], None]
    weight: float = 1.0
    spans: tuple[float, ...] = (FOREVER,)
    """How long it lasts, one of these."""
    session_only: bool = False


SHORT = (0.2, 1.0, 4.0, 10.0)
KINDS: dict[str, Kind] = {
    "kill": Kind(kill, 4),
    "kill-two": Kind(kill_two, 2),
    "kill-all": Kind(kill_all, 2),
    "container": Kind(container, 2),
    "freeze-trainer": Kind(freeze_trainer, 2, SHORT),
    "hang-trainer": Kind(freeze_trainer, 1, session_only=True),
    "freeze-agent": Kind(freeze_agent, 2, SHORT),
    "hang-agent": Kind(freeze_agent, 1),
    "delete-pod": Kind(delete_pod, 2),
    "vanish": Kind(vanish, 2),
    "power-off": Kind(power_off, 1, (60.0, 200.0, FOREVER)),
    "reboot": Kind(reboot, 1, (6.0, 12.0)),
    "not-ready": Kind(not_ready, 1, (3.0, 30.0, 60.0)),
    "break-stream": Kind(break_stream, 3),
    "cut-operator": Kind(cut_operator, 2, (1.0, 4.0, 12.0, 40.0, FOREVER)),
    "cut-link": Kind(cut_link, 1, (2.0, 12.0, 70.0)),
    "cut-one-way": Kind(cut_one_way, 1, (2.0, 12.0, 70.0)),
    "sever-link": Kind(cut_link, 1),
    "sever-one-way": Kind(cut_one_way, 1),
    "slow-starts": Kind(slow_starts, 1, (5.0, 30.0)),
    "kill-operator": Kind(kill_operator, 2, (0.5, 5.0, 16.0, 40.0)),
    "pause-operator": Kind(pause_operator, 1, (4.0, 14.0, 18.0, 30.0)),
    "api-down": Kind(api_down, 1, (1.0, 5.0, 20.0)),
    "restore": Kind(restore, 0.5),
    "scale": Kind(scale, 4),
    "resize": Kind(resize, 2),
    "hang-all": Kind(hang_all, 0.3, session_only=True),
    "lose-file": Kind(lose_file, 1),
    "disk-full": Kind(disk_full, 1, (1.0, 4.0)),
    "cut-nodes": Kind(cut_nodes, 1, (2.0, 12.0, 70.0)),
    "lag-watch": Kind(lag_watch, 1, (1.0, 5.0, 15.0)),
    "clock-jump": Kind(clock_jump, 0.5, (5.0, FOREVER)),
    "truncate-checkpoint": Kind(truncate_checkpoint, 1, session_only=True),
    "lose-checkpoints": Kind(lose_checkpoints, 0.5, (5.0, 60.0), session_only=True),
    "blind-worker": Kind(blind_worker, 0.5, (20.0, FOREVER), session_only=True),
}


def draw(rng: random.Random, kinds: list[str], *, calm: bool) -> Fault:
    """Return a random fault of one of these kinds."""
    kind = rng.choices(kinds, [KINDS[k].weight for k in kinds])[0]
    in_a_moment = rng.random() < 0.35
    return Fault(
        kind,
        after_s=rng.choice([0.0, 0.0, 0.02, 0.3, 1.0, 3.0, 6.0, 25.0]),
        calm=calm,
        at=rng.randrange(6),
        other=rng.randrange(3),
        for_s=rng.choice(KINDS[kind].spans),
        size=rng.choice([1, 1, 2, 3, 4, 5]),
        moment=rng.choice(MOMENTS) if in_a_moment else "",
        turns=rng.choice([0, 0, 1, 2, 3, 5]),
    )
