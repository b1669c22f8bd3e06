"""A model whose layers lie one behind the other on several processes (`regroup.pipeline`), and how a step runs through it.

`Pipeline` is the module that a script trains: of a model's modules it has those of this process's stages, under their own names.
`run` computes one step: it takes the order of `schedules` and sends over the `edges` of the generation. Nothing of a step outlives
it, so an interrupted one leaves nothing behind but gradients, which the redo zeroes. Why torch's own schedule objects are not used:
docs/design/adr/0038-pipelines.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from regroup.errors import UsageError
from regroup.generation.edges import Coming, Edges
from regroup.layout import PIPELINE, Layout

from . import fsdp
from .schedules import BACKWARD, FORWARD, INPUT, INTERLEAVED, SCHEDULES, WEIGHT, ZERO_BUBBLE, balanced, order

MANY = (INTERLEAVED, ZERO_BUBBLE)
"""Schedules for which a process may have several stages."""


class Pipeline(torch.nn.Module):
    """The modules of this process's stages. Where one process has all of them it is called as torch.nn.Sequential is."""

    def __init__(
        self, schedule: str, rank: int, num_ranks: int, stages: Sequence[Mapping[str, torch.nn.Module]]
    ) -> None:
        """`stages`: all of the model's, modules by name; those of other ranks are not kept."""
        super().__init__()
        self._schedule, self._rank, self._num_ranks = schedule, rank, num_ranks
        self._num_stages = len(stages)
        self._names = {stage: list(modules) for stage, modules in enumerate(stages) if stage % num_ranks == rank}
        """Names of the modules of this rank's stages."""
        self.parameter_order = tuple(
            f"{name}.{inner}"
            for modules in stages
            for name, module in modules.items()
            for inner, _ in module.named_parameters()
        )
        """Names of all parameters of the whole model, in its order."""
        for stage in self._names:
            for name, module in stages[stage].items():
                self.add_module(name, module)

    @property
    def is_split(self) -> bool:
        """Other processes have some of the stages."""
        return self._num_ranks > 1

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return self._num_stages

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of this process's stages."""
        return tuple(self._names)

    def parameters_of(self, stage: int) -> list[torch.nn.Parameter]:
        """Return the parameters of one of this process's stages."""
        return [one for name in self._names[stage] for one in self._modules[name].parameters()]  # type: ignore[union-attr]

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output. Raises UsageError where other processes have some of the layers."""
        if self.is_split:
            raise UsageError(
                f"This process has {len(self._names)} of the model's {self._num_stages} stages, so the model cannot be called. "
                "Call step.run(loss), which runs the batches of a step through all stages, or team.forward(x) in a block of "
                "job.collective()."
            )
        return self.through(0, inputs)

    def through(self, stage: int, inputs: tuple[Any, ...]) -> Any:
        """Return what a stage makes of its inputs."""
        value: Any = inputs
        for name in self._names[stage]:
            module: Any = self._modules[name]
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value

    def actions(self, num_microbatches: int) -> Any:
        """Return what this process does in a step, in order."""
        return order(self._schedule, self._rank, self._num_ranks, len(self._names), num_microbatches)

    @property
    def schedule(self) -> str:
        """Its name."""
        return self._schedule


def make(
    modules: Any, schedule: str, boundaries: Sequence[int] | None, stages: int | None, rank: int, num_ranks: int
) -> Pipeline:
    """Return this rank's part of a model. See `regroup.pipeline`. Raises UsageError."""
    named = _named(modules)
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule of regroup.pipeline() is {schedule!r}; choose from {', '.join(SCHEDULES)}.")
    chunks = (2 if schedule == INTERLEAVED else 1) if stages is None else stages
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise UsageError(f"stages of regroup.pipeline() is {stages!r}; it must be a whole number of at least 1.")
    if chunks > 1 and schedule not in MANY:
        raise UsageError(
            f'stages of regroup.pipeline() is {chunks}, and schedule "{schedule}" has one stage on each process. '
            'Use "interleaved" or "zero_bubble", or stages=1.'
        )
    if num_ranks == 1:
        return Pipeline(schedule, 0, 1, [named])
    names = list(named)
    begins = _begins(named, num_ranks * chunks, boundaries, num_ranks)
    cut = [names[low:high] for low, high in zip(begins, [*begins[1:], len(names)])]
    _check_shared(named, cut)
    for number, stage in enumerate(cut):
        if not any(one.requires_grad for name in stage for one in named[name].parameters()):
            raise UsageError(
                f"Stage {number} of the pipeline (modules {stage[0]} to {stage[-1]}) has no parameter that is trained, "
                "so nothing would be trained in it. Choose other boundaries in regroup.pipeline()."
            )
    return Pipeline(schedule, rank, num_ranks, [{name: named[name] for name in stage} for stage in cut])


