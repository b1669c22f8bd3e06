"""The script's own calls in a commit (`before`, `after`): what they may be bound to, and that they are local.

A hook that changes an object which is no part of the state works until the first worker joins: then ranks differ. A collective
in it, or in the optimizer, could leave some ranks with the step and some without. Both are refused.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from regroup.errors import UsageError
from regroup.generation.groups import Groups
from regroup.state.optimizers import parts_of
from regroup.state.training import TrainingState

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of torch's operators that communicate."""
_MAX_SEEN = 10_000
"""Objects that are looked at inside `state`, for one that is a part of another."""


class Arguments(NamedTuple):
    """The arguments of `step.commit()`."""

    before: Sequence[Callable[[], Any]] = ()
    """Hooks that run before the optimizer's step."""
    after: Sequence[Callable[[], Any]] = ()
    """Hooks that run after it."""
    max_norm: float | None = None
    """The gradient's norm is clipped to it; None: it is not clipped."""


class Hooks:
    """Checks the hooks of one job. What was found good once is not looked at again."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._good: dict[int, Any] = {}

    def check(self, hooks: Iterable[Callable[[], Any]]) -> None:
        """Raise UsageError for a hook that changes an object which has a state and is in no `state`."""
        for hook in hooks:
            for owner in owners_of(hook):
                if id(owner) not in self._good and _has_state(owner):
                    self._check(owner)
                    self._good[id(owner)] = owner  # kept, so that its id is no other object's later

    def _check(self, owner: Any) -> None:
        state = self._state
        if any(owner is one for one in parts_of(state.optimizer)) or _reaches(state.extra, owner):
            return
        if isinstance(owner, torch.nn.Module) and _tensors(owner) <= _tensors(state.model):
            return  # a part of the model, something around it, or without tensors
        name = type(owner).__name__
        raise UsageError(
            f"A hook of step.commit() uses a {name} that is not in `state`: a worker that joins would start with a different one. "
            f'Add it in regroup.session(), for example state={{"{name.lower()}": ...}}.'
        )


def _has_state(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def _tensors(module: torch.nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def owners_of(hook: Any) -> list[Any]:
    """Return the objects that a hook is bound to; of a plain function the schedulers and averaged models that it names."""
    if isinstance(hook, functools.partial):
        return [owner for part in (hook.func, *hook.args, *hook.keywords.values()) for owner in owners_of(part)]
    if inspect.ismethod(hook):
        return [hook.__self__]
    if inspect.isfunction(hook):
        try:
            used = inspect.getclosurevars(hook)
        except ValueError:  # a name that has no value yet
            return []
        named = [*used.nonlocals.values(), *used.globals.values()]
        # Not any object with a state: a hook may only read it.
        return [one for one in named if isinstance(one, (LRScheduler, AveragedModel))]
    return [hook]


def _reaches(root: Any, wanted: Any) -> bool:
    """Return whether `wanted` is `root`, or is held by it, directly or further down."""
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_SEEN:
        one = waiting.pop()
        if one is wanted:
            return True
        if id(one) in seen or isinstance(one, (torch.Tensor, str, bytes, int, float, type)):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        else:
            waiting += getattr(one, "__dict__", {}).values()
    return False


class refuse_collectives:
    """`with refuse_collectives(groups, watch=...):` raises UsageError for a collective in its block: one of ours always, any of
    torch's if `watch`, which costs time."""

    def __init__(self, groups: Groups | None, *, watch: bool) -> None:
        self._groups = groups
        self._watching: Any = _Refuse() if watch else None  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        if self._groups is not None:
            self._groups.is_applying = True
        if self._watching is not None:
            self._watching.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._groups is not None:
            self._groups.is_applying = False
        if self._watching is not None:
            self._watching.__exit__(*error)


class _Refuse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile under this mode as without it. Else torch would never compile a function
        that runs first in the first commit, such as optimizer.step or a hook."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise UsageError(
                f"The optimizer or a hook of step.commit() calls a collective ({func.__name__}). If a rank died in it, "
                "some ranks would have the step and some would not. Call it between steps, in job.collective()."
            )
        return func(*args, **(kwargs or {}))
