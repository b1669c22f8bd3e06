"""Model, optimizer and `state` of this process: one tree with a name, the state pair, and whether it is whole.

Owns the objects' identity: they are the user's, loaded in place and never replaced. Does not move bytes between ranks
(`transfer`) or to disk (`regroup.checkpoint`, whose `pack` is the one encoding of a tree). Rules STATE and TORN.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from regroup.checkpoint import tree as trees
from regroup.checkpoint.errors import CheckpointError
from regroup.errors import StateError
from regroup.protocol.state import StatePair


class TrainingState:
    """The state that this process trains. `pair` names it while it is valid; None: it is no state anybody may copy."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, extra: Mapping[str, Any]) -> None:
        """Raises StateError, by name, for what cannot be saved."""
        self.model = model
        self.optimizer = optimizer
        self.extra = dict(extra)
        self.adopted = 0
        """Generation in which the state was adopted; 0 without one."""
        self._pair: StatePair | None = None
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
        self._pair, self.adopted = None, 0
        yield
