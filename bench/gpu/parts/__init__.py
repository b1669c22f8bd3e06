"""The parts of `bench.gpu`, in the order in which they run. Bounds are some times what a part is expected to take on one H100."""

from __future__ import annotations

from bench.gpu.part import Part

from . import environment, equal, forms, gpt2, kills, meshes, overhead, scale, state

PARTS: tuple[Part, ...] = (
    Part("environment", "what there is to run on", 30, environment.run),
    Part("forms", "NCCL alone: groups of 1, 2 and 4 ranks form and sum", 45, forms.run),
    Part("losses", "equal losses at 1, 2 and 4 ranks", 60, equal.losses),
    Part("exact", "reduction: exact gives equal bits at 1, 2 and 4 ranks", 60, equal.exact),
    Part("kills", "20 ranks are killed in their steps", 110, kills.in_steps),
    Part("connecting", "10 times the next process is killed, too, while it connects", 90, kills.connecting),
    Part("scale", "2, 3, 2, 3, 2 ranks", 60, scale.run),
    Part("state", "snapshots, checkpoints, and continuing from each", 100, state.run),
    Part("meshes", "each kind of split model beside one process, read at another split, and killed", 120, meshes.run),
    Part("gpt2", "GPT-2 124M beside a plain loop", 150, gpt2.run),
    Part("overhead", "a step beside DDP, and a step of 20 ms", 75, overhead.run),
)
