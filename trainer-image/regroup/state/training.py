"""Model, optimizer and `state` of this process as one tree, which is named by a state pair while it is whole.

The objects are the user's. They are loaded in place and never replaced. `transfer` moves bytes between ranks, and
`regroup.checkpoint` to disk; its `pack` is the only encoding of a tree. Rules STATE and TORN.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsFloat

import torch

from regroup.checkpoint import shards, stages
from regroup.checkpoint import tree as trees
from regroup.checkpoint.errors import CheckpointError
from regroup.checkpoint.staging import Staging
from regroup.errors import StateError, UsageError
from regroup.protocol.state import StatePair

from .optimizers import as_optimizer, load_exactly, parts_of

MEASURES = frozenset({"regroup.noise_scale"})
"""Parts of the state on which training does not depend. A state with such a part fits a script without it, and vice versa."""


class CommitRecord(NamedTuple):
    """The result of a commit. It stays with the state that the commit made, and goes with each copy of it."""

    state: StatePair
    loss: SupportsFloat
    """Mean over the whole batch, by weight. On a device it is read when it is asked for."""
    weight: float
    norm: torch.Tensor | float | None = None
    """Norm of the gradient before it was clipped, a scalar on the model's device; None: it was not clipped."""
    learning_rates: tuple[Any, ...] = ()
    """Applied rate of each param group: a number, or a scalar on the model's device."""
    skipped: bool = False
    """The gradient was no number (an overflow in fp16), so the optimizer was not stepped."""

    def to_json(self) -> list[Any]:
        """Return the record as JSON values. Waits for the device."""
        rates = [float(rate) for rate in self.learning_rates]
        return [
            self.state,
            float(self.loss),
            self.weight,
            None if self.norm is None else float(self.norm),
            rates,
            self.skipped,
        ]

    @classmethod
    def from_json(cls, data: list[Any]) -> "CommitRecord":
        state, loss, weight, norm, rates, skipped = data
        return cls(StatePair(*state), loss, weight, norm, tuple(rates), skipped)


