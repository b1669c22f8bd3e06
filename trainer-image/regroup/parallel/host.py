"""Values of the device that the host needs in a step, read together: each reading waits for all that the device was given before.

What is on the CPU needs no reading: it is a number here from the start.
"""

from collections.abc import Sequence

import torch

from regroup.bits import float_bits

Scalar = torch.Tensor | int
"""A number of int64: known, or on a device."""


def to_host(scalars: Sequence[Scalar]) -> list[int]:
    """Return the scalars as numbers. Waits once for each device that some of them are on."""
    values = [0 if isinstance(one, torch.Tensor) else one for one in scalars]
    places: dict[torch.device, list[int]] = {}
    for i, one in enumerate(scalars):
        if isinstance(one, torch.Tensor):
            places.setdefault(one.device, []).append(i)
    for there in places.values():
        read = torch.stack([scalar for i in there if isinstance(scalar := scalars[i], torch.Tensor)]).tolist()
        for i, value in zip(there, read):
            values[i] = value
    return values


def bits_of(value: torch.Tensor) -> Scalar:
    """Return the bits of a tensor of one number, as a float64, for `to_host` and `bits.float_of`."""
    if value.device.type == "cpu":
        return float_bits(float(value))
    return value.detach().double().reshape(()).view(torch.int64)
