"""Writes a run's files for TensorBoard: curves, histograms and a profiler's trace. Rank 0 writes.

A new event file is opened in each generation in which this process is rank 0. The file names the next step, and TensorBoard
drops that step and later ones from older files. So no step is there twice after a rollback. The size of the files
follows from the configuration: a point for each printed line, histograms at an interval, one trace.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import regroup
from regroup.step import Step

from .config import Config, ConfigError
from .speed import Speed
from .trace import Trace


def curves(step: Step, speed: Speed, device: torch.device) -> dict[str, float]:
    """Return a committed step's points by the names of their curves. Waits for the device."""
    points = {"loss": step.loss, "learning rate": step.learning_rates[0]}
    if step.norm is not None:
        points["gradient norm"] = step.norm
    if step.noise_scale is not None:
        points["noise scale"] = step.noise_scale
    points[f"speed/{speed.unit} per second"] = speed.per_second
    if speed.mfu is not None:
        points["speed/MFU"] = speed.mfu
    if step.times is not None:
        points |= {f"step seconds/{part}": seconds for part, seconds in step.times._asdict().items()}
    if device.type == "cuda":
        points["peak memory GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    return points


class Board:
    """The event file and the trace of a run. Does nothing without `tensorboard` in the configuration, and on ranks other than 0."""

    def __init__(self, config: Config, model: torch.nn.Module, device: torch.device) -> None:
        """Raise ModuleNotFoundError without the package tensorboard, and ConfigError for a directory that cannot be written."""
        self._config, self._model, self._device = config, model, device
        self._directory = Path(config.tensorboard) if config.tensorboard is not None else None
        self._writer: Any = None
        self._generation = 0
        """Generation in which `_writer` was opened."""
        self._trace: Trace | None = None
        self._failed = False
        if self._directory is None:
            return
        from torch.utils import tensorboard  # noqa: F401 (fails here, not after the first steps)

        if config.profile_at is not None:
            self._trace = Trace(self._directory, config.profile_at, device)

        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            reason = None if os.access(self._directory, os.W_OK) else "Permission denied"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            raise ConfigError(
                f"tensorboard ({self._directory}) cannot be written ({reason}). Name a directory that you can write to."
            )

    def begin(self, job: regroup.Job, step: Step) -> None:
        """Begin or end the trace before a step, and close the event file if another process is rank 0 now."""
        if self._trace is not None and not step.rehearsal:
            with self._tolerant():
                self._trace.begin(step.index + 1, is_main=job.is_main)
        if self._writer is not None and not job.is_main:
            with self._tolerant():
                self._close_writer()

    def committed(self, job: regroup.Job, step: Step) -> None:
        """Write histograms of the parameters and of the applied gradients after a committed step, if it is time."""
        every = self._config.histograms_every
        if self._directory is None or every is None or not job.is_main or (step.index + 1) % every:
            return
        with self._tolerant():
            writer = self._open(job, step)
            for name, parameter in self._model.named_parameters():
                path = name.replace(".", "/")
                for kind, tensor in (("parameters", parameter.detach()), ("gradients", parameter.grad)):
                    if tensor is not None and torch.isfinite(tensor).all():  # add_histogram refuses other values
                        writer.add_histogram(f"{kind}/{path}", tensor.float().cpu(), step.index + 1)

    def points(self, job: regroup.Job, step: Step, values: Mapping[str, float]) -> None:
        """Write a point of each curve for a committed step."""
        if self._directory is None or not job.is_main:
            return
        with self._tolerant():
            writer = self._open(job, step)
            for name, value in values.items():
                writer.add_scalar(name, value, step.index + 1)
            writer.flush()

    def close(self) -> None:
        """Close all files at the end of the run."""
        with self._tolerant():
            if self._trace is not None:
                self._trace.end()
            self._close_writer()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Let an OSError in the block, such as a full disk, end the curves and not the training. It is printed once."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                print(f"tensorboard ({self._directory}) cannot be written ({error.strerror or error}).", flush=True)
            self._failed, self._writer = True, None

    def _open(self, job: regroup.Job, step: Step) -> Any:
        if self._writer is None or self._generation != job.generation:
            from torch.utils.tensorboard import SummaryWriter

            self._close_writer()
            self._writer = SummaryWriter(
                str(self._directory), purge_step=step.index + 1, filename_suffix=f".g{job.generation}"
            )
            self._generation = job.generation
        return self._writer

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
