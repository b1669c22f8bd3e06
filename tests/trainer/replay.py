"""What the recorded versions of a parameter server come to, by hand: one process that applies them in their order.

Independent of `regroup.parallel` and of the session: of the library it takes only which samples a microbatch has. Scaling by powers
of two, which the library does, changes no bit and is left out. It keeps the parameters of every version, since a push was computed
on an older one.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regroup.data import SamplePlan

MAX_NORM = 1.0
Push = tuple[int, Sequence[int]]
"""The version that its gradients were computed on, and its shares."""


class Model(torch.nn.Module):
    """A small model, some parameters of which nobody uses, and others only for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.rare, self.unused = torch.nn.Linear(8, 16), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inward(x)
        if x[0, 0] > 1:
            hidden = hidden + self.rare(x)
        out: torch.Tensor = self.outward(torch.dropout(torch.relu(hidden), 0.1, self.training))
        return out


def make() -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return what is trained, the same each time, whoever draws random numbers meanwhile."""
    model, generator = Model(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)


def make_data(count: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return x, (x @ torch.randn(8, 4, generator=torch.Generator().manual_seed(2))).argmax(1)


def replay(
    versions: Sequence[Sequence[Push]], plan: SamplePlan, hashes: list[str] | None = None
) -> tuple[Model, torch.optim.Optimizer]:
    """Apply versions, each of these pushes in this order, from the beginning; return what they come to. `hashes` gets one of the
    parameters after each."""
    model, optimizer, schedule = make()
    x, y = make_data()
    held: list[dict[str, Any]] = [copy.deepcopy(model.state_dict())]
    for pushes in versions:
        sums: list[torch.Tensor] | None = None
        used: set[int] = set()
        weight = 0
        for base, shares in pushes:
            model.load_state_dict(held[base])
            model.zero_grad()
            for share in shares:
                block, v = divmod(share, plan.num_virtual)
                ids = plan.ids(block, v)
                seed(plan.seed, block, v)
                loss = torch.nn.functional.cross_entropy(model(x[ids]), y[ids])
                loss.backward(torch.tensor(float(len(ids))))  # type: ignore[no-untyped-call]
                weight += len(ids)
            gradients = []
            for number, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    used.add(number)
                gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
            sums = gradients if sums is None else [total + gradient for total, gradient in zip(sums, gradients)]
        assert sums is not None
        model.load_state_dict(held[-1])
        for number, (parameter, total) in enumerate(zip(model.parameters(), sums)):
            parameter.grad = total / weight if number in used else None
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        held.append(copy.deepcopy(model.state_dict()))
        if hashes is not None:
            hashes.append(hash_of(model))
    return model, optimizer


def seed(number: int, block: int, v: int) -> None:
    """Draw from here on what the microbatch draws."""
    from regroup.data.mix import mix

    torch.manual_seed(mix(number, block, v))


def hash_of(*parts: Any) -> str:
    """Return a hash of all tensors of the parts' states."""
    found: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one)

    for part in parts:
        walk(part.state_dict())
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in found)).hexdigest()
