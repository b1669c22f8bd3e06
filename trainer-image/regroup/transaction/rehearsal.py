"""A rehearsal: the script's block of a step runs once before its process is ready, for what it compiles and fills.

Owns that nothing of it is kept. A session begins it before a generation is entered, so it communicates with nobody: what takes
minutes in the first forward of a process holds nobody up. For the script it is a step that a membership change ends at its
commit, so nothing of a script that may redo a step runs otherwise than in a redo. Why so: docs/design/adr/0025-rehearsal.md.
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
    """What a rehearsed step is run against, in place of a `Committer`."""

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
        """See Transaction: the first microbatches of the step."""
        return range(min(MICROBATCHES, self.plan.num_virtual))

    def begin(self) -> None:
        """See Transaction."""
        self._is_begun = True
        self._strategy.begin_generation(None)
        self._strategy.begin_step()

    def end(self) -> None:
        """See Transaction."""

    @property
    def applied(self) -> tuple[()]:
        """See regroup.step.Transaction: there is no server."""
        return ()

    def key(self, index: int, v: int) -> Key:
        """See regroup.step.Transaction."""
        return Key(index, v)

    def check(self) -> None:
        """See Transaction: there is no group that could end."""

    def stream(self, v: int) -> int:
        """See Transaction."""
        return v

    def skip(self, v: int) -> None:
        """See Transaction."""

    def backward(self, v: int, loss: torch.Tensor, factor: float, *, last: bool) -> None:  # noqa: ARG002
        """See Transaction. The scaler is left alone: it makes its tensors when it is first used."""
        self._strategy.backward(v, loss, torch.full_like(loss, factor / self.plan.global_batch), last=False)

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """See Transaction: a rehearsal steps no optimizer."""

    def interrupted(self, error: BaseException, *, committed: bool) -> bool:  # noqa: ARG002
        """See Transaction: the block has come to its commit."""
        return isinstance(error, GenerationChanged)

    def commit(
        self,
        share: Share,
        before: Sequence[Callable[[], Any]],  # noqa: ARG002
        after: Sequence[Callable[[], Any]],  # noqa: ARG002
        max_norm: float | None,  # noqa: ARG002
    ) -> CommitRecord:
        """See Transaction. Raises GenerationChanged, always, and UsageError for buffers that cannot be a part of the state."""
        self._strategy.ask()
        raise GenerationChanged(f"the rehearsal of step {share.index} is over")

    def noise_scale(self) -> None:
        """See Transaction."""

    def run(self, work: Any) -> None:
        """See Transaction: there are no rehearsals in a model group."""
        raise AssertionError(f"a rehearsal of a pipeline: {work}")

    def announce(self) -> None:
        """See Transaction."""
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
