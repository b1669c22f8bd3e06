"""Random numbers of a microbatch: a function of (seed, step, virtual worker), not of the rank that computes it.

Owns torch's CPU generator and that of the current CUDA device, for the length of one microbatch. Not Python's `random`
nor numpy's: code in the step that uses those is not repeatable.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .mix import mix


@contextmanager
def microbatch_rng(seed: int, step: int, v: int) -> Iterator[None]:
    """Seed torch's generators for microbatch `v` of `step`; afterwards they are as before, also after an exception.

    Around forward and backward of each microbatch: dropout is then the same on whatever rank, and again in a redo.
    """
    generators = [torch.default_generator]
    # Only when CUDA is in use: asking for its generator would start it, and cost memory in a process that does without.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [generator.get_state() for generator in generators]
    number = mix(seed, step, v)
    try:
        for generator in generators:
            generator.manual_seed(number)
        yield
    finally:
        for generator, state in zip(generators, before):
            generator.set_state(state)
