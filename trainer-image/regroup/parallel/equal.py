"""The hashes by which a commit finds ranks whose parameters, buffers or optimizer settings differ.

`fingerprint` computes them. Here they become a part of a rank's row, `Hashes`. On an asynchronous device a row must not wait for
backward. There it has the parameters' hash of the step before (`is_late`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from regroup.checkpoint.shards import local_of

from .buffers import Buffers
from .fingerprint import Fingerprint, ask_settings, settings_hash
from .host import Reading, Scalar
from .placement import Place


class Hashes(NamedTuple):
    """Hashes of one rank's state. 0 is never a hash: it says that nothing is compared."""

    parameters: int = 0
    """Hash of parameters and buffers, a part of them in each step."""
    settings: int = 0
    """Hash of the optimizer's settings, such as learning rates."""
    repeated: int = 0
    """Hash of the parameters that all ranks of a model group hold alike, a part of them in each step."""


NO_HASHES = Hashes()


class Equal:
    """The hashes of one rank's model and optimizer. For a step, `ask` comes first and `hashes` takes the values of its scalars."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        buffers: Buffers,
        places: dict[str, Place] | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        """`places` has the place of each parameter in a model group. `is_late` delays the parameters' hash by one step."""
        self._parameters = list(model.parameters())
        self._repeated = [
            parameter for name, parameter in model.named_parameters() if places is not None and places[name].is_repeated
        ]
        self._optimizer, self._buffers = optimizer, buffers
        self.is_late = is_late
        self._fingerprint: Fingerprint | None = None
        self._of_repeated = Fingerprint([local_of(one) for one in self._repeated])
        self._step = 0
        self._coming: Reading | None = None
        """The sums of step `_step`, on their way to the host, if the hash is late."""
        self._before = 0
        """The late hash: of the step before `_step`. 0 in the first step of a generation, on all ranks."""

    def begin_generation(self) -> None:
        """Forget the late hash: ranks that join have none."""
        self._coming, self._before = None, 0

    def check(self) -> None:
        """Raise UsageError for a buffer that cannot be a part of the state."""
        self._buffers.check_shapes()

    def ask(self, step: int) -> list[list[Scalar]]:
        """Return the scalars of the state before this step that `hashes` needs, in three lists."""
        tensors = [*map(local_of, self._parameters), *self._buffers.kept]
        if self._fingerprint is None:
            self._fingerprint = Fingerprint(tensors)
        if self.is_late:
            if self._coming is None or step != self._step:
                if self._coming is not None:
                    self._before = self._fingerprint.hash(self._step, self._coming.values())
                self._coming = Reading(self._fingerprint.ask(tensors, step))
            sums: list[Scalar] = []
        else:
            sums = self._fingerprint.ask(tensors, step)
        self._step = step
        repeated = self._of_repeated.ask([local_of(one) for one in self._repeated], step)
        return [sums, repeated, ask_settings(self._settings)]

    def hashes(self, sums: Sequence[int], repeated: Sequence[int], settings: Sequence[int]) -> Hashes:
        """Return the hashes for the row of the last `ask`, from the values of its lists."""
        assert self._fingerprint is not None
        return Hashes(
            parameters=self._before if self.is_late else self._fingerprint.hash(self._step, sums),
            settings=settings_hash(self._settings, settings),
            repeated=self._of_repeated.hash(self._step, repeated) if self._repeated else 0,
        )

    def wait(self) -> None:
        """Wait for the sums of a late hash. They come behind backward, so the device has ended it then."""
        if self._coming is not None:
            self._coming.values()

    @property
    def _settings(self) -> Sequence[dict[str, Any]]:
        return getattr(self._optimizer, "param_groups", ())
