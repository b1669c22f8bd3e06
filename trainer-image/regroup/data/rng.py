"""Random numbers of a microbatch: a function of (seed, step, virtual worker), not of the rank that computes it.

Owns torch's CPU generator, that of the current CUDA device, Python's `random` and numpy's global generator, for the length of
a step's microbatches: an augmentation is then the same on whatever rank, and again in a redo. A generator that a script
makes for itself is its own.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from .mix import mix

_MOST = 1 << 32
"""numpy's legacy generator takes seeds below this."""
_ours: Any = None
"""A bit generator for numpy: exchanging it for the script's takes a microsecond, copying the script's state 160."""


class microbatch_rng:
    """`with microbatch_rng() as seed_for:` around fetch, forward and backward of a step's microbatches.

    `seed_for(seed, step, v)` seeds all generators for one microbatch. Afterwards they are as before, also after an exception.
    """

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        # Only when CUDA is in use: asking for its generator would start it, and cost memory in a process that does without.
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
    """Give numpy's global generator a state of ours; return the script's."""
    global _ours
    if numpy is None:
        return None
    if _ours is None:
        _ours = numpy.MT19937(0)
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(_ours)
    return before
