"""Communication hooks: they sum a bucket of gradients over ranks, as it is or rounded to 16 bits. (`powersgd` is a third.)

The name is DDP's. Torch's own hooks take a bucket of DDP's reducer and average over ranks. Ours sum, because ranks have unequal
shares. They also learn when a step is committed: an interrupted one is done again with what was kept before it.
"""

import math
from typing import Protocol

import torch

from regroup.bits import float_of
from regroup.generation.groups import Groups, Part, Pending

from .gradients import Bucket
from .host import bits_of, to_host

_TARGET = 10
"""The largest gradient of the last step is scaled to about 2^10 in fp16, which ends at 2^16. That leaves room for it to grow, and
for parts of the sum that cancel out."""
_MAX_EXPONENT = 100
"""A scale must be a normal number in float32."""


class Hook(Protocol):
    """Sums the buckets of one job. All ranks make the same calls, in the order below; what communicates raises what
    `Groups.failed` says. What a step changes for the next one counts from `commit`."""

    needs_step: bool
    """`send` depends on the step's number, which is not known while the first backward of a generation runs."""

    def begin_generation(self, groups: Groups | None) -> None:
        """Take the groups of a new generation. None: no other rank is there."""
        ...

    def forget(self) -> None:
        """Drop what was kept for this rank's old state: a copy of another rank's has replaced it."""
        ...

    def begin_step(self) -> None:
        """Drop what was sent and is not committed."""
        ...

    def send(self, groups: Groups | Part, bucket: Bucket, step: int) -> Pending:
        """Start to sum a bucket. Called in backward, in the order of the buckets."""
        ...

    def finish(self, groups: Groups | Part) -> None:
        """Leave the sums in the buckets: all that `send` started has ended."""
        ...

    def alone(self, bucket: Bucket) -> None:
        """Take the place of `send` where no other rank is there."""
        ...

    def commit(self, used: bytes) -> None:
        """Keep what the applied step leaves for the next one. `used` has a 1 for each parameter that any rank had a gradient
        for."""
        ...


class Plain:
    """Sums gradients as they are."""

    needs_step = False

    def begin_generation(self, groups: Groups | None) -> None:
        """Do nothing: nothing is kept between steps."""

    def forget(self) -> None:
        """Do nothing: nothing is kept between steps."""

    def begin_step(self) -> None:
        """Do nothing: nothing is kept between steps."""

    def send(self, groups: Groups | Part, bucket: Bucket, step: int) -> Pending:  # noqa: ARG002
        """Start to sum the bucket in place."""
        return launch_sum(groups, bucket.flat)

    def finish(self, groups: Groups | Part) -> None:
        """Do nothing: the sums are in the buckets."""

    def alone(self, bucket: Bucket) -> None:
        """Do nothing: the bucket is its own sum."""

    def commit(self, used: bytes) -> None:
        """Do nothing: nothing is kept between steps."""


class Rounded(Plain):
    """Sums in fp16 or bf16. Gradients that have no more bits are summed as they are.

    bf16 has the range of float32. In fp16 a bucket is multiplied by a power of two, which the last sum suggests: it is the same on
    all ranks, without asking. The first step of a generation has no last one and is summed as it is. A sum that overflows all the
    same does so on every rank, and is sent again as it is.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._scales: dict[int, float] = {}
        """Scales for fp16, with the bucket's number as key. Absent: it is not known yet."""
        self._next: dict[int, float] = {}
        self._sent: list[tuple[Bucket, torch.Tensor, float]] = []
        """(bucket, what is summed, its scale)."""

    def begin_generation(self, groups: Groups | None) -> None:  # noqa: ARG002
        """Forget the scales: a rank that joins knows no last sum."""
        self._scales, self._next = {}, {}

    def begin_step(self) -> None:
        """Drop the step that was not committed."""
        self._sent, self._next = [], {}

    def send(self, groups: Groups | Part, bucket: Bucket, step: int) -> Pending:  # noqa: ARG002
        """Start to sum a copy of the bucket that is rounded, and in fp16 scaled."""
        flat, scale = bucket.flat, 1.0
        if flat.is_floating_point() and flat.element_size() > self._dtype.itemsize:
            if self._dtype == torch.bfloat16:
                flat = flat.to(self._dtype)
            elif bucket.number in self._scales:
                scale = self._scales[bucket.number]
                flat = (flat * scale).to(self._dtype)
        self._sent.append((bucket, flat, scale))
        return launch_sum(groups, flat)

    def finish(self, groups: Groups | Part) -> None:
        """Put the sums into the buckets. A bucket whose sum has overflowed is summed again as it is."""
        again = []
        if self._dtype == torch.float16:
            # One wait of the host for the device; the sums have been waited for already.
            asked = [bits_of(_largest(flat)) for _, flat, _ in self._sent]
            for (bucket, flat, scale), bits in zip(self._sent, to_host(asked)):
                largest = float_of(bits) / scale
                if 0 < largest < math.inf:
                    self._next[bucket.number] = scale_for(largest)
                elif flat is not bucket.flat and largest != 0:
                    again.append(bucket)
        for bucket, flat, scale in self._sent:
            if flat is not bucket.flat and bucket not in again:
                bucket.flat.copy_(flat).div_(scale)
        if again:
            groups.wait([launch_sum(groups, bucket.flat) for bucket in again])
        self._sent = []

    def commit(self, used: bytes) -> None:  # noqa: ARG002
        """Use the scales that the applied sums suggest."""
        self._scales, self._next = self._next, {}


def scale_for(largest: float) -> float:
    """Return the power of two that brings the largest gradient to about 2^10. Pure."""
    exponent = _TARGET - math.frexp(largest)[1]
    return 2.0 ** max(-_MAX_EXPONENT, min(exponent, _MAX_EXPONENT))


def launch_sum(groups: Groups | Part, flat: torch.Tensor) -> Pending:
    """Start to sum a tensor over all ranks, in place. In host memory by gloo, even beside a GPU's."""
    return groups.launch("allreduce", [flat], control=flat.device.type == "cpu")


def _largest(flat: torch.Tensor) -> torch.Tensor:
    return flat.detach().abs().amax()