def _named(modules: Any) -> dict[str, torch.nn.Module]:
    """Return the modules by name. Raises UsageError for what is no row of modules."""
    if isinstance(modules, (torch.nn.Sequential, torch.nn.ModuleList)):
        own = type(modules).forward is not torch.nn.Sequential.forward and isinstance(modules, torch.nn.Sequential)
        if own or any(one is modules for one in fsdp.modules_of(modules)):
            what = f"is a {type(modules).__name__} with a forward of its own" if own else "was given to fully_shard()"
            raise UsageError(
                f"modules of regroup.pipeline() {what}, and is never called as a whole. "
                "Pass a torch.nn.Sequential, or a list, and apply fully_shard() to the modules inside."
            )
        return dict(modules.named_children())
    if isinstance(modules, (list, tuple)) and modules and all(isinstance(one, torch.nn.Module) for one in modules):
        return {str(i): one for i, one in enumerate(modules)}
    raise UsageError(
        f"modules of regroup.pipeline() is a {type(modules).__name__}; it must be a torch.nn.Sequential or a list of modules, "
        "each of which is called with what the one before returns."
    )


def _begins(
    named: Mapping[str, torch.nn.Module], num_stages: int, boundaries: Sequence[int] | None, num_ranks: int
) -> list[int]:
    """Return at which module each stage begins: as the script says, else so that the largest is as small as possible."""
    if boundaries is not None:
        begins = [0, *boundaries]
        if len(begins) != num_stages or any(low >= high for low, high in zip(begins, [*begins[1:], len(named)])):
            raise UsageError(
                f"boundaries of regroup.pipeline() is {list(boundaries)!r}; it must be {num_stages - 1} ascending numbers "
                f"between 1 and {len(named) - 1}: the module at which each stage but the first begins."
            )
        return begins
    sizes = [sum(one.numel() for one in module.parameters() if one.requires_grad) for module in named.values()]
    heavy = [i for i, size in enumerate(sizes) if size]
    if len(heavy) < num_stages:
        raise UsageError(
            f"regroup.pipeline() was called with {len(heavy)} modules that have parameters, and pipeline={num_ranks} with "
            f"{num_stages // num_ranks} stages on each process needs at least {num_stages}. "
            "Use a smaller pipeline, or pass smaller modules."
        )
    return [0 if place == 0 else heavy[place] for place in balanced([sizes[i] for i in heavy], num_stages)]


def _check_shared(named: Mapping[str, torch.nn.Module], cut: Sequence[Sequence[str]]) -> None:
    """Raise UsageError for a parameter of two stages: each would train a copy of its own."""
    first: dict[int, tuple[int, str]] = {}
    for stage, names in enumerate(cut):
        for name in names:
            for inner, one in named[name].named_parameters():
                there, called = first.setdefault(id(one), (stage, f"{name}.{inner}"))
                if there != stage:
                    raise UsageError(
                        f"{called} and {name}.{inner} are one parameter, and lie in stages {there} and {stage} of the "
                        "pipeline: each process would train a copy of its own. "
                        "Put both modules into one stage (boundaries of regroup.pipeline()), or use two parameters."
                    )


