"""A rehearsal: the script's block of a step runs once before its process is ready, for what it compiles and fills.

Owns that nothing of it is kept. A session begins it before a generation is entered, so it communicates with nobody. The minutes
that a process's first forward may take hold nobody up. For the script it is a step that a membership change ends at its commit. A
script that may redo a step sees no difference. Why so: docs/design/adr/0025-rehearsal.md.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from regroup.checkpoint import tree as trees
from regroup.data import Key, SamplePlan, microbatch_rng
from regroup.errors import GenerationChanged, UsageError
from regroup.parallel.fingerprint import sums_of
from regroup.parallel.strategy import Share, Strategy
from regroup.state.training import CommitRecord, TrainingState

from .laps import Laps

MICROBATCHES = 2
"""The second one compiles what the first could not know: lengths that differ, for example, become dynamic shapes."""


class Rehearsal:
    """The transaction of a rehearsed step, in place of a `Committer`."""

    def __init__(self, strategy: Strategy, state: TrainingState, plan: SamplePlan) -> None:
        self.plan, self.laps = plan, Laps()
        self._strategy, self._state = strategy, state
        self._is_begun = False

    @contextmanager
    def keep_nothing(self) -> Iterator[None]:
        """Everything is afterwards as before: buffers, gradients and random numbers are put back. Nothing else changes in a
        block that may run twice; raises UsageError where something did."""
        gradients = [(parameter, parameter.grad) for parameter in self._state.model.parameters()]
        before = _fingerprint(self._state)
        try:
            with microbatch_rng():
                yield
        finally:
            if self._is_begun:
                self._strategy.undo()
            for parameter, gradient in gradients:
                parameter.grad = gradient
        after = _fingerprint(self._state)
        for part, value in before.items():
            if after[part] != value:
                raise UsageError(
                    f"The block of a step changes {part} outside step.commit(): it did so in a rehearsal. After a membership "
                    "change the block runs again, and would change it twice. Change it in a hook (before=, after=) of "
                    "step.commit(), or pass rehearse=False to regroup.session()."
                )

    def share(self) -> range:
        """Return the first microbatches of the step."""
        return range(min(MICROBATCHES, self.plan.num_virtual))

    def begin(self) -> None:
        """Begin the step in a world of one."""
        self._is_begun = True
        self._strategy.begin_generation(None)
        self._strategy.begin_step()

    def end(self) -> None:
        """Do nothing: `keep_nothing` ends a rehearsal."""

    @property
    def applied(self) -> tuple[()]:
        """Return nothing: there is no parameter server."""
        return ()

    def key(self, index: int, v: int) -> Key:
        """Return the key of the microbatch that virtual worker `v` computes in a step."""
        return Key(index, v)

    def check(self) -> None:
        """Do nothing: there is no group that could end."""

    def stream(self, v: int) -> int:
        """Return the number of the random stream of a virtual worker."""
        return v

    def skip(self, v: int) -> None:
        """Do nothing: a rehearsal sums nothing."""

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:  # noqa: ARG002
        """Compute the gradients of one microbatch. The scaler is left alone: it makes its tensors when it is first used."""
        self._strategy.backward(loss, torch.full_like(loss, factor / self.plan.global_batch), last=False)

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """Do nothing: a rehearsal steps no optimizer."""

    def interrupted(self, error: BaseException, *, committed: bool) -> bool:  # noqa: ARG002
        """Return True if the block has come to its commit."""
        return isinstance(error, GenerationChanged)

    def commit(
        self,
        share: Share,
        before: Sequence[Callable[[], Any]],  # noqa: ARG002
        after: Sequence[Callable[[], Any]],  # noqa: ARG002
        max_norm: float | None,  # noqa: ARG002
    ) -> CommitRecord:
        """Raise GenerationChanged, or UsageError for buffers that cannot be a part of the state."""
        self._strategy.equal.check()
        raise GenerationChanged(f"the rehearsal of step {share.index} is over")

    def noise_scale(self) -> None:
        """Return None: a rehearsal measures nothing."""

    def run(self, work: Any) -> None:
        """Raise AssertionError: there are no rehearsals in a model group."""
        raise AssertionError(f"a rehearsal of a pipeline: {work}")

    def announce(self) -> None:
        """Raise AssertionError: a rehearsal is never committed."""
        raise AssertionError("a rehearsal was committed")


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether the model, or a part of it, was given to torch.compile: its first forward takes long."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # not imported: then nothing is compiled
    wrapper = getattr(eval_frame, "OptimizedModule", ())
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or isinstance(module, wrapper)
        for module in model.modules()
    )


def _fingerprint(state: TrainingState) -> dict[str, tuple[str, list[int]]]:
    """Return what tells whether a part of the state has changed, by its name in a sentence."""
    tree = state.tree()
    parts = {
        "the model": tree["model"],
        "the optimizer": tree["optimizer"],
        **{f'state["{name}"]': part for name, part in tree["state"].items()},
    }
    out = {}
    for name, part in parts.items():
        text, tensors = trees.pack({"part": part})
        out[name] = text, sums_of(list(tensors.values()))
    return out
