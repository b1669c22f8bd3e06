"""Data parallel, each rank a whole copy of the model: gradients are all-reduced in buckets while backward still runs.

A bucket is sent as soon as backward has filled it, in one order on all ranks. From then on its parameters have no `.grad`, so
what still comes (a layer whose checkpoint is computed again, a second backward) lands beside it and is summed afterwards. A
parameter that got no gradient for some steps in a row is not waited for.
"""

from collections.abc import Sequence
from typing import Any

import torch

from regroup.data import SamplePlan
from regroup.generation.groups import Groups, Pending

from .buffers import Buffers
from .fingerprint import Fingerprint, ask_settings, settings_hash
from .gradients import Bucket, Gradients, dense, hash_of
from .host import Scalar
from .strategy import Guarantees, Share, Word

PARCEL_BYTES = 256 << 10
"""Of all ranks together. Up to this a gather and a sum by each rank are faster than an all-reduce beside the rows."""
_ALIGN = 16
IDLE_STEPS = 8
"""A parameter that no rank has used for so many steps is not waited for. Fewer would mistake models that are trained in turn."""


class DataParallel:
    """See `Strategy`: reduction="fast"."""

    guarantees = Guarantees(same_bits_at_any_size=False, survivor_has_all=True)
    outer = None

    def __init__(self, model: torch.nn.Module, optimizer: Any, plan: SamplePlan) -> None:
        """Raises UsageError for a model without anything to train."""
        self._gradients = Gradients(model, self._filled)
        self._buffers = Buffers(model)
        self._equal = Equal(model, optimizer, self._buffers)
        self._plan = plan
        self._groups: Groups | None = None
        """None where there is nobody else."""
        self._step = 0
        self._armed = False
        """The last backward runs: buckets are sent as they are filled."""
        self._works: list[Pending] = []
        self._num_sent = 0
        self._open: list[set[int]] = []
        """By bucket: parameters whose gradient is waited for."""
        self._idle = bytearray(len(self._gradients.parameters))
        """By parameter: steps in a row in which no rank had a gradient for it."""
        self._in_parcel = False
        """Gradients are so small that they travel with the rows."""
        self._late: dict[int, torch.Tensor] = {}
        """Gradients that came after their bucket was sent, by parameter."""
        self._agreed: bytes | None = None
        """Parameters that got a gradient on any rank, once that is known for this step."""

    @property
    def gradients(self) -> Gradients:
        """Those that it sums."""
        return self._gradients

    def begin_generation(self, groups: Groups | None) -> None:
        """See Strategy."""
        self._groups = groups if groups is not None and groups.world_size > 1 else None
        self._buffers.begin_generation(groups)
        self._idle = bytearray(len(self._gradients.parameters))
        size = sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._gradients.buckets)
        self._in_parcel = (
            self._groups is not None
            and all(bucket.flat.device.type == "cpu" for bucket in self._gradients.buckets)
            and size * self._groups.world_size <= PARCEL_BYTES
        )

    def begin_step(self) -> None:
        """See Strategy."""
        if self._works:  # they were not waited for to the end
            for bucket in self._gradients.buckets:
                bucket.renew()  # a thread or a GPU of a group that has ended may still write into the old ones
        self._armed, self._works, self._num_sent, self._late, self._agreed = False, [], 0, {}, None
        self._gradients.begin()
        self._buffers.keep()

    def backward(self, v: int, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002
        """See Strategy."""
        self._gradients.check_kept(self._gradients.buckets)
        if last and self._groups is not None and not self._in_parcel:
            self._armed = True
            self._open = [
                {index for index in bucket.indices if self._idle[index] < IDLE_STEPS}
                for bucket in self._gradients.buckets
            ]
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    def skip(self, v: int) -> None:
        """See Strategy."""

    def added(self, v: int, weight: float) -> None:
        """See Strategy."""

    def launch(self, share: Share) -> None:
        """See Strategy."""
        self._armed, self._step = False, share.index
        buckets = self._gradients.buckets
        self._gradients.check_kept(buckets[self._num_sent :])
        if self._groups is None or self._in_parcel:
            for bucket in buckets:
                self._gradients.collect(bucket)
            self._buffers.launch()
            return
        for bucket in buckets[: self._num_sent]:
            for index, parameter in zip(bucket.indices, bucket.parameters):
                if parameter.grad is not None:
                    self._late[index] = dense(parameter.grad)
                    self._gradients.mark_used(index)
        while self._num_sent < len(buckets):
            self._send(buckets[self._num_sent])
        self._buffers.launch()

    def parcel(self) -> torch.Tensor | None:
        """See Strategy."""
        if not self._in_parcel:
            return None
        return torch.cat([_padded(bucket.flat) for bucket in self._gradients.buckets])

    def unpack(self, parcels: torch.Tensor) -> None:
        """See Strategy: add them up here, in rank order, so that the sum has the same bits on all ranks."""
        low = 0
        for bucket in self._gradients.buckets:
            size = bucket.flat.numel() * bucket.flat.element_size()
            parts = [parcel[low : low + size].view(bucket.flat.dtype) for parcel in parcels]
            bucket.flat.copy_(parts[0])
            for part in parts[1:]:
                bucket.flat.add_(part)
            low += -(-size // _ALIGN) * _ALIGN

    def wait(self) -> None:
        """See Strategy."""
        if self._groups is None:
            return
        pending = [*self._works, *self._buffers.sent]
        if pending:  # together: each wait is one of the host for the device
            self._groups.wait(pending)
        if self._works:
            self._works = []
            for bucket in self._gradients.buckets:
                bucket.attach()
        self._buffers.average(self._ran())

    def ask(self) -> list[Scalar]:
        """See Strategy."""
        if self._groups is None:
            self._buffers.check_shapes()
            return []
        return [*self._buffers.ask(), *self._equal.ask(self._step)]

    def word(self, values: Sequence[int]) -> Word:
        """See Strategy."""
        if self._groups is None:
            return Word()
        used = self._gradients.used if self._agreed is None else self._agreed
        changed, equal = self._buffers.split(values)
        return self._equal.word(equal)._replace(unused=hash_of(used), late=bool(self._late), changed=any(changed))

    def settle(self, words: Sequence[Word]) -> bool:
        """See Strategy."""
        if self._groups is None:
            self._agreed = self._gradients.used
            return False
        exchanged = False
        if any(word.late for word in words):
            self._sum_late(self._groups)
            exchanged = True
        if any(word.changed for word in words):
            self._buffers.average_changed(self._ran())
            exchanged = True
        unused = {word.unused for word in words}
        if 0 in unused:
            self._agreed = bytes([1]) * len(self._gradients.parameters)  # one rank at least has used all
        elif len(unused) > 1:
            self._agreed = gathered_any(self._groups, self._gradients.used)
            exchanged = True
        elif self._agreed is None:
            self._agreed = self._gradients.used
        return exchanged

    def totals(self) -> tuple[float, float] | None:
        """See Strategy."""
        return None

    def scale(self, weight: float) -> None:
        """See Strategy."""
        assert self._agreed is not None
        self._gradients.scale(weight, self._agreed)
        if 0 in self._agreed or any(self._idle):
            self._idle = bytearray(0 if used else min(idle + 1, 255) for used, idle in zip(self._agreed, self._idle))

    def clip(self, max_norm: float) -> torch.Tensor:
        """See Strategy."""
        return self._gradients.clip(max_norm)

    def undo(self) -> None:
        """See Strategy."""
        self._buffers.restore()

    def close(self) -> None:
        """See Strategy."""
        self._gradients.close()

    def _ran(self) -> list[int]:
        """Return the ranks that have a share of the step."""
        assert self._groups is not None
        return [rank for rank, share in enumerate(self._plan.shares(self._groups.world_size)) if share]

    def _filled(self, bucket: Bucket, index: int) -> None:
        """A parameter's gradient is complete, or more of it has come."""
        if not self._armed:
            return
        buckets = self._gradients.buckets
        self._open[bucket.number].discard(index)
        # In one order on every rank, whatever order autograd takes: collectives must match.
        while self._num_sent < len(buckets) and not self._open[self._num_sent]:
            self._send(buckets[self._num_sent])

    def _send(self, bucket: Bucket) -> None:
        assert self._groups is not None
        self._gradients.collect(bucket)
        for parameter in bucket.parameters:
            parameter.grad = None
        self._works.append(self._groups.launch("allreduce", [bucket.flat], control=_is_host(bucket.flat)))
        self._num_sent += 1

    def _sum_late(self, groups: Groups) -> None:
        """Sum what came late on any rank, a bucket's together."""
        mine = bytearray(len(self._gradients.parameters))
        for index in self._late:
            mine[index] = 1
        any_late = gathered_any(groups, bytes(mine))
        for bucket in self._gradients.buckets:
            late = [(index, view) for index, view in zip(bucket.indices, bucket.views) if any_late[index]]
            if not late:
                continue
            parts = [self._late[index] if index in self._late else torch.zeros_like(view) for index, view in late]
            flat = torch.cat([part.reshape(-1) for part in parts])
            groups.wait([groups.launch("allreduce", [flat], control=_is_host(flat))])
            low = 0
            for _, view in late:
                view.add_(flat[low : low + view.numel()].view_as(view))
                low += view.numel()
        self._late = {}


def _is_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory: a model may have parameters there beside those on its GPU."""
    return tensor.device.type == "cpu"


def _padded(flat: torch.Tensor) -> torch.Tensor:
    data = flat.view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -len(data) % _ALIGN)) if len(data) % _ALIGN else data


class Equal:
    """What is compared of a model of which each rank has a whole copy."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, buffers: Buffers) -> None:
        self._parameters = list(model.parameters())
        self._optimizer, self._buffers = optimizer, buffers
        self._fingerprint: Fingerprint | None = None
        self._step = 0
        self._num_sums = 0
        """Of the values of the last `ask`: those of the fingerprint."""

    def ask(self, step: int) -> list[Scalar]:
        """Return what `word` needs of the state before this step."""
        tensors = [*self._parameters, *self._buffers.kept]
        if self._fingerprint is None:
            self._fingerprint = Fingerprint(tensors)
        sums = self._fingerprint.ask(tensors, step)
        self._step, self._num_sums = step, len(sums)
        return [*sums, *ask_settings(self._settings)]

    def word(self, values: Sequence[int]) -> Word:
        """Return the hashes of the state before the step of the last `ask`, whose values these are."""
        assert self._fingerprint is not None
        return Word(
            parameters=self._fingerprint.hash(self._step, values[: self._num_sums]),
            settings=settings_hash(self._settings, values[self._num_sums :]),
        )

    @property
    def _settings(self) -> Sequence[dict[str, Any]]:
        return getattr(self._optimizer, "param_groups", ())


def gathered_any(groups: Groups, mine: bytes) -> bytes:
    """Return for each place whether any rank has a 1 there. Every rank calls it. Raises what `Groups.failed` says."""
    part = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    parts = torch.zeros(groups.world_size, len(part), dtype=torch.uint8)
    groups.wait([groups.launch("_allgather_base", parts.view(-1), part, control=True)])
    return bytes(parts.amax(0).tolist())
