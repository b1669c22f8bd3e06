"""Model, optimizer and `state` of this process: one tree with a name, the state pair, and whether it is whole.

Owns the objects' identity: they are the user's, loaded in place and never replaced. Does not move bytes between ranks
(`transfer`) or to disk (`regroup.checkpoint`, whose `pack` is the one encoding of a tree). Rules STATE and TORN.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from regroup.checkpoint import shards, stages
from regroup.checkpoint import tree as trees
from regroup.checkpoint.errors import CheckpointError
from regroup.checkpoint.staging import Staging
from regroup.errors import StateError, UsageError
from regroup.protocol.state import StatePair

from .optimizers import as_optimizer, load_exactly, parts_of

MEASURES = frozenset({"regroup.noise_scale"})
"""Parts of the state that training does not depend on: a state with one fits a script without it, and the other way round."""


class CommitRecord(NamedTuple):
    """What a commit came to. It stays with the state that it made, and goes with it to whoever gets a copy."""

    state: StatePair
    loss: float
    """Mean over the whole batch, by weight."""
    weight: float
    norm: torch.Tensor | float | None = None
    """Norm of the gradient before it was clipped; None: it was not clipped. A scalar, on the model's device."""
    learning_rates: tuple[Any, ...] = ()
    """By param group, as they were applied: numbers, or scalars on the model's device."""
    skipped: bool = False
    """The gradient was no number (an overflow in fp16), so the optimizer was not stepped."""

    def to_json(self) -> list[Any]:
        """Return the form in which it is sent. Waits for the device."""
        rates = [float(rate) for rate in self.learning_rates]
        return [
            self.state,
            self.loss,
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
    """The state that this process trains. `pair` names it while it is valid; None: it is no state anybody may copy."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, extra: Mapping[str, Any], scaler: Any = None) -> None:
        """Raises StateError, by name, for what cannot be saved, and UsageError for an optimizer that cannot be used."""
        self.model = model
        self.optimizer = as_optimizer(optimizer, model)
        self.scaler = scaler
        """A GradScaler, for gradients in fp16; it is a part of the state, as `scaler`."""
        self.extra = dict(extra)
        if scaler is not None:
            if not callable(getattr(scaler, "unscale_", None)):
                raise UsageError(f"scaler is a {type(scaler).__name__}. Pass a torch.amp.GradScaler.")
            if self.extra.setdefault("scaler", scaler) is not scaler:
                raise UsageError('state["scaler"] is another object than scaler. Pass it as scaler only.')
        self.adopted = 0
        """Generation in which the state was adopted; 0 without one."""
        self.record: CommitRecord | None = None
        """Of the commit that made this state, where that is known: not of one that was read from a checkpoint."""
        self.torn = False
        """A copy of a state into its tensors was cut off: they are not what the script made either."""
        self._pair: StatePair | None = None
        self.staging = Staging(model.buffers)
        """Its copies to host memory."""
        self.before_change: Callable[[], None] = self.staging.settle
        """Called before any part of the state is changed."""
        for name, part in self.extra.items():
            if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
                raise StateError(
                    f'state["{name}"] is a {type(part).__name__} without state_dict and load_state_dict. '
                    "Pass an object that has both, or leave it out."
                )
        self.packed()

    def add(self, name: str, part: Any) -> None:
        """Take a part of the session's own into the state. Raises UsageError where the script uses its name."""
        if self.extra.setdefault(name, part) is not part:
            raise UsageError(f'state["{name}"] has a name that the session uses. Choose another.')

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

    def saved_tree(self) -> trees.Tree:
        """Return the tree as a checkpoint has it: with the names of the optimizer's parameters."""
        tree = {**self.tree(), stages.NAMES: self._names()}
        order = getattr(self.model, "parameter_order", None)  # of a pipeline
        return tree if order is None else {**tree, stages.ORDER: list(order)}

    def chosen(self, tree: trees.Tree) -> trees.Tree:
        """Return what this process needs of a checkpoint's tree: of a pipeline its layers, and the optimizer's parameters under its
        own numbers. Raises CheckpointError."""
        names, own = tree.pop(stages.NAMES, None), self._names()
        if names is not None and {name for one in own for group in one for name in group} <= set(tree["model"]):
            tree["optimizer"] = stages.chosen(
                tree["optimizer"], names, own
            )  # else the model does not fit, which is said
        if not shards.is_pipelined():
            return tree
        if names is None:
            raise CheckpointError(
                "It does not say which parameters its optimizer has, so it cannot be cut into the stages of a pipeline: an older "
                "release wrote it. Continue it once without a pipeline, and let it save."
            )
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
        """Return a hash of how the parameters lie in memory, by name; of what is split, this process's part. A dimension of one
        element lies nowhere."""
        parts = [(name, shards.local_of(one.detach())) for name, one in self.model.named_parameters()]
        lies = [(name, [stride for size, stride in zip(one.shape, one.stride()) if size > 1]) for name, one in parts]
        return zlib.crc32(repr(lies).encode())

    def packed(self) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the tree as JSON text and tensors by name. Raises StateError that names what cannot be saved."""
        try:
            return trees.pack(shards.apart(self.tree()))
        except CheckpointError as error:
            raise StateError(str(error)) from error

    def like(self, key: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the DTensor that says how this process splits an entry of the tree, by its dotted path; None: it does not.

        What an optimizer keeps of a parameter, in the parameter's shape, is split as the parameter is.
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
        """Return a sentence on how a tree does not fit the script's objects; None: it fits, as far as that can be seen."""
        tree = shards.joined(tree)
        misfit = trees.differences(tree, self.model.state_dict())
        if misfit is None and set(tree["state"]) - MEASURES != set(self.extra) - MEASURES:
            misfit = f"It has state entries {sorted(tree['state'])}, the script has {sorted(self.extra)}."
        return misfit

    def load(self, tree: trees.Tree) -> None:
        """Put a tree into the user's objects, in place. The state has no name until `named`; a failure leaves it without.

        Raises StateError when the tree does not fit the script's objects.
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
        """Its tensors are being overwritten by a copy from another rank from here on: torn, until `load`."""
        self.begin_change()
        self.torn = True

    def begin_change(self) -> None:
        """The state is in between: without a name from here on, until `named`. Nobody copies it."""
        self.before_change()
        self._pair, self.adopted, self.record = None, 0, None
