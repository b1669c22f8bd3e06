"""What rounds of local steps come to, by hand: one process that does in turn what each rank did, in the recorded order.

Independent of `regroup.parallel`: of the library it takes only which samples a microbatch has. Scaling by powers of two, which
the library does, changes no bit and is left out.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regroup.data import SamplePlan

Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """How rounds are made."""

    inner_steps: int
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    max_norm: float | None = None


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
        out: torch.Tensor = self.outward(torch.relu(hidden))
        return out


def make_model() -> Model:
    """Return the model, the same each time, whoever draws random numbers meanwhile."""
    model, generator = Model(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return one with a state, and with decay: a parameter without a gradient must be left alone."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def make_data(count: int = 500) -> Data:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return x, (x @ torch.randn(8, 4, generator=torch.Generator().manual_seed(2))).argmax(1)


@dataclass
class Holder:
    """What one process holds."""

    model: torch.nn.Module
    inner: torch.optim.Optimizer
    outer: torch.optim.Optimizer
    losses: dict[int, float] = field(default_factory=dict)

    @classmethod
    def new(
        cls, way: Way, model: torch.nn.Module, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    ) -> Holder:
        outer = torch.optim.SGD(
            model.parameters(), lr=way.outer_rate, momentum=way.outer_momentum, nesterov=way.outer_momentum > 0
        )
        return cls(model, optimizer(model), outer)

    def take(self, other: Holder) -> None:
        """Get a copy of all that another holds."""
        for mine, theirs in ((self.model, other.model), (self.inner, other.inner), (self.outer, other.outer)):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))

    def bits(self) -> list[torch.Tensor]:
        """Return all tensors: parameters, and both optimizers' state."""
        return tensors_of(self.model, self.inner, self.outer)


def tensors_of(*parts: Any) -> list[torch.Tensor]:
    """Return all tensors of the parts' states, in order."""
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
    return found


def replay_round(ranks: Sequence[Holder], way: Way, plan: SamplePlan, data: Data, index: int) -> None:
    """Do a round: `ranks` are the processes that took part in it, in rank order."""
    x, y = data
    anchors = [[parameter.detach().clone() for parameter in one.model.parameters()] for one in ranks]
    changes: list[list[torch.Tensor]] = []
    used: set[int] = set()
    weights, loss_sum = [], 0.0
    for rank, one in enumerate(ranks):
        parameters = list(one.model.parameters())
        share = plan.share(rank, len(ranks))
        cuts = [-(-number * len(share) // way.inner_steps) for number in range(way.inner_steps + 1)]
        for low, high in itertools.pairwise(cuts):
            one.inner.zero_grad()
            weight = 0
            for v in share[low:high]:
                ids = plan.ids(index, v)
                loss = torch.nn.functional.cross_entropy(one.model(x[ids]), y[ids])
                loss.backward(torch.tensor(float(len(ids))))  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach()) * len(ids)
                weight += len(ids)
            if not weight:
                continue
            for number, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    parameter.grad /= weight
                    used.add(number)
            if way.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, way.max_norm)
            one.inner.step()
        weights.append(len(share) * plan.microbatch)
        with torch.no_grad():
            changes.append([(old - new) * weights[-1] for old, new in zip(anchors[rank], parameters)])
    total = sum(weights)
    for one, anchor in zip(ranks, anchors):
        with torch.no_grad():
            for number, parameter in enumerate(one.model.parameters()):
                summed = changes[0][number].clone()
                for change in changes[1:]:
                    summed += change[number]
                parameter.copy_(anchor[number])
                parameter.grad = summed / total if number in used else None
        one.outer.step()
        one.losses[index] = loss_sum / total