def check_model(model: torch.nn.Module, layout: Layout) -> None:
    """Raise UsageError where a session's model does not fit the pipeline of its mesh."""
    sizes = dict(layout.dims)
    num_ranks = sizes.get(PIPELINE, 1)
    if num_ranks == 1:
        return
    if not isinstance(model, Pipeline) or not model.is_split:
        raise UsageError(
            f"model is a {type(model).__name__}, and regroup.mesh() has pipeline={num_ranks}: "
            "each process must have its stages only. "
            "Call regroup.pipeline(modules) after it, and pass what that returns."
        )
    if any(one is model for one in fsdp.modules_of(model)):
        raise UsageError(
            "fully_shard() was applied to what regroup.pipeline() returned, which is never called as a whole. "
            "Apply it to the modules inside."
        )
    others = [name for name, size in layout.dims if size > 1 and name != PIPELINE]
    if model.schedule == ZERO_BUBBLE and others:
        raise UsageError(
            f'schedule "zero_bubble" does not work with {others[0]}={sizes[others[0]]} of regroup.mesh() so far: '
            'it cuts the backward pass of a layer in two. Use "1f1b".'
        )


# --- one step --------------------------------------------------------------------------------------------------------


class Work(Protocol):
    """The microbatches of one step. They are numbered from 0 in this rank's share."""

    def __len__(self) -> int:
        """Return the number of microbatches."""
        ...

    def inputs(self, microbatch: int) -> tuple[Any, ...]:
        """Return the arguments of the model's first module. Called once for each, in order, where the first stage is."""
        ...

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        """Return the loss, summed over samples. Called once for each, in order, where the last stage is."""
        ...

    def seed(self, microbatch: int, stage: int) -> None:
        """Begin the forward pass of a microbatch through a stage, with random numbers of its own."""
        ...

    def check(self) -> None:
        """Raise GenerationChanged once the step must end."""
        ...

    def did(self, kind: str) -> None:
        """Note that an action of this kind is over."""
        ...


class Backward(Protocol):
    """Runs a piece of a stage's backward pass (`DataParallel.run_backward`)."""

    def __call__(
        self, run: Callable[[], Any], parameters: Sequence[torch.nn.Parameter] = (), *, last: bool = False
    ) -> None: ...


@dataclass
class _Passed:
    """The tensors that a forward pass leaves for the backward pass of the same microbatch."""

    inputs: list[torch.Tensor]
    """Received: leaves, in the order in which the stage before sent them."""
    outputs: list[torch.Tensor]
    """Outputs that need a gradient. The last stage has its loss here."""
    coming: Coming | None
    """Gradients of the outputs, from the next stage; None: the last stage has none."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Work that is left for the parameters' gradients (torch's `stage_backward_input`)."""
    is_whole: bool = False
    """The backward pass was not cut: it is whole, and done together with that of the parameters."""


