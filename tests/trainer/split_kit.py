"""Jobs whose model is split over model groups: how they start, and what all their parts together are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from regroup.protocol import env
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import finish
from tests.trainer.zygote import Zygote

SCRIPT = Path(__file__).parent / "split_job.py"
ALWAYS: dict[str, str] = {}
"""What the processes of all jobs get in their environment besides."""


class SplitJob:
    """Workers of one process each, `size` of them to a model group: slot mod `size` is the inner index."""

    def __init__(
        self, directory: Path, zygote: Zygote, mesh: str, script: Path = SCRIPT, /, **environment: str
    ) -> None:
        self.split(mesh)
        self.parts = directory / "parts"
        self.parts.mkdir(parents=True)
        values = {"TEST_MESH": mesh, "TEST_PARTS": str(self.parts), **ALWAYS, **environment}
        self.agents = AgentDouble(directory, zygote, script, values)

    def split(self, mesh: str) -> None:
        """Workers that are started from here on split the model so."""
        self.sizes = {name: int(size) for name, _, size in (one.partition("=") for one in mesh.split())}
        self.size = math.prod(self.sizes.values())

    def start(self, slots: Iterable[int], **environment: str) -> None:
        slots = list(slots)
        for slot in slots:
            self.agents.start(slot, **self.place(slot), **environment)
        self.agents.wait_attached(*slots)

    def restart(self, slot: int) -> None:
        """Start a worker's process again, in place: its pod stays."""
        self.agents.run(slot, **self.place(slot))
        self.agents.wait_attached(slot)

    def place(self, slot: int) -> dict[str, str]:
        return {
            env.GROUP_PLACE: str(slot % self.size),
            env.WORKERS_PER_GROUP: str(self.size),
            env.LOCAL_WORLD_SIZE: "1",
        }

    def finish(self, slots: Sequence[int]) -> tuple[list[dict[str, Any]], dict[str, dict[str, torch.Tensor]]]:
        """Let the job end; return the last line of each trainer, and the whole state by parameter, put together from the
        parts of one group. Parts of one inner index are equal, bit by bit, or this fails."""
        ends = finish(self.agents, list(slots))
        parts = [torch.load(self.parts / f"{rank}.pt") for rank in range(len(slots))]
        for rank in range(self.size, len(slots)):
            first = parts[rank % self.size]
            for name, one in parts[rank].items():
                for key, held in one["local"].items():
                    assert torch.equal(held, first[name]["local"][key]), (rank, name, key)
        return ends, {
            name: {key: self._whole(parts, name, key) for key in one["local"]}
            for part in parts
            for name, one in part.items()
        }

    def _whole(self, parts: Sequence[Any], name: str, key: str) -> torch.Tensor:
        """Put a tensor together. FSDP2 splits last, so it is undone first; the ranks of a mesh count its last dimension first.
        Of a pipeline one process has it."""
        holders = [inner for inner in range(self.size) if name in parts[inner]]
        pieces = [parts[inner][name]["local"][key] for inner in holders]
        one = parts[holders[0]][name]
        sizes = [(dim, size) for dim, size in self.sizes.items() if dim != "pipeline"]
        for at, (dim, size) in enumerate(sizes):
            inside = 1
            for _, further in sizes[at + 1 :]:
                inside *= further
            together = [pieces[i : i + size * inside : inside] for i in range(inside)]
            split = one["split"][one["dims"].index(dim)] if dim in one["dims"] else None
            along = int(split[split.index("(") + 1]) if split is not None and "S(" in split else None
            pieces = [
                torch.cat(group, along) if along is not None and group[0].ndim else group[0] for group in together
            ]
        whole: torch.Tensor = pieces[0]
        return whole

    def close(self) -> None:
        self.agents.close()
