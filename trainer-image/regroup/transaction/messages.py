"""What goes over the links of a parameter server: headers of int64, each of a fixed length. Pure.

A worker asks and is answered, in turn. `PULL`: it wants work; with the answer come parameters, where it has not got them. `PUSH`:
its gradients follow; the answer is whether a version has counted them. `WAIT`: it was dealt nothing, and is answered with the next
version. Floats travel as their bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regroup.bits import float_of, unsigned
from regroup.generation.links import numbers

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
    """From a worker."""

    kind: int
    version: int
    """The one whose parameters it has."""
    knows_newer: bool
    ended: bool
    """Its script has left its loop."""
    weight: float = 0.0
    loss_sum: float = 0.0

    def pack(self) -> torch.Tensor:
        """Return it as it is sent: [REQUEST]."""
        return numbers(self.kind, self.version, int(self.knows_newer), int(self.ended), self.weight, self.loss_sum)

    @classmethod
    def unpack(cls, header: torch.Tensor) -> "Request":
        kind, version, knows_newer, ended, weight, loss_sum = header.tolist()
        return cls(kind, version, bool(knows_newer), bool(ended), float_of(weight), float_of(loss_sum))


@dataclass(frozen=True)
class Reply:
    """From the server."""

    kind: int
    version: int
    samples: int
    digest: int
    """Of what that version, and all before it, have counted."""
    loss: float
    """That version's."""
    weight: float
    shares: tuple[int, ...] = ()

    def pack(self, most: int) -> torch.Tensor:
        """Return it as it is sent: [ANSWER + most]. most: shares that a worker may be dealt at a time."""
        padding = [0] * (most - len(self.shares))
        head = (self.kind, self.version, self.samples, self.digest, self.loss, self.weight, len(self.shares))
        return numbers(*head, *self.shares, *padding)

    @classmethod
    def unpack(cls, header: torch.Tensor) -> "Reply":
        kind, version, samples, digest, loss, weight, count, *shares = header.tolist()
        return cls(kind, version, samples, unsigned(digest), float_of(loss), float_of(weight), tuple(shares[:count]))


def used_of(flags: bytes) -> torch.Tensor:
    """Return by parameter whether it has a gradient: [parameters], uint8."""
    return torch.frombuffer(bytearray(flags), dtype=torch.uint8)


def any_used(flags: Sequence[torch.Tensor]) -> bytes:
    """Return the parameters that have a gradient in any of several pushes."""
    return bytes(torch.stack(list(flags)).amax(0).tolist())
