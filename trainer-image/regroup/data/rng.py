"""Random numbers of a microbatch as a function of (seed, step, virtual worker), whatever rank computes it.

Seeds torch's CPU generator, that of the current CUDA device, Python's `random` and numpy's global generator during a step's
microbatches. An augmentation is then the same on every rank, and again in a redo. Generators that a script makes
for itself are left alone.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .mix import mix

_MOST = 1 << 32
"""Bound of the seeds that numpy's legacy generator takes."""
_ours: Any = None
"""A bit generator for numpy. Exchanging it for the script's takes a microsecond, copying the script's state 160."""


@contextmanager
def microbatch_rng() -> Iterator[Callable[[int, int, int], None]]:
    """Give fetch, forward and backward of a step's microbatches random numbers: `with microbatch_rng() as seed_for:`.

    `seed_for(seed, step, v)` seeds all generators for one microbatch. After the block they are as before, even after an exception.
    """
    global _ours
    generators = [torch.default_generator]
    # Only if CUDA is in use: asking for its generator would start it, and cost memory in a process that does not need it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)

    def seed_for(seed: int, step: int, v: int) -> None:
        number = mix(seed, step, v)
        for generator in generators:
            generator.manual_seed(number)
        random.seed(number)
        if numpy is not None:
            numpy.seed(number % _MOST)

    before, pythons = [generator.get_state() for generator in generators], random.getstate()
    if numpy is not None:
        _ours = _ours or numpy.MT19937(0)
        numpys = numpy.get_bit_generator()
        numpy.set_bit_generator(_ours)
    try:
        yield seed_for
    finally:
        for generator, state in zip(generators, before):
            generator.set_state(state)
        random.setstate(pythons)
        if numpy is not None:
            numpy.set_bit_generator(numpys)