class _Run:
    def __init__(self, pipeline: Pipeline, work: Work, edges: Edges, backward: Backward, scale: float) -> None:
        self._pipeline, self._work, self._edges, self._backward, self._scale = pipeline, work, edges, backward, scale
        self._passed: dict[tuple[int, int], _Passed] = {}

    def run(self) -> None:
        work, count = self._work, len(self._work)
        for stage in self._pipeline.stages:
            if stage > 0 and count:
                self._edges.expect(stage - 1)
        actions = self._pipeline.actions(count)
        do = {FORWARD: self._forward, BACKWARD: self._whole, INPUT: self._of_input, WEIGHT: self._of_parameters}
        for number, (kind, stage, microbatch) in enumerate(actions):
            work.check()
            do[kind](stage, microbatch, number == len(actions) - 1)
            work.did(kind)
        self._edges.finish()

    def _forward(self, stage: int, microbatch: int, _last: bool) -> None:
        pipeline, work = self._pipeline, self._work
        received: list[torch.Tensor] = []
        if stage == 0:
            arguments = work.inputs(microbatch)
        else:
            received = self._edges.receive(stage - 1)
            if microbatch + 1 < len(work):
                self._edges.expect(stage - 1)
            arguments = tuple(received)
        work.seed(microbatch, stage)
        output = pipeline.through(stage, arguments)
        if stage == pipeline.num_stages - 1:
            outputs, coming = [work.loss(microbatch, output)], None
        else:
            sent = _tensors(stage, output)
            self._edges.send(stage, sent)
            outputs = [one for one in sent if one.requires_grad]
            coming = self._edges.expect_gradients(stage, outputs)
        if pipeline.schedule == ZERO_BUBBLE:  # torch detaches them in place, which a view does not allow
            outputs = [one.clone() if one._is_view() else one for one in outputs]
        self._passed[stage, microbatch] = _Passed(received, outputs, coming)

    def _whole(self, stage: int, microbatch: int, last: bool) -> None:
        passed = self._passed.pop((stage, microbatch))
        self._all_of(passed, last=last)
        self._send_back(stage, passed)

    def _of_input(self, stage: int, microbatch: int, _last: bool) -> None:
        """Run the backward pass of the stage's inputs, which another process waits for; that of the parameters comes later."""
        passed = self._passed[stage, microbatch]
        if not any(one.requires_grad for one in passed.inputs):
            passed.is_whole = True
            return
        from torch.distributed.pipelining._backward import stage_backward_input

        gradients = self._gradients(passed)

        def run() -> None:
            _, passed.groups = stage_backward_input(
                passed.outputs, gradients, passed.inputs, iter(self._pipeline.parameters_of(stage))
            )

        if passed.outputs:
            self._backward(run)
        self._send_back(stage, passed)

    def _of_parameters(self, stage: int, microbatch: int, last: bool) -> None:
        passed = self._passed.pop((stage, microbatch))
        if passed.is_whole:
            self._all_of(passed, last=last)
            return
        from torch.distributed.pipelining._backward import stage_backward_weight

        parameters = self._pipeline.parameters_of(stage)
        before = [None if one.grad is None else one.grad._version for one in parameters]
        self._backward(lambda: stage_backward_weight(iter(parameters), passed.groups))
        # torch adds to the gradients itself, so autograd's hooks do not tell.
        changed = [
            one for one, version in zip(parameters, before) if one.grad is not None and one.grad._version != version
        ]
        self._backward(lambda: None, changed)

    def _all_of(self, passed: _Passed, *, last: bool) -> None:
        gradients = self._gradients(passed)
        if passed.outputs:
            self._backward(lambda: torch.autograd.backward(passed.outputs, gradients), last=last)

    def _gradients(self, passed: _Passed) -> list[torch.Tensor]:
        """Return the gradients of a microbatch's outputs. Blocks until they have come."""
        if passed.coming is None:
            return [torch.full_like(passed.outputs[0], self._scale)]
        return passed.coming.wait()

    def _send_back(self, stage: int, passed: _Passed) -> None:
        if stage > 0:
            needed = [one for one in passed.inputs if one.requires_grad]
            self._edges.send_gradients(
                stage - 1, [torch.zeros_like(one) if one.grad is None else one.grad for one in needed]
            )


def run(pipeline: Pipeline, work: Work, edges: Edges, backward: Backward, scale: float) -> None:
    """Run the microbatches of a step forward and backward; all ranks of a model group do so together.

    Gradients are those of the losses times `scale`.
    Raises what `Groups.wait` does, and UsageError for what a stage must not return.
    """
    _Run(pipeline, work, edges, backward, scale).run()


def forward(pipeline: Pipeline, inputs: tuple[Any, ...], edges: Edges) -> Any:
    """Return the model's output for one batch where the last stage is, None elsewhere; all ranks of a model group call it together.

    inputs: the same on all of them. Nothing goes back: call it without gradients. Raises what `Groups.wait` does, and UsageError
    for what a stage must not return."""
    output: Any = None
    for stage in pipeline.stages:
        if stage > 0:
            edges.expect(stage - 1)
            inputs = tuple(edges.receive(stage - 1))
        output = pipeline.through(stage, inputs)
        if stage < pipeline.num_stages - 1:
            edges.send(stage, _tensors(stage, output))
            output = None
    edges.finish()
    return output


def _tensors(stage: int, output: Any) -> list[torch.Tensor]:
    """Return a stage's output as a list of tensors. Raises UsageError."""
    values: Iterator[Any] | Sequence[Any] = output if isinstance(output, (tuple, list)) else [output]
    found = list(values)
    for one in found:
        if type(one) is not torch.Tensor:
            raise UsageError(
                f"Stage {stage} of the pipeline returns a {type(one).__name__}; "
                "only a tensor or a tuple of tensors can be sent to the next stage."
            )
    return found
