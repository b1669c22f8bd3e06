"""The state of an elastic Horovod script: live objects, and a copy of them that the last commit has made.

The copy is what other ranks get (`tree`), so it holds tensors, numbers, strings, lists and dicts only. `member` names and sends it.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from regroup.checkpoint import tree as trees
from regroup.checkpoint.errors import CheckpointError
from regroup.errors import StateError
from regroup.horovod import world
from regroup.state.optimizers import load_exactly

from . import link
from .sampler import ElasticSampler

Tree = trees.Tree


class State:
    """Base of all states. A subclass of a script's own implements `save`, `restore` and `sync`."""

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        """`bcast_object(value)` returns rank 0's value on all ranks. None: Horovod's `broadcast_object`."""
        self._bcast_object = link.broadcast_object if bcast_object is None else bcast_object
        self._rank = world.rank if get_rank is None else get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these functions called after each reset, before the state is synchronised. A process that joins calls none."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Follow a change of the ranks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Copy the state to host memory, and raise HostsUpdatedInterrupt if the ranks are about to change. All ranks call it.

        After a failure training goes on from the last commit. Raises HorovodInternalError if a rank is lost meanwhile.
        """
        self.save()
        link.committed(self)

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt if the ranks are about to change. All ranks call it, equally often.

        The state is committed before that, so nothing is redone. Raises HorovodInternalError if a rank is lost meanwhile.
        """
        link.check(self)

    def save(self) -> None:
        """Copy the state to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Follow a change of the ranks, before the callbacks."""

    def tree(self) -> Tree:
        """Return the last copy, for other ranks. A state of a script's own has none: its `sync` does everything."""
        return {}

    def load(self, tree: Tree) -> None:
        """Take another rank's copy as the last one, and go back to it."""


class ObjectState(State):
    """State whose attributes are plain values: each keyword argument becomes an attribute."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise StateError for a value that cannot be sent to another rank."""
        super().__init__(bcast_object, get_rank)
        self._saved: dict[str, Any] = {}
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)

    if TYPE_CHECKING:  # the attributes are the script's

        def __getattr__(self, name: str) -> Any: ...

    def save(self) -> None:
        """Copy the attributes. Raises StateError for one that cannot be sent to another rank."""
        saved = {name: getattr(self, name) for name in self._names}
        for name, value in saved.items():
            _check(name, value)
        self._saved = copy.deepcopy(saved)

    def restore(self) -> None:
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Take the attributes that rank 0 has copied last."""
        if self._saved:
            self._saved = self._bcast_object(self._saved)
            ObjectState.restore(self)

    def tree(self) -> Tree:
        return {"objects": self._saved}

    def load(self, tree: Tree) -> None:
        """Raise StateError if the copy has other attributes than this script's state."""
        _same_names(tree.get("objects", {}), self._names)
        self._saved = tree["objects"]
        self.restore()


class TorchState(ObjectState):
    """State of a PyTorch script: modules, optimizers, samplers, other objects with a state_dict, and plain attributes."""

    _handlers: "dict[str, _Handler]"

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Raise StateError for a value that cannot be sent to another rank."""
        named = kwargs | {"model": model, "optimizer": optimizer}
        handlers = {name: _Handler(name, value) for name, value in named.items() if _has_state(value)}
        self.__dict__["_handlers"] = handlers
        for name, handler in handlers.items():
            self.__dict__[name] = handler.value
        super().__init__(**{name: value for name, value in named.items() if name not in handlers})

    def save(self) -> None:
        copies = {name: handler.copied() for name, handler in self._handlers.items()}
        super().save()
        for name, saved in copies.items():
            self._handlers[name].saved = saved

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def sync(self) -> None:
        """Take rank 0's modules, optimizers and samplers as they are now, and the attributes that it has copied last."""
        for handler in self._handlers.values():
            handler.sync(self._bcast_object)
        super().sync()

    def tree(self) -> Tree:
        return {**super().tree(), "parts": {name: handler.saved for name, handler in self._handlers.items()}}

    def load(self, tree: Tree) -> None:
        """Raise StateError if the copy has other parts than this script's state."""
        parts: Mapping[str, Any] = tree.get("parts", {})
        _same_names(parts, self._handlers)
        for name, handler in self._handlers.items():
            handler.saved = parts[name]
        super().load(tree)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name] = _Handler(name, value)
        super().__setattr__(name, value)


class _Handler:
    """A part of the state that has a state_dict, with the last copy of it."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value
        self.saved = self.copied()

    def copied(self) -> dict[str, Any]:
        """Return a copy of the part in host memory. Raises StateError for an entry that cannot be sent to another rank."""
        state = dict(self.value.state_dict())
        _check(self.name, state)
        copied: dict[str, Any] = trees.mapped(state, lambda _, leaf: _in_host_memory(leaf))
        return copied

    def restore(self) -> None:
        _load(self.value, self.saved)

    def sync(self, broadcast: Callable[..., Any]) -> None:
        """Take rank 0's part. Tensors of a module go one by one, everything else together."""
        if isinstance(self.value, torch.nn.Module):
            link.broadcast_parameters(self.value.state_dict())
        else:
            _load(self.value, broadcast(self.copied()))
        self.saved = self.copied()


def _load(value: Any, saved: dict[str, Any]) -> None:
    if isinstance(value, torch.optim.Optimizer):
        load_exactly(value, copy.deepcopy(saved))
    else:
        value.load_state_dict(copy.deepcopy(saved))


def _in_host_memory(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _check(name: str, value: Any) -> None:
    """Raise StateError for a value that cannot be sent to another rank without pickle."""
    try:
        trees.pack({name: value})
    except CheckpointError as error:
        raise StateError(f"The state of hvd.elastic cannot be sent to other ranks: {error}") from error


def _same_names(found: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise StateError if another rank's state has other parts than this one's."""
    if set(found) != set(wanted):
        raise StateError(
            f"The state of another rank has the parts {sorted(found)}, and this script's has {sorted(wanted)}. Run one script in "
            "all workers."
        )
