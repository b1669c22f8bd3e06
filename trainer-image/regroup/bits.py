"""Converts numbers of 64 bits to int64, as tensors have it, and back: floats by their bits, others by two's complement. Pure."""

import struct

MASK = (1 << 64) - 1


def float_bits(value: float) -> int:
    """Return the bits of a float64 as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def float_of(bits: int) -> float:
    """Return the float64 that has these bits."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def signed(value: int) -> int:
    """Return the last 64 bits of a number as an int64."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """Return the number in [0, 2**64) that has the bits of an int64."""
    return value & MASK
