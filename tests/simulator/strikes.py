"""What each kind of fault does to a world. Every function returns whether it found something to hit."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from _regroup_agent import events as ev
from regroup_operator.api import parse_stored
from regroup_operator.model.records import Pod
from tests.simulator import hazards
from tests.simulator.agents import Agent
from tests.simulator.trainers import Trainer
from tests.simulator.world import FOREVER, World

if TYPE_CHECKING:
    from tests.simulator.faults import Fault

SLOW_STEP_S = 3.0
"""A slow rank takes so long for a step."""
SLOW_START_S = 60.0
PAUSE_S = 1.0
"""No pause of a network that lasts no longer may cost anything."""
CODES = (42, 43, -signal.SIGSEGV, 1)
REBOOT_S = 12.0
"""A node's quick reboot takes no longer."""

# --- whom it hits --------------------------------------------------------------------------------------------------


def living(world: World) -> list[Agent]:
    return [a for _, a in sorted(world.agents.items()) if a.alive]


def processes(agent: Agent) -> list[Trainer]:
    return [t for _, t in sorted(agent.trainers.items()) if t.runs]


def pick_agent(world: World, fault: Fault) -> Agent | None:
    agents = living(world)
    return agents[fault.at % len(agents)] if agents else None


def pick_trainer(world: World, fault: Fault) -> Trainer | None:
    agent = pick_agent(world, fault)
    trainers = processes(agent) if agent else []
    return trainers[fault.other % len(trainers)] if trainers else None


def pick_store_host(world: World) -> Agent | None:
    """Return the worker with the newest generation's store, wherever its slot is."""
    store = world.status.get("membership", {}).get("store")
    hosts = [a for a in living(world) if store and world.pods.by_uid[a.uid].slot == store["slot"]]
    return hosts[-1] if hosts else None


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


# --- processes and agents ------------------------------------------------------------------------------------------


def kill(world: World, fault: Fault) -> bool:
    """SIGKILL of one trainer process."""
    trainer = pick_trainer(world, fault)
    if trainer is None:
        return False
    trainer.agent.exited(trainer, -9)
    return True


def exit_code(world: World, fault: Fault) -> bool:
    """One trainer process ends with an exit code, or by a signal, that rules of spec.recovery.onExit may name."""
    trainer = pick_trainer(world, fault)
    if trainer is None:
        return False
    code = CODES[fault.size % len(CODES)]
    trainer.agent.exited(trainer, code, f"SystemExit: {code} at {world.now_s}" if code > 0 else "")
    return True


def kill_two(world: World, fault: Fault) -> bool:
    """SIGKILL of two trainer processes at once."""
    first = kill(world, fault)
    return kill(world, replace(fault, at=fault.at + 1 + fault.other)) or first


def kill_all(world: World, fault: Fault) -> bool:  # noqa: ARG001
    """SIGKILL of all trainer processes at once."""
    victims = [t for agent in living(world) for t in processes(agent)]
    for trainer in victims:
        trainer.agent.exited(trainer, -9)
    return bool(victims)


def raise_all(world: World, fault: Fault) -> bool:  # noqa: ARG001
    """An exception of the script's on all ranks at once: a NaN check, a file server's hiccup."""
    victims = [t for agent in living(world) for t in processes(agent)]
    for trainer in victims:
        trainer.agent.exited(trainer, 1, f"OSError: no answer at {world.now_s}")
    return bool(victims)


def kill_store_host(world: World, fault: Fault) -> bool:
    """SIGKILL of a process of the worker that has the newest generation's store."""
    host = pick_store_host(world)
    trainers = processes(host) if host else []
    if not trainers:
        return False
    trainer = trainers[fault.other % len(trainers)]
    trainer.agent.exited(trainer, -9)
    return True


def kill_store_agent(world: World, fault: Fault) -> bool:  # noqa: ARG001
    """The container of the worker that has the store is killed; the kubelet starts it again."""
    host = pick_store_host(world)
    if host is not None:
        world.container_ended(host, 137)
    return host is not None


