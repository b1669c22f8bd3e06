"""The headers of the messages between a parameter server and its workers: int64, each of a fixed length. Pure.

A worker sends a request and gets a reply, in turn:

- `PULL`: the worker wants work. Parameters follow the reply, unless the worker has them.
- `PUSH`: the worker's gradients follow. The reply says whether a version has counted them.
- `WAIT`: the worker was dealt nothing. The reply comes with the next version.

Floats travel as their bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regroup.bits import float_of, unsigned

from .links import numbers

PULL, PUSH, WAIT = 1, 2, 3
DEAL, FINISHED, LEAVE, COUNTED, REFUSED = range(1, 6)
REQUEST = 6
"""Numbers in a request."""
ANSWER = 7
"""Numbers in an answer, before its shares."""
COPY = 3
"""Numbers in front of a version's copy."""
ACKNOWLEDGEMENT = 2


@dataclass(frozen=True)
class Request:
    """A request of a worker."""

    kind: int
    version: int
    """The version whose parameters the worker has."""
    knows_newer: bool
    ended: bool
    """The worker's script has left its loop."""
    weight: float = 0.0
    loss_sum: float = 0.0

    def pack(self) -> torch.Tensor:
        """Return the header: [REQUEST]."""
        return numbers(self.kind, self.version, int(self.knows_newer), int(self.ended), self.weight, self.loss_sum)

    @classmethod
    def unpack(cls, header: torch.Tensor) -> "Request":
        kind, version, knows_newer, ended, weight, loss_sum = header.tolist()
        return cls(kind, version, bool(knows_newer), bool(ended), float_of(weight), float_of(loss_sum))


@dataclass(frozen=True)
class Reply:
    """A reply of the server."""

    kind: int
    version: int
    samples: int
    digest: int
    """Digest of the samples that the version, and all before it, have counted."""
    loss: float
    """The version's loss."""
    weight: float
    shares: tuple[int, ...] = ()

    def pack(self, most: int) -> torch.Tensor:
        """Return the header: [ANSWER + most]. `most` is the number of shares that a worker may be dealt at a time."""
        padding = [0] * (most - len(self.shares))
        head = (self.kind, self.version, self.samples, self.digest, self.loss, self.weight, len(self.shares))
        return numbers(*head, *self.shares, *padding)

    @classmethod
    def unpack(cls, header: torch.Tensor) -> "Reply":
        kind, version, samples, digest, loss, weight, count, *shares = header.tolist()
        return cls(kind, version, samples, unsigned(digest), float_of(loss), float_of(weight), tuple(shares[:count]))


def used_of(flags: bytes) -> torch.Tensor:
    """Return, for each parameter, whether it has a gradient: [parameters], uint8."""
    return torch.frombuffer(bytearray(flags), dtype=torch.uint8)


def any_used(flags: Sequence[torch.Tensor]) -> bytes:
    """Return the parameters that have a gradient in any of several pushes."""
    return bytes(torch.stack(list(flags)).amax(0).tolist())
