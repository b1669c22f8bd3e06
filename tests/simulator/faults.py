"""The faults of a walk: data that can be printed, read back and replayed. What each does to a world is in strikes.py.

A fault names its victims by position (`at`, counted modulo those that there are when it comes), so that the rest of a list
still means something when some of it is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tests.simulator import strikes
from tests.simulator.world import FOREVER, World

MOMENTS = ("heard", "entered", "formed", "adopted", "attached", "checkpoint", "committed", "near-end")
"""In the middle of what a fault can come: World.happened."""
LEAVING = "leaving"
"""The moment at which a script leaves its loop; not one of MOMENTS, because it comes at the end only."""
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


@dataclass(frozen=True)
class Kind:
    strike: Callable[[World, Fault], bool]
    """Returns whether it found something to hit."""
    weight: float = 1.0
    spans: tuple[float, ...] = (FOREVER,)
    """How long it lasts, one of these."""
    session_only: bool = False
    durable: bool = False
    """Only where checkpoints are written."""


SHORT = (0.2, 1.0, 4.0, 10.0)
# A log that stalls stops processes, never an agent (strikes.stall_log).
KINDS: dict[str, Kind] = {
    "kill": Kind(strikes.kill, 4),
    "exit-code": Kind(strikes.exit_code, 3),
    "kill-two": Kind(strikes.kill_two, 2),
    "kill-all": Kind(strikes.kill_all, 2),
    "raise-all": Kind(strikes.raise_all, 2, session_only=True),
    "kill-store-host": Kind(strikes.kill_store_host, 2),
    "kill-store-agent": Kind(strikes.kill_store_agent, 1),
    "kill-zygote": Kind(strikes.kill_zygote, 1),
    "term-trainer": Kind(strikes.terminate_trainer, 1),
    "container": Kind(strikes.container, 2),
    "freeze-trainer": Kind(strikes.freeze_trainer, 2, SHORT),
    "hang-trainer": Kind(strikes.freeze_trainer, 1, session_only=True),
    "slow-rank": Kind(strikes.slow_rank, 1, (4.0, 10.0, 40.0)),
    "stall-log": Kind(strikes.stall_log, 1, (4.0, 10.0, 25.0)),
    "freeze-agent": Kind(strikes.freeze_agent, 2, SHORT),
    "hang-agent": Kind(strikes.freeze_agent, 1),
    "delete-pod": Kind(strikes.delete_pod, 2),
    "term-agent": Kind(strikes.terminate_agent, 2),
    "drain-node": Kind(strikes.drain_node, 2, (10.0, 40.0, FOREVER)),
    "taint-node": Kind(strikes.taint_node, 2, (1.0, 10.0, 60.0, FOREVER)),
    "disrupt-pod": Kind(strikes.disrupt_pod, 2, (0.5, 10.0, 120.0)),
    "refuse-pods": Kind(strikes.refuse_pods, 1, (5.0, 40.0, 150.0, 700.0)),
    "lose-images": Kind(strikes.lose_images, 1, (5.0, 40.0, 150.0)),
    "vanish": Kind(strikes.vanish, 2),
    "power-off": Kind(strikes.power_off, 1, (60.0, 200.0, FOREVER)),
    "reboot": Kind(strikes.reboot, 1, (6.0, 12.0)),
    "not-ready": Kind(strikes.not_ready, 1, (3.0, 30.0, 60.0)),
    "break-stream": Kind(strikes.break_stream, 3),
    "cut-operator": Kind(strikes.cut_operator, 2, (1.0, 4.0, 12.0, 40.0, FOREVER)),
    "cut-link": Kind(strikes.cut_link, 1, (2.0, 12.0, 70.0)),
    "cut-one-way": Kind(strikes.cut_one_way, 1, (2.0, 12.0, 70.0)),
    "sever-link": Kind(strikes.cut_link, 1),
    "sever-one-way": Kind(strikes.cut_one_way, 1),
    "slow-starts": Kind(strikes.slow_starts, 1, (5.0, 30.0)),
    "kill-operator": Kind(strikes.kill_operator, 2, (0.5, 5.0, 16.0, 40.0)),
    "pause-operator": Kind(strikes.pause_operator, 1, (4.0, 14.0, 18.0, 30.0)),
    "api-down": Kind(strikes.api_down, 1, (1.0, 5.0, 20.0)),
    "restore": Kind(strikes.restore, 0.5),
    "scale": Kind(strikes.scale, 4),
    "suspend": Kind(strikes.suspend, 1),
    "resize": Kind(strikes.resize, 2),
    "misspell": Kind(strikes.misspell, 0.2, (5.0, 40.0)),
    "hang-all": Kind(strikes.hang_all, 0.3, session_only=True),
    "lose-file": Kind(strikes.lose_file, 1),
    "disk-full": Kind(strikes.fill_agent_disk, 1, (1.0, 4.0)),
    "pause-node": Kind(strikes.pause_node, 2, (0.2, 1.0)),
    "cut-nodes": Kind(strikes.cut_nodes, 1, (2.0, 12.0, 70.0)),
    "lag-watch": Kind(strikes.lag_watch, 1, (1.0, 5.0, 15.0)),
    "clock-jump": Kind(strikes.clock_jump, 0.5, (5.0, FOREVER)),
    "truncate-checkpoint": Kind(strikes.truncate_checkpoint, 1, durable=True),
    "remove-checkpoint": Kind(strikes.remove_checkpoint, 1, durable=True),
    "lose-checkpoints": Kind(strikes.lose_checkpoints, 0.5, (5.0, 60.0), durable=True),
    "volume-full": Kind(strikes.fill_volume, 1, (5.0, 30.0), durable=True),
    "blind-worker": Kind(strikes.blind_worker, 0.5, (20.0, FOREVER), durable=True),
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