def terminate_trainer(world: World, fault: Fault) -> bool:
    """SIGTERM of one trainer process, by somebody else than its agent."""
    trainer = pick_trainer(world, fault)
    if trainer is None:
        return False
    trainer.agent.signalled(trainer, signal.SIGTERM)
    return True


def kill_zygote(world: World, fault: Fault) -> bool:
    """SIGKILL of a zygote: trainers live on, and the next process of this worker waits for a new one's imports."""
    agent = pick_agent(world, fault)
    if agent is not None:
        agent.lose_zygote()
    return agent is not None


def slow_rank(world: World, fault: Fault) -> bool:
    """One process takes SLOW_STEP_S for each step: the others wait for it, and it notices later that its group broke."""
    trainer = pick_trainer(world, fault)
    if trainer is None:
        return False
    trainer.slow_s = SLOW_STEP_S
    world.lasts(fault.for_s, lambda: setattr(trainer, "slow_s", 0.0))
    return True


def stall_log(world: World, fault: Fault) -> bool:
    """Nobody reads the pipe that one worker's processes print to: each stands after its next step, and still hears. Its agent
    does not stall: a thread of its own writes its log and what processes write to stderr (_regroup_agent/output.py)."""
    agent = pick_agent(world, fault)
    if agent is None or agent.uid in world.stalled_logs:
        return False
    world.stalled_logs.add(agent.uid)
    world.lasts(fault.for_s, lambda: world.read_log_again(agent.uid))
    return True


def container(world: World, fault: Fault) -> bool:
    """The agent's container is killed, where `turns` is odd for want of memory; the kubelet starts it again."""
    agent = pick_agent(world, fault)
    if agent is not None:
        world.container_ended(agent, 137, "OOMKilled" if fault.turns % 2 else "Error")
    return agent is not None


def freeze_trainer(world: World, fault: Fault) -> bool:
    """SIGSTOP of a trainer process, SIGCONT after a while or never (it hangs)."""
    trainer = pick_trainer(world, fault)
    if trainer is None or trainer.stopped:
        return False
    trainer.stop()
    world.lasts(fault.for_s, lambda: trainer.proceed())
    return True


def freeze_agent(world: World, fault: Fault) -> bool:
    """SIGSTOP of an agent: its stream stays open; SIGCONT after a while or never."""
    agent = pick_agent(world, fault)
    if agent is None or agent.stopped:
        return False
    agent.stop()
    world.lasts(fault.for_s, agent.go_on)
    return True


def hang_all(world: World, fault: Fault) -> bool:  # noqa: ARG001
    """SIGSTOP of all trainer processes, for ever; in the end of their scripts, which has no limit but the user's, until all is well
    again. Not before one is known to be a session's: what stands before that looks like a
    script without `torch.distributed`, and condition Training says Unobserved (adr/0011)."""
    victims = [t for agent in living(world) for t in processes(agent) if not t.stopped]
    if not world.known_session and not any(t.attached for t in victims):
        return False
    for trainer in victims:
        trainer.stop()
        if world.finished is not None:
            world.lasts(FOREVER, trainer.proceed)
    return bool(victims)


def slow_starts(world: World, fault: Fault) -> bool:
    """For a while every process that starts takes a minute to import."""
    world.slow_start_s = SLOW_START_S
    world.lasts(min(fault.for_s, 30.0), lambda: setattr(world, "slow_start_s", 0.0))
    return True


def lose_file(world: World, fault: Fault) -> bool:
    """A container restarts, and its agent's state file cannot be read."""
    agent = pick_agent(world, fault)
    if agent is None:
        return False
    agent.saved = world.lost_file()
    world.container_ended(agent, 137)
    return True


def fill_agent_disk(world: World, fault: Fault) -> bool:
    """An agent's disk is full at its next write: nothing is promised that is not on disk, so its container ends."""
    agent = pick_agent(world, fault)
    if agent is None:
        return False
    world.full.add(agent.uid)
    world.lasts(fault.for_s, lambda: world.full.discard(agent.uid))
    return True


# --- pods and nodes ------------------------------------------------------------------------------------------------


def delete_pod(world: World, fault: Fault) -> bool:
    """kubectl delete pod: SIGTERM and a grace."""
    pod = pick_pod(world, fault)
    if pod is not None:
        world.terminate(pod.uid)
    return pod is not None


