"""The processes of tier Script: they never attach, train while all of the newest generation run, and fail when one is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regroup_operator.api.members import parse_members

if TYPE_CHECKING:
    from tests.simulator.trainers import Trainer
    from tests.simulator.world import World


def script_group(world: World) -> list[Trainer]:
    """Return the processes of the newest generation's script, in their order, if all of them run."""
    number = world.generation
    uids = {p.id: uid for uid, p in world.pods.by_uid.items()}
    agents = [world.agents.get(uids.get(m, "")) for m in parse_members(world.members)]
    trainers = [t for a in agents if a is not None for t in a.trainers.values()]
    run = [t for t in trainers if t.alive and t.begun and t.launched == number]
    go_on = all(not t.stopped and not t.frozen for t in run)
    return run if run and go_on and len(run) == len(agents) * world.processes else []


def script_step(world: World) -> None:
    """Have the group commit a step, if there is one; after the last step its processes end."""
    trainers, ledger = script_group(world), world.ledger
    if not trainers or world.is_slow(trainers):
        return
    if len(ledger.committed) < world.total_steps:
        ledger.commit((world.generation, len(ledger.committed) + 1))
    world.print_a_line(trainers)
    if len(ledger.committed) >= world.total_steps:
        for trainer in trainers:
            _end(world, trainer)


def _end(world: World, trainer: Trainer) -> None:
    if trainer.is_ending:
        return
    trainer.is_ending = True
    place = (trainer.launched, (trainer.agent.name, trainer.local_rank))
    world.happened("leaving", trainer.agent.uid)
    world.after(world.pace.some((0.0, world.end_s)), lambda: trainer.in_main(lambda: trainer.return_zero(place)))


def script_died(world: World, trainer: Trainer) -> None:
    """A process is gone: who has lost a peer fails in its next collective."""
    if world.script != "plain" or not world.backs_off or len(world.ledger.committed) >= world.total_steps:
        return
    peers = [t for a in world.agents.values() for t in a.trainers.values() if t.launched == trainer.launched]
    for peer in peers:
        if peer is not trainer and peer.alive:
            world.after(
                world.pace.some((0.1, 2.0)),
                lambda t=peer: t.in_main(lambda: t.agent.exited(t, 1, "RuntimeError: Connection closed by peer")),  # type: ignore[misc]
            )
