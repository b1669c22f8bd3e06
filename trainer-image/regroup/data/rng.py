"""Random numbers of a microbatch: a function of (seed, step, virtual worker), not of the rank that computes it.

Owns torch's CPU generator, that of the current CUDA device, Python's `random` and numpy's global generator, for the length of
a step's microbatches: an augmentation is then the same on whatever rank, and again in a redo. A generator that a script
makes for itself is its own. What the worker processes of a DataLoader draw is seeded by torch.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .mix import mix

_MOST = 1 << 32
"""numpy's legacy generator takes seeds below this."""
_ours: Any = None
"""A bit generator for numpy: exchanging it for the script's takes a microsecond, copying the script's state 160."""


@contextmanager
def microbatch_rng() -> Iterator[Callable[[int, int, int], None]]:
    """Yield `seed_for(seed, step, v)`, which seeds all generators for one microbatch.

    Around fetch, forward and backward of a step's microbatches. Afterwards the generators are as before, also after an
    exception.
    """
    generators = [torch.default_generator]
    # Only when CUDA is in use: asking for its generator would start it, and cost memory in a process that does without.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    before = [generator.get_state() for generator in generators]
    pythons, numpys = random.getstate(), _exchanged(numpy)

    def seed_for(seed: int, step: int, v: int) -> None:
        number = mix(seed, step, v)
        for generator in generators:
            generator.manual_seed(number)
        random.seed(number)
        if numpy is not None:
            numpy.seed(number % _MOST)

    try:
        yield seed_for
    finally:
        for generator, state in zip(generators, before):
            generator.set_state(state)
        random.setstate(pythons)
        if numpy is not None:
            numpy.set_bit_generator(numpys)


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
