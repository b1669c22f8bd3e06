"""A 64-bit mixing function, which gives the same values for Python integers and for numpy arrays.

It is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), a bijection on
64-bit words. It spreads bits, and does not resist an adversary.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_A = 0xBF58476D1CE4E5B9
_B = 0x94D049BB133111EB


def word(value: int) -> Any:
    """Return `value` mod 2**64 as an array of no dimension (numpy warns when a *scalar* wraps)."""
    return np.array(value & MASK, dtype=np.uint64)


def mix_words(words: Words) -> Words:
    """Return the mix of each element, uint64, same shape."""
    z = words + word(_GAMMA)
    z = (z ^ (z >> word(30))) * word(_A)
    z = (z ^ (z >> word(27))) * word(_B)
    mixed: Words = z ^ (z >> word(31))
    return mixed


def mix(*values: int) -> int:
    """Return one 64-bit word that depends on every value and on their order."""
    z = 0
    for value in values:
        z = (z ^ (value & MASK)) + _GAMMA & MASK
        z = (z ^ (z >> 30)) * _A & MASK
        z = (z ^ (z >> 27)) * _B & MASK
        z = z ^ (z >> 31)
    return z