def terminate_agent(world: World, fault: Fault) -> bool:
    """SIGTERM to an agent whose pod nobody deletes: the kubelet evicts it, or shuts its node down."""
    agent = pick_agent(world, fault)
    if agent is not None:
        agent.handle(ev.Terminated())
    return agent is not None


def drain_node(world: World, fault: Fault) -> bool:
    """kubectl drain: no pod is scheduled to a node any more, and all that are on it are deleted. It is uncordoned after a while."""
    node = world.pods.nodes[pick_node(world, fault)]
    pods = world.pods.on_node(node.name)
    if node.is_cordoned or not pods:
        return False
    hazards.cordon(world, node, fault.for_s)
    for pod in pods:
        world.terminate(pod.uid)
    return True


def taint_node(world: World, fault: Fault) -> bool:
    """A node gets a taint that announces its end; where `turns` is odd no pod is scheduled there any more. It vanishes after a
    while, where `other` is not 0 with the pods that are left there."""
    node = world.pods.nodes[pick_node(world, fault)]
    pods = world.pods.on_node(node.name)
    if node.has_notice or node.is_cordoned or not pods:
        return False
    hazards.taint(world, node, fault.for_s, forbids=bool(fault.turns % 2), ends=bool(fault.other))
    return True


def disrupt_pod(world: World, fault: Fault) -> bool:
    """A pod gets condition DisruptionTarget. It is deleted after a while; where `other` is 0 that never happens, and the condition
    is taken back, as Kubernetes does."""
    pod = pick_pod(world, fault)
    if pod is None or not pod.usable or pod.disruption:
        return False
    reasons = ("EvictionByEvictionAPI", "PreemptionByScheduler", "SomebodyElse")
    world.pods.by_uid[pod.uid] = ended = replace(pod, disruption=reasons[fault.size % len(reasons)])
    if ended.disrupted:
        world.ledger.ended(pod.name, world.generation, None, reason=ended.disrupted, is_disruption=True)
    world.dirty()

    def end() -> None:
        there = world.pods.by_uid.get(pod.uid)
        if there is not None and fault.other:
            world.terminate(pod.uid)
        elif there is not None:
            world.pods.by_uid[pod.uid] = replace(there, disruption="")
            world.dirty()

    world.lasts(fault.for_s, end)
    return True


def refuse_pods(world: World, fault: Fault) -> bool:
    """For a while kubelets refuse each pod that comes; where `other` is 0 on all nodes, else on one."""
    nodes = hazards.some_nodes(world, pick_node(world, fault), every=fault.other == 0)
    if any(node.refuses for node in nodes):
        return False
    for node in nodes:
        node.refuses = True

    def end() -> None:
        for node in nodes:
            node.refuses = False

    world.lasts(fault.for_s, end)
    return True


def lose_images(world: World, fault: Fault) -> bool:
    """For a while pods that come cannot pull their image; where `other` is 0 on all nodes, else on one."""
    nodes = hazards.some_nodes(world, pick_node(world, fault), every=fault.other == 0)
    if not all(node.has_images for node in nodes):
        return False
    for node in nodes:
        node.has_images = False

    def end() -> None:
        for node in nodes:
            node.has_images = True

    world.lasts(fault.for_s, end)
    return True


def vanish(world: World, fault: Fault) -> bool:
    """kubectl delete pod --force."""
    pod = pick_pod(world, fault)
    if pod is not None:
        world.vanish(pod.uid)
    return pod is not None


def power_off(world: World, fault: Fault) -> bool:
    """A node loses power; it comes back after a while or never."""
    return hazards.node_off(world, pick_node(world, fault), fault.for_s)


def reboot(world: World, fault: Fault) -> bool:
    """A node reboots within seconds: every container on it ends with 255 and starts again. Where `turns` is odd its kubelet has
    ended the pods of roles before that."""
    name = pick_node(world, fault)
    if fault.turns % 2 and world.pods.nodes[name].is_up:
        world.pods.shut_down_roles(name)
    return hazards.node_off(world, name, min(fault.for_s, REBOOT_S))


