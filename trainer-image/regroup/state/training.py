"""Model, optimizer and `state` of this process: one tree with a name, the state pair, and whether it is whole.

Owns the objects' identity: they are the user's, loaded in place and never replaced. Does not move bytes between ranks
(`transfer`) or to disk (`regroup.checkpoint`, whose `pack` is the one encoding of a tree). Rules STATE and TORN.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from regroup.checkpoint import tree as trees
from regroup.checkpoint.errors import CheckpointError
from regroup.errors import StateError, UsageError
from regroup.protocol.state import StatePair


@dataclass(frozen=True)
class CommitRecord:
    """What a commit came to. It stays with the state that it made, and goes with it to whoever gets a copy."""

    state: StatePair
    loss: float
    """Mean over the whole batch, by weight."""
    weight: float
    norm: torch.Tensor | float | None = None
    """Norm of the gradient before it was clipped; None: it was not clipped. A scalar, on the model's device."""

    def to_json(self) -> list[Any]:
        """Return the form in which it is sent. Waits for the device."""
        return [self.state, self.loss, self.weight, None if self.norm is None else float(self.norm)]

    @classmethod
    def from_json(cls, data: list[Any]) -> "CommitRecord":
        state, loss, weight, norm = data
        return cls(StatePair(*state), loss, weight, norm)


class TrainingState:
    """The state that this process trains. `pair` names it while it is valid; None: it is no state anybody may copy."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, extra: Mapping[str, Any]) -> None:
        """Raises StateError, by name, for what cannot be saved, and UsageError for an optimizer that cannot be used."""
        self.model = model
        self.optimizer = optimizer
        self.extra = dict(extra)
        self.adopted = 0
        """Generation in which the state was adopted; 0 without one."""
        self.record: CommitRecord | None = None
        """Of the commit that made this state, where that is known: not of one that was read from a checkpoint."""
        self._pair: StatePair | None = None
        check_optimizer(optimizer, model)
        for name, part in self.extra.items():
            if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
                raise StateError(
                    f'state["{name}"] is a {type(part).__name__} without state_dict and load_state_dict. '
                    "Pass an object that has both, or leave it out."
                )
        self.packed()

    @property
    def pair(self) -> StatePair | None:
        return self._pair

    @property
    def step(self) -> int:
        """Number of committed steps; 0 without a state."""
        return self._pair.step if self._pair is not None else 0

    def named(self, pair: StatePair, adopted: int) -> None:
        """Give what is held its name, after adoption or a commit."""
        self._pair, self.adopted = pair, adopted

    def committed(self, record: CommitRecord, adopted: int) -> None:
        """A step was committed: what is held is the state that it names."""
        self.named(record.state, adopted)
        self.record = record

    def tree(self) -> trees.Tree:
        """Return {model, optimizer, state}: the live tensors, not copies."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "state": {name: part.state_dict() for name, part in self.extra.items()},
        }

    def packed(self) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the tree as JSON text and tensors by name. Raises StateError that names what cannot be saved."""
        try:
            return trees.pack(self.tree())
        except CheckpointError as error:
            raise StateError(str(error)) from error

    def load(self, tree: trees.Tree) -> None:
        """Put a tree into the user's objects, in place. The state has no name until `named`; a failure leaves it without.

        Raises StateError when the tree does not fit the script's objects.
        """
        misfit = trees.differences(tree, self.model.state_dict())
        if misfit is None and set(tree["state"]) != set(self.extra):
            misfit = f"It has state entries {sorted(tree['state'])}, the script has {sorted(self.extra)}."
        if misfit is not None:
            raise StateError(
                f"The state to continue from does not fit this script. {misfit} Run one script in all workers."
            )
        with self.changing():
            try:
                self.model.load_state_dict(tree["model"])
                self.optimizer.load_state_dict(tree["optimizer"])
                for name, part in self.extra.items():
                    part.load_state_dict(tree["state"][name])
            except Exception as error:
                raise StateError(f"The state to continue from cannot be loaded: {error}") from error

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The state is in between: without a name from here on, until `named`."""
        self._pair, self.adopted, self.record = None, 0, None
        yield


_COMMUNICATE = ("ZeroRedundancyOptimizer", "DistributedOptimizer", "PostLocalSGDOptimizer")
"""Torch's own optimizers whose `step` calls collectives."""


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    """Raise UsageError for an optimizer that communicates, and for a parameter that it steps and the model does not own: that
    would be no part of the state, and its gradient of no reduction."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _COMMUNICATE:
            raise UsageError(
                f"optimizer is a {kind.__name__}, whose step() calls collectives: a rank that dies in it would leave the others "
                "with half a step. Pass the optimizer that it wraps."
            )
    owned = {id(parameter) for parameter in model.parameters()}
    for i, group in enumerate(getattr(optimizer, "param_groups", ())):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in owned:
                raise UsageError(
                    f"optimizer.param_groups[{i}]['params'][{j}], of shape {list(parameter.shape)}, is not a parameter of "
                    "the model. Put everything that is trained into one module, and pass that as model."
                )
