"""Values of the device that the host needs in a step, read together: each reading waits for all that the device was given before.

A value on the CPU needs no reading: it is a number from the start.
"""

from collections.abc import Sequence
from typing import Any

import torch

from regroup.bits import float_bits
from regroup.checkpoint.staging import Engine, engine_of

Scalar = torch.Tensor | int
"""A number of int64: known, or on a device."""


class Reading:
    """Scalars on their way to the host, behind everything that their devices were given before.

    Work that the device is given later does not delay them. On a device whose work is not asynchronous they are here at once.
    """

    def __init__(self, scalars: Sequence[Scalar]) -> None:
        self._values = [0 if isinstance(one, torch.Tensor) else one for one in scalars]
        self._coming: list[tuple[list[int], torch.Tensor, Engine, Any]] = []
        """One entry for each asynchronous device: indices in `_values`, host memory that the device fills, the device's
        engine, and the engine's mark after the copy."""
        places: dict[torch.device, list[int]] = {}
        for i, one in enumerate(scalars):
            if isinstance(one, torch.Tensor):
                places.setdefault(one.device, []).append(i)
        for device, there in places.items():
            engine = engine_of(device)
            stacked = torch.stack([scalar for i in there if isinstance(scalar := scalars[i], torch.Tensor)])
            if engine is None:
                self._take(there, stacked)
            else:
                self._coming.append((there, stacked.to("cpu", non_blocking=True), engine, engine.mark()))

    def values(self) -> list[int]:
        """Return the scalars as numbers. Waits until they have come."""
        for there, copy, engine, mark in self._coming:
            engine.wait(mark)
            self._take(there, copy)
        self._coming = []
        return self._values

    def _take(self, there: Sequence[int], values: torch.Tensor) -> None:
        for i, value in zip(there, values.tolist()):
            self._values[i] = value


def to_host(scalars: Sequence[Scalar]) -> list[int]:
    """Return the scalars as numbers. Waits once for each device that some of them are on."""
    return Reading(scalars).values()


def read_together(*lists: Sequence[Scalar]) -> list[list[int]]:
    """Return each list with its scalars as numbers. Waits once for each device that some of them are on."""
    values = iter(to_host([one for scalars in lists for one in scalars]))
    return [[next(values) for _ in scalars] for scalars in lists]


def bits_of(value: torch.Tensor) -> Scalar:
    """Return the bits of a tensor of one number, as a float64, for `to_host` and `bits.float_of`."""
    if value.device.type == "cpu":
        return float_bits(float(value))
    return value.detach().double().reshape(()).view(torch.int64)