def not_ready(world: World, fault: Fault) -> bool:
    """The API calls a node NotReady although it is well (its kubelet restarts, it flaps)."""
    node = world.pods.nodes[pick_node(world, fault)]
    if not node.is_up:
        return False
    hazards.say_ready(world, node.name, False)
    world.lasts(fault.for_s, lambda: hazards.say_ready(world, node.name, True) if node.is_up else None)
    return True


# --- links ---------------------------------------------------------------------------------------------------------


def break_stream(world: World, fault: Fault) -> bool:
    """The connection between an agent and the operator breaks; the agent calls again."""
    agent = pick_agent(world, fault)
    if agent is None or not agent.connected:
        return False
    agent.disconnect()
    return True


def cut_operator(world: World, fault: Fault) -> bool:
    """Nothing passes between an agent and the operator; both find out when their kernels do."""
    agent = pick_agent(world, fault)
    if agent is None or agent.uid in world.unreachable:
        return False
    world.unreachable.add(agent.uid)
    agent.mute()
    world.lasts(fault.for_s, lambda: world.reach_again(agent.uid))
    return True


def cut_link(world: World, fault: Fault) -> bool:
    """Two workers cannot reach each other."""
    pair = pick_pair(world, fault)
    if pair is None:
        return False
    link = frozenset(pair)
    world.network.cut_links.add(link)
    world.network.watch_out()
    world.after(world.pace.probe_s, lambda: hazards.meet_cut_links(world))
    world.lasts(fault.for_s, lambda: world.network.cut_links.discard(link))
    return True


def cut_one_way(world: World, fault: Fault) -> bool:
    """What one worker sends does not reach another; only that one notices."""
    pair = pick_pair(world, fault)
    if pair is None:
        return False
    world.network.deaf_links.add(pair)
    world.network.watch_out()
    world.after(world.pace.probe_s, lambda: hazards.meet_cut_links(world))
    world.lasts(fault.for_s, lambda: world.network.deaf_links.discard(pair))
    return True


def cut_nodes(world: World, fault: Fault) -> bool:
    """What pods on one node send does not reach those on another."""
    names = sorted(world.pods.nodes)
    start = fault.at % len(names)
    to = (start + 1 + fault.other % (len(names) - 1)) % len(names)
    hazards.cut_nodes(world, names[start], names[to], fault.for_s)
    return True


def pause_node(world: World, fault: Fault) -> bool:
    """Nothing passes to or from a node for a moment; every connection outlasts it. Shorter than what proves a loss."""
    uids = [pod.uid for pod in world.pods.on_node(pick_node(world, fault)) if pod.uid in world.agents]
    if not uids or world.network.dark & set(uids):
        return False
    world.network.pause(uids, min(fault.for_s, PAUSE_S))
    return True


# --- operators and the API server ----------------------------------------------------------------------------------


def kill_operator(world: World, fault: Fault) -> bool:
    """The operator is killed; another one leads after a while."""
    if world.operator is None:
        return False
    world.kill_operator()
    world.lasts(min(fault.for_s, 60.0), lambda: hazards.lead(world))
    return True


def pause_operator(world: World, fault: Fault) -> bool:
    """The leader is paused, where `turns` is odd in the middle of its next write; after its lease another one leads, and it wakes
    up beside it."""
    leader = world.operator
    if leader is None or leader.paused:
        return False
    if fault.turns % 2:
        world.store.suspends_next_write = True
    else:
        leader.pause()
    world.after(15.0, lambda: hazards.take_over(world, leader))
    world.lasts(min(fault.for_s, 40.0), lambda: hazards.wake(world, leader))
    return True


def api_down(world: World, fault: Fault) -> bool:
    """The API server does not answer for a while; the last write before it, where `turns` is odd, took effect unanswered."""
    hazards.lose_api(world, min(fault.for_s, 20.0), loses_an_answer=bool(fault.turns % 2))
    return True


def restore(world: World, fault: Fault) -> bool:
    """The job's status is that of an older backup, and the operator starts anew."""
    if len(world.store.history) < fault.size or world.store.is_down or world.store.is_deleted:
        return False
    hazards.restore(world, world.store.history[-fault.size])
    return True


