"""The passes of one process: forward and backward over its microbatches, and forward over its share of the held-out data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import regroup
from regroup.parallel.pipeline import Pipeline
from regroup.step import Step

from . import shares
from .config import Config
from .sections import ParameterServer


class Passes:
    """Computes with a model on a device, in the precision of a configuration."""

    def __init__(
        self, model: torch.nn.Module, config: Config, device: torch.device, dtype: torch.dtype, mesh: Any
    ) -> None:
        """`mesh` is the one that splits the model; None: none does."""
        self._model, self._config, self._device, self._dtype = model, config, device, dtype
        self._context = mesh["context"] if mesh is not None and "context" in mesh.mesh_dim_names else None

    def train(self, step: Step) -> None:
        """Compute the gradients of this rank's share of a step, however many ranks there are now."""
        if isinstance(self._model, Pipeline):  # the session runs the microbatches through the stages
            step.run(self._summed, inputs=lambda batch: self._on_device(batch)[0])
            return
        for batch in step.microbatches():
            x, y = self._on_device(batch)
            with self._in_precision():
                loss = self._model(x, y)
            step.backward(mean=loss, weight=y.numel())

    def evaluate(self, job: regroup.Job, data: Any) -> tuple[float, float] | None:
        """Return loss and accuracy on held-out data. Every rank calls it between two steps; a membership change repeats it.

        None: a process that holds a part of this one's model died, or the result is the server's, under a parameter server.
        """
        whole = None
        if isinstance(self._config.strategy, ParameterServer):
            whole = self._share(data, 0, 1, self._model) if job.is_main else None
        else:
            for attempt in job.collective("evaluate"):
                with attempt as team:
                    sums = self._share(data, team.rank, team.world_size, team.forward)
                    team.all_reduce(sums)
                    whole = sums
        if whole is None:
            return None
        loss_sum, num_right, num_targets = whole.tolist()
        return loss_sum / num_targets, num_right / num_targets

    def _share(self, data: Any, rank: int, world_size: int, forward: Callable[..., Any]) -> torch.Tensor:
        """Return the sums of loss, right answers and targets over a process's share of the data."""
        sums, size = torch.zeros(3, dtype=torch.float64, device=self._device), self._config.microbatch
        with evaluating(self._model, self._config.compile):
            for first, counts in shares.held_out(rank, world_size, len(data), size):
                x, y = self._on_device(data.fetch(torch.arange(first, min(first + size, len(data)))))
                with self._in_precision():
                    scores = forward(x)
                if scores is None or not counts:  # of a pipeline the last process has them
                    continue
                scores = scores.flatten(0, -2)
                with self._in_precision():
                    loss = cross_entropy(scores, y.flatten())
                right = (scores.argmax(-1) == y.flatten()).sum()
                sums += torch.stack([loss.double() * y.numel(), right.double(), right.new_tensor(y.numel()).double()])
        return sums

    def _in_precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _on_device(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets on the device. Of each sequence they have this process's part."""
        x, y = regroup.split_sequence(batch, self._context).batch if self._context is not None else batch
        return x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)

    def _summed(self, scores: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        """Return the loss summed over targets, and their number, for the last stage of a pipeline."""
        _, y = self._on_device(batch)
        with self._in_precision():
            return cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="sum"), y.numel()


@contextmanager
def evaluating(model: torch.nn.Module, is_compiled: bool) -> Iterator[None]:
    """Return a block without gradients, in evaluation mode, with nothing compiled: a joiner has rehearsed a training step only."""
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    model.eval()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        model.train()
