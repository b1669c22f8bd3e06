"""Numbers of 64 bits as the int64 of a tensor: floats as their bits, unsigned numbers by two's complement. Pure."""

import struct

MASK = (1 << 64) - 1


def float_bits(value: float) -> int:
    """Return the bits of a float64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def float_of(bits: int) -> float:
    """Return the float64 that has these bits."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def signed(value: int) -> int:
    """Return the int64 with the last 64 bits of a number."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """Return the number of 64 bits, from 0 up, that `signed` made an int64 of."""
    return value & MASK