def lag_watch(world: World, fault: Fault) -> bool:
    """The operators' watch of pods lags behind: they plan from what was."""
    return hazards.lag_watch(world, fault.for_s)


def clock_jump(world: World, fault: Fault) -> bool:
    """The wall clock of the operators' machine is set by an hour, forwards or back."""
    skew_s = 3600.0 if fault.turns % 2 else -3600.0
    world.wall_skew_s += skew_s
    world.lasts(fault.for_s, lambda: setattr(world, "wall_skew_s", world.wall_skew_s - skew_s))
    return True


# --- the spec ------------------------------------------------------------------------------------------------------


def scale(world: World, fault: Fault) -> bool:
    """spec.replicas changes."""
    policy = world.store.view["spec"].get("elasticPolicy")
    if not policy or world.has_ended:
        return False
    before = world.replicas
    world.scale(max(policy["minReplicas"], min(policy["maxReplicas"], fault.size * world.per_group)))
    return world.replicas != before


def suspend(world: World, fault: Fault) -> bool:
    """spec.runPolicy.suspend is true for a while; of a job that is suspended, it is taken back."""
    if world.has_ended:
        return False
    suspended = not (world.store.view["spec"].get("runPolicy") or {}).get("suspend")
    world.suspend(suspended)
    if suspended:
        world.lasts(min(fault.for_s, 60.0), lambda: world.suspend(False))
    return True


def misspell(world: World, fault: Fault) -> bool:
    """Before the start the template gets a mount that only the operator refuses. It is corrected later."""
    right = world.store.view["spec"]["template"]
    if world.store.view["status"].get("startTime") or world.has_trained or world.has_ended:
        return False
    if parse_stored(world.store.view).refusal is not None:
        return False  # it is wrong already, and will be corrected

    def correct() -> None:
        if not world.store.is_deleted:
            world.store.change_spec(lambda spec: spec.update(template=right))
            world.dirty()

    def change(spec: dict[str, Any]) -> None:
        trainer = spec["template"]["spec"]["containers"][0]
        trainer["volumeMounts"] = [*trainer.get("volumeMounts", ()), {"name": "x", "mountPath": "/regroup/x"}]

    world.store.change_spec(change)
    world.dirty()
    world.lasts(fault.for_s, correct)
    return True


def resize(world: World, fault: Fault) -> bool:
    """spec.replicas and minReplicas change together."""
    if not world.store.view["spec"].get("elasticPolicy") or world.has_ended:
        return False
    before = world.store.view["spec"]
    unit = before["elasticPolicy"].get("sizeMultipleOf", world.per_group)
    most = before["elasticPolicy"]["maxReplicas"]
    minimum = min((1 + fault.at % 3) * unit, most - most % unit)

    def change(spec: dict[str, Any]) -> None:
        spec["elasticPolicy"]["minReplicas"] = minimum
        spec["replicas"] = max(minimum, min(spec["elasticPolicy"]["maxReplicas"], fault.size * world.per_group))

    world.store.change_spec(change)
    world.dirty()
    return bool(world.store.view["spec"] != before)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def truncate_checkpoint(world: World, fault: Fault) -> bool:  # noqa: ARG001
    """The newest checkpoint is damaged."""
    return world.disk.truncate_newest()


def remove_checkpoint(world: World, fault: Fault) -> bool:  # noqa: ARG001
    """The newest checkpoint is missing; the status still names it."""
    return world.disk.remove_newest()


def lose_checkpoints(world: World, fault: Fault) -> bool:
    """Nobody can read or write the volume for a while."""
    return world.disk.hide(fault.for_s)


def fill_volume(world: World, fault: Fault) -> bool:
    """The volume is full for a while: it can be read, and no checkpoint can be written."""
    return world.disk.fill(fault.for_s)


def blind_worker(world: World, fault: Fault) -> bool:
    """One worker cannot read the volume."""
    agent = pick_agent(world, fault)
    if agent is None:
        return False
    world.disk.blind.add(agent.uid)
    world.lasts(fault.for_s, lambda: world.disk.blind.discard(agent.uid))
    return True
