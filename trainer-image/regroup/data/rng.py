"""Random numbers of a microbatch as a function of (seed, step, virtual worker), whatever rank computes it.

Seeds torch's CPU generator, that of the current CUDA device, Python's `random` and numpy's global generator during a step's
microbatches. An augmentation is then the same on every rank, and again in a redo. Generators that a script makes
for itself are left alone.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from .mix import mix

_MOST = 1 << 32
"""Bound of the seeds that numpy's legacy generator takes."""
_ours: Any = None
"""A bit generator for numpy. Exchanging it for the script's takes a microsecond, copying the script's state 160."""


class microbatch_rng:
    """Block around fetch, forward and backward of a step's microbatches: `with microbatch_rng() as seed_for:`.

    `seed_for(seed, step, v)` seeds all generators for one microbatch. After the block they are as before, even after an exception.
    """

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        # Only if CUDA is in use: asking for its generator would start it, and cost memory in a process that does not need it.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._numpy = getattr(sys.modules.get("numpy"), "random", None)

    def __enter__(self) -> Callable[[int, int, int], None]:
        self._before = [generator.get_state() for generator in self._generators]
        self._pythons, self._numpys = random.getstate(), _exchanged(self._numpy)
        return self._seed_for

    def __exit__(self, *_error: object) -> None:
        for generator, state in zip(self._generators, self._before):
            generator.set_state(state)
        random.setstate(self._pythons)
        if self._numpy is not None:
            self._numpy.set_bit_generator(self._numpys)

    def _seed_for(self, seed: int, step: int, v: int) -> None:
        number = mix(seed, step, v)
        for generator in self._generators:
            generator.manual_seed(number)
        random.seed(number)
        if self._numpy is not None:
            self._numpy.seed(number % _MOST)


def _exchanged(numpy: Any) -> Any:
    """Give numpy's global generator the bit generator `_ours`, and return the script's."""
    global _ours
    if numpy is None:
        return None
    if _ours is None:
        _ours = numpy.MT19937(0)
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(_ours)
    return before