class TrainingState:
    """The state that this process trains. `pair` names it while it is valid. While it is None, nobody may copy the state."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, extra: Mapping[str, Any], scaler: Any = None) -> None:
        """Raise StateError that names an object that cannot be saved, and UsageError for an optimizer that cannot be used."""
        self.model = model
        self.optimizer = as_optimizer(optimizer, model)
        self.scaler = scaler
        """GradScaler for gradients in fp16. It is the part `scaler` of the state."""
        self.extra = dict(extra)
        if scaler is not None:
            if not callable(getattr(scaler, "unscale_", None)):
                raise UsageError(f"scaler is a {type(scaler).__name__}. Pass a torch.amp.GradScaler.")
            if self.extra.setdefault("scaler", scaler) is not scaler:
                raise UsageError('state["scaler"] is another object than scaler. Pass it as scaler only.')
        self.adopted = 0
        """Generation in which the state was adopted; 0: none."""
        self.record: CommitRecord | None = None
        """Record of the commit that made this state. None for a state from a checkpoint."""
        self.torn = False
        """The tensors are unusable, because a copy of another rank's state into them was cut off."""
        self.pair: StatePair | None = None
        """Name of the state. Only `named` and `begin_change` set it."""
        self.staging = Staging(model.buffers)
        """Copies of the state to host memory."""
        self.before_change: Callable[[], None] = self.staging.settle
        """Function that is called before any part of the state changes. The default waits until no copy reads the state."""
        for name, part in self.extra.items():
            if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
                raise StateError(
                    f'state["{name}"] is a {type(part).__name__} without state_dict and load_state_dict. '
                    "Pass an object that has both, or leave it out."
                )
        self.packed()

    def add(self, name: str, part: Any) -> None:
        """Add a part of the session itself to the state. Raises UsageError if the script uses its name."""
        if self.extra.setdefault(name, part) is not part:
            raise UsageError(f'state["{name}"] has a name that the session uses. Choose another.')

    @property
    def step(self) -> int:
        """Number of committed steps; 0 without a named state."""
        return self.pair.step if self.pair is not None else 0

    def named(self, pair: StatePair, adopted: int) -> None:
        """Name the state that this process holds, after adoption or a commit."""
        self.pair, self.adopted = pair, adopted

    def committed(self, record: CommitRecord, adopted: int) -> None:
        """Name the state after a commit by the commit's record, and keep the record."""
        self.named(record.state, adopted)
        self.record = record

    def tree(self) -> trees.Tree:
        """Return {model, optimizer, state} with the live tensors, not copies."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "state": {name: part.state_dict() for name, part in self.extra.items()},
        }

    def saved_tree(self) -> trees.Tree:
        """Return the tree for a checkpoint, which also has the names of the optimizer's parameters."""
        tree = {**self.tree(), stages.NAMES: self._names()}
        order = getattr(self.model, "parameter_order", None)  # of a pipeline
        return tree if order is None else {**tree, stages.ORDER: list(order)}

    def chosen(self, tree: trees.Tree) -> trees.Tree:
        """Return the part of a checkpoint's tree that this process needs. Raises CheckpointError.

        In a pipeline that is the part with its layers. The optimizer's parameters get the numbers of this process's optimizer.
        """
        names, own = tree.pop(stages.NAMES), self._names()
        # A model that does not fit is refused by `load`.
        if {name for one in own for group in one for name in group} <= set(tree["model"]):
            tree["optimizer"] = stages.chosen(tree["optimizer"], names, own)
        if not shards.is_pipelined():
            return tree
        parts = {"model": self.model, **self.extra}
        for name, held in (("model", tree), *((name, tree["state"]) for name in self.extra)):
            if isinstance(parts[name], torch.nn.Module) and isinstance(held.get(name), dict):
                own = parts[name].state_dict()
                held[name] = {key: one for key, one in held[name].items() if key in own}
        return tree

    def _names(self) -> list[list[list[str]]]:
        called = {id(one): name for name, one in self.model.named_parameters()}
        return [
            [[called[id(one)] for one in group["params"]] for group in getattr(optimizer, "param_groups", ())]
            for optimizer in parts_of(self.optimizer)
        ]

    def strides(self) -> int:
        """Return a hash of the parameters' strides by name, by which ranks compare their memory formats.

        Of split parameters this process's part counts. Dimensions of one element are left out, since their stride means nothing.
        """
        parts = [(name, shards.local_of(one.detach())) for name, one in self.model.named_parameters()]
        lies = [(name, [stride for size, stride in zip(one.shape, one.stride()) if size > 1]) for name, one in parts]
        return zlib.crc32(repr(lies).encode())

    def packed(self) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the tree as JSON text and tensors by name. Raises StateError that names a part that cannot be saved."""
        try:
            return trees.pack(shards.apart(self.tree()))
        except CheckpointError as error:
            raise StateError(str(error)) from error

    def like(self, key: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a DTensor that is split as the entry of the tree at a dotted path, or None if that entry is not split.

        A tensor of the optimizer in its parameter's shape is split as the parameter is.
        """
        if shards.mesh is None:
            return None
        section, _, rest = key.partition(".")
        found: Any = None
        if section == "model":
            found = self.model.state_dict().get(rest)
        elif section == "optimizer" and (place := re.search(r"(?:^(\d+)\.)?state\.(\d+)\.", rest)):
            optimizer = parts_of(self.optimizer)[int(place[1] or 0)]
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            found = parameters[int(place[2])]
        return found if shards.is_split(found) and tuple(found.shape) == shape else None

    def misfit(self, tree: trees.Tree) -> str | None:
        """Return a sentence on why a tree does not fit the script's objects, or None if no difference was found."""
        tree = shards.joined(tree)
        misfit = trees.differences(tree, self.model.state_dict())
        if misfit is None and set(tree["state"]) - MEASURES != set(self.extra) - MEASURES:
            misfit = f"It has state entries {sorted(tree['state'])}, the script has {sorted(self.extra)}."
        return misfit

    def load(self, tree: trees.Tree) -> None:
        """Load a tree into the user's objects, in place. The state has no name until `named`, or after a failure.

        Raises StateError if the tree does not fit the script's objects.
        """
        tree = shards.joined(tree)
        misfit = self.misfit(tree)
        if misfit is not None:
            raise StateError(
                f"The state to continue from does not fit this script. {misfit} Run one script in all workers."
            )
        self.begin_change()
        try:
            self.model.load_state_dict(tree["model"])
            load_exactly(self.optimizer, tree["optimizer"])
            for name, part in self.extra.items():
                if name in tree["state"] or name not in MEASURES:
                    load_exactly(part, tree["state"][name])
        except Exception as error:
            raise StateError(f"The state to continue from cannot be loaded: {error}") from error
        self.torn = False

    def begin_receiving(self) -> None:
        """Mark the state as torn, because a copy from another rank will overwrite its tensors. It is whole again after `load`."""
        self.begin_change()
        self.torn = True

    def begin_change(self) -> None:
        """Take the state's name away before a change, until `named`. Nobody copies a state without a name."""
        self.before_change()
        self.pair, self.adopted, self.record = None, 0, None
