"""`DistributedOptimizer`: an optimizer whose step uses the gradients of all ranks.

A hook on each parameter asks for the reduction of its gradient as soon as backward has it, so the network works during backward.
`step` waits for the reductions. Parameters without a gradient take part with zeros, since another rank may have used them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from regroup.horovod import classes, delta, world
from regroup.horovod import operations as ops
from regroup.horovod.compression import Compression, Compressor
from regroup.horovod.operations import Adasum, Average
from regroup.horovod.process_sets import ProcessSet, global_process_set

Parameter = torch.Tensor


@dataclass
class Reduction:
    """The way in which gradients are reduced. The fields are those of `DistributedOptimizer`."""

    compression: type[Compressor] = Compression.none
    op: int = Average
    predivide: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = field(default_factory=lambda: global_process_set)

    def start(self, parameters: Sequence[Parameter], name: str) -> Callable[[], list[torch.Tensor]]:
        """Ask for the reduction of the gradients, and return a function that waits for the results."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len(gradients) == 1 and gradients[0].is_sparse and not self.sparse_as_dense:
            wait = ops.sparse_allreduce_async(gradients[0], name, self.op, self.process_set)
            return lambda: [wait()]
        dense = [each.to_dense() if each.is_sparse else each for each in gradients]
        compressed = [self.compression.compress(each) for each in dense]
        before, after = (1.0 / self.predivide, self.predivide) if self.op == Average else (1.0, 1.0)
        handle = ops.grouped_allreduce_async_(
            [tensor for tensor, _ in compressed], None, name, self.op, before, after, self.process_set
        )
        contexts = [context for _, context in compressed]
        return lambda: [
            self.compression.decompress(result, context) for result, context in zip(ops.synchronize(handle), contexts)
        ]


class Reducer:
    """Counts the backward passes of each parameter, and starts the reduction of a group once all its gradients are complete."""

    def __init__(
        self, groups: Sequence[tuple[Parameter, ...]], names: dict[int, str], passes: int, reduction: Reduction
    ) -> None:
        self.passes, self._reduction = passes, reduction
        self._groups = list(groups)
        self._names = [names[id(group[0])] for group in self._groups]
        self._group_of = {id(parameter): index for index, group in enumerate(self._groups) for parameter in group}
        self._left = dict.fromkeys(self._group_of, passes)
        self._started: dict[int, Callable[[], list[torch.Tensor]]] = {}
        self._hooks = [
            cast(Any, parameter).register_post_accumulate_grad_hook(self._on_gradient)
            for group in groups
            for parameter in group
        ]

    @property
    def has_started(self) -> bool:
        """Return whether a gradient of the present step is there."""
        return any(left < self.passes for left in self._left.values())

    def reset(self) -> None:
        """Count from the beginning, as after `load_state_dict`."""
        self._left = dict.fromkeys(self._left, self.passes)
        self._started.clear()

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: Parameter) -> None:
        if self._left[id(parameter)] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._left[id(parameter)] -= 1
        index = self._group_of[id(parameter)]
        if all(self._left[id(each)] == 0 for each in self._groups[index]):
            self._start(index)

    def _start(self, index: int) -> None:
        self._started[index] = self._reduction.start(self._groups[index], self._names[index])

    def finish(self) -> None:
        """Wait until each parameter has the gradient of all ranks. Raises HorovodInternalError if a rank has ended."""
        for index in range(len(self._groups)):
            if index not in self._started:
                self._start(index)
        started, self._started = self._started, {}
        try:
            for index, wait in started.items():
                for parameter, gradient in zip(self._groups[index], wait()):
                    _set_gradient(parameter, gradient)
        finally:
            self.reset()


def _set_gradient(parameter: Parameter, gradient: torch.Tensor) -> None:
    assert parameter.grad is not None
    if gradient is parameter.grad:
        return
    if parameter.grad.is_sparse:
        parameter.grad = gradient if gradient.is_sparse else gradient.to_sparse()
    else:
        parameter.grad.data.copy_(gradient)


