"""Records a profiler's trace of some steps, for TensorBoard's profiler page, Perfetto or chrome://tracing."""

from pathlib import Path
from typing import Any

import torch

TRACED_STEPS = 3


class Trace:
    """One trace file with `TRACED_STEPS` steps, which are counted from 1."""

    def __init__(self, directory: Path, first: int, device: torch.device) -> None:
        self.path = directory / f"step-{first}.pt.trace.json"
        """A run that comes to these steps again writes the file again."""
        self._first, self._device = first, device
        self._profile: Any = None

    def begin(self, step: int, *, is_main: bool) -> None:
        """Begin or end the trace before a step, which may be a repeated one. Raises OSError if the file cannot be written."""
        inside = self._first <= step < self._first + TRACED_STEPS
        if self._profile is not None and not inside:
            self.end()
        if self._profile is None and is_main and step == self._first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # Without acc_events torch 2.11 warns that it forgets earlier cycles, although there is only one.
            self._profile = torch.profiler.profile(activities=activities, acc_events=True)
            self._profile.start()

    def end(self) -> None:
        """Write the trace, if one was recorded. Raises OSError."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            profile.export_chrome_trace(str(self.path))
