"""Changes the class of a user's optimizer in place, and back. The object stays the same, and so do its state and its schedulers."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

import torch

_OWN = "_regroup_class_of_the_user"
"""Attribute of a changed class: the class before the change."""


def change(optimizer: torch.optim.Optimizer, methods: type) -> None:
    """Give the optimizer the methods of a class, before those of its own class.

    The methods reach those of the own class by `super(self.__class__, self)`.
    """
    base = type(optimizer)
    own = {name: value for name, value in vars(methods).items() if name not in ("__dict__", "__weakref__", "__doc__")}
    own[
        "step"
    ].hooked = True  # torch runs the user's hooks in each step without this mark, and the own class's runs them
    optimizer.__class__ = type(base.__name__, (base,), {**own, _OWN: base})
    _bind_step(optimizer)


def change_back(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its own class back. Does nothing if it has that already."""
    if class_of_the_user(optimizer) is not type(optimizer):
        optimizer.__class__ = class_of_the_user(optimizer)
        _bind_step(optimizer)


def class_of_the_user(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class that the optimizer had when the user made it."""
    return cast("type[torch.optim.Optimizer]", getattr(type(optimizer), _OWN, type(optimizer)))


def _bind_step(optimizer: torch.optim.Optimizer) -> None:
    """Make calls of `optimizer.step` reach the present class.

    A scheduler sets an attribute `step` on the object, which calls the method of the class at that time. It also looks for its mark
    on that attribute, and warns without it, so the object gets an equal attribute for the present class.
    """
    bound = vars(optimizer).pop("step", None)
    if not hasattr(bound, "_wrapped_by_lr_sched"):
        return
    reference, method = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        here: Any = reference()
        here._opt_called = True
        return method(here, *args, **kwargs)

    marked: Any = step
    marked._wrapped_by_lr_sched = True
    vars(optimizer)["step"] = marked
