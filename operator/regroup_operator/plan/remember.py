"""Make the memory of a job from what the stages of a plan have found. Pure.

The stages read the memory of the plan before and change nothing in it. This module puts the memory of pods and slots together, and
forgets those that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import JobMemory, SlotMemory, WorkerMemory
from regroup_operator.model.records import Pod
from regroup_operator.plan.facts.facts import Facts
from regroup_operator.plan.failures.exits import avoided_nodes
from regroup_operator.plan.failures.failures import Failures
from regroup_operator.plan.generation.generation import NextGeneration
from regroup_operator.plan.pods.pods import PodChanges


def remember(facts: Facts, failures: Failures, generation: NextGeneration, pods: PodChanges) -> JobMemory:
    """Return what the next plan is told of this one, after the status of this one has been written."""
    kept, there = generation.kept, {pod.uid for pod in facts.inputs.obs.pods}
    return replace(
        facts.memory,
        workers=_workers(facts, failures, generation, pods),
        slots=_slots(facts, failures, pods),
        roles=pods.roles.rows,
        issued=kept.issued,
        script=failures.script,
        has_looked=True,
        # A worker whose peer is gone may join again, which the next announcement has to see.
        links=frozenset(pair for pair in kept.links if not pair.isdisjoint(there)),
        losses=facts.losses,
        created=_unseen(pods.created, facts.inputs.obs.pods),
        crash=failures.rows.crash,
        ignored=failures.rows.ignored,
        pod_ends=failures.rows.pod_ends,
    )


def _workers(facts: Facts, failures: Failures, generation: NextGeneration, pods: PodChanges) -> dict[str, WorkerMemory]:
    """Return what is remembered of each pod that there is."""
    counted, peers, kept, unplaced = failures.seen.counted, facts.peers, generation.kept, pods.rows.capacity.unplaced
    return {
        uid: WorkerMemory(
            counted[uid],
            peers.get(uid),
            kept.spells.get(uid),
            kept.setbacks.get(uid),
            uid in kept.readers,
            unplaced.get(uid),
            uid in pods.noticed,
        )
        for uid in (pod.uid for pod in facts.inputs.obs.pods)
    }


def _slots(facts: Facts, failures: Failures, pods: PodChanges) -> dict[int, SlotMemory]:
    """Return what is remembered of each slot that the job has, that has a pod, or whose pods avoid a node.

    A job that shrinks and grows again within windowSeconds still avoids the node.
    """
    rows, nodes, inputs = pods.rows, failures.seen.nodes, facts.inputs
    avoided = avoided_nodes(nodes, inputs.clock.now_s, inputs.job.spec.recovery.window_seconds)
    with_pods = {pod.slot for pod in facts.inputs.obs.pods}
    slots = set(rows.early).union(rows.disrupted, rows.capacity.rows, nodes.last, nodes.bad)
    return {
        slot: SlotMemory(
            rows.early.get(slot),
            rows.disrupted.get(slot),
            rows.capacity.rows.get(slot),
            nodes.last.get(slot),
            nodes.bad.get(slot),
        )
        for slot in sorted(slots)
        if slot < facts.known_slots or slot in with_pods or slot in avoided
    }


def _unseen(created: Iterable[MemberId], pods: Iterable[Pod]) -> frozenset[MemberId]:
    """Return the pods that may still appear. Where a slot has one of a higher number, the one of the lower number never came."""
    newest: dict[int, int] = {}
    for pod in pods:
        newest[pod.slot] = max(pod.attempt, newest.get(pod.slot, -1))
    return frozenset(member for member in created if member.attempt > newest.get(member.slot, -1))