class _Distributed(torch.optim.Optimizer):
    """The methods of a distributed optimizer. Its class is made of these and the class of the user's optimizer."""

    _reducer: Reducer | None
    """None: this process reduces nothing, because it is alone or not in the process set."""
    _synchronized: bool
    _should_synchronize: bool
    _parameter_names: dict[Parameter, str]
    process_set: ProcessSet
    op: int
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes are accumulated before gradients are reduced."""
        self.backward_passes_per_step = passes
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.reset()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state, and forget gradients that were not applied."""
        self._synchronized, self._should_synchronize = False, True
        if self._reducer is not None:
            self._reducer.reset()
        super(self.__class__, self).load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Wait for the gradients of all ranks, to clip them before the step, for example."""
        if self._reducer is not None:
            self._reducer.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` use the gradients as they are. Used after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the gradients of all ranks, and make a step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
                    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients. Raises AssertionError while they are being reduced."""
        if self._reducer is not None and self._reducer.has_started:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        super(self.__class__, self).zero_grad(*args, **kwargs)


# The signature is Horovod's.
def DistributedOptimizer(  # noqa: PLR0913
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Make the optimizer use the gradients of all ranks, and return it. It keeps its state and its options.

    Args:
        optimizer: An optimizer of torch. A second call for the same optimizer replaces the first one.
        named_parameters: The names must be the same on all ranks. Without them the position is the name.
        compression: `hvd.Compression.fp16` sends gradients in 16 bits.
        backward_passes_per_step: Passes that are accumulated before gradients are reduced.
        op: `hvd.Average`, `hvd.Sum` or `hvd.Adasum`. With the last one the changes of a step are combined, and not the gradients.
        gradient_predivide_factor: Gradients are divided by this before the sum, and the rest of the average after it.
        num_groups: Older name of `groups`.
        groups: Number of groups of gradients that travel together, or a list of such groups.
        sparse_as_dense: Reduce sparse gradients as dense ones.
        process_set: The ranks whose gradients are reduced. Others train alone.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    names = _names(optimizer, named_parameters)
    _check_groups(groups)
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(getattr(optimizer, "_reducer", None), Reducer):
        optimizer._reducer.detach()  # type: ignore[attr-defined]
    classes.change_back(optimizer)
    if op == Adasum:
        return delta.wrap(optimizer, names, compression, backward_passes_per_step)
    classes.change(optimizer, _Distributed)
    distributed: Any = optimizer
    distributed.process_set, distributed.op = process_set, op
    distributed.backward_passes_per_step = backward_passes_per_step
    distributed._synchronized, distributed._should_synchronize = False, True
    distributed._reducer = None
    by_id = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    distributed._parameter_names = {by_id[key]: name for key, name in names.items() if key in by_id}
    if process_set.included() and (world.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"):
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        reduction = Reduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
        grouped = _grouped(trained, names, groups)
        distributed._reducer = Reducer(grouped, names, backward_passes_per_step, reduction)
    return optimizer


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None) -> dict[int, str]:
    """Return the name of each parameter by its id. Raises ValueError for names that cannot be used."""
    parameters = [
        (f"allreduce.noname.{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]
    pairs = parameters if named is None else list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    unnamed = {id(parameter) for _, parameter in parameters} - {id(parameter) for _, parameter in pairs}
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            + ", ".join(map(str, sorted(unnamed)))
        )
    return {id(parameter): name for name, parameter in pairs}


def _check_groups(groups: int | list[list[Parameter]] | None) -> None:
    if groups is None:
        return
    if not isinstance(groups, list) and not groups > 0:
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if isinstance(groups, list):
        every = [each for group in groups for each in group]
        if any(not isinstance(each, torch.Tensor) for each in every):
            raise ValueError("groups must consist of torch.Tensor.")
        if len({id(each) for each in every}) < len(every):
            raise ValueError("A parameter can only appear once in groups.")


def _grouped(
    trained: list[Parameter], names: dict[int, str], groups: int | list[list[Parameter]] | None
) -> list[tuple[Parameter, ...]]:
    """Return the parameters that are reduced together. Without `groups` each is alone, so that it travels at once."""
    if groups is None:
        return [(each,) for each in trained]
    if isinstance(groups, list):
        ids = {id(each) for each in trained}
        found = [tuple(each for each in group if id(each) in ids) for group in groups]
        inside = {id(each) for group in found for each in group}
        return [group for group in found if group] + [(each,) for each in trained if id(each) not in inside]
    # Ranks may list their parameters in different orders, and all must make the same groups. They may also come here at different
    # times: in an elastic job only those that join do. So the names alone decide.
    trained = sorted(trained, key=lambda each: _natural(names[id(each)]))
    each, more = divmod(len(trained), groups)
    bounds = [index * each + min(index, more) for index in range(groups + 1)]
    return [tuple(trained[begin:end]) for begin, end in itertools.pairwise(bounds) if end > begin]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 2 before layer 10, so that neighbours, whose gradients come together, share a group."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
