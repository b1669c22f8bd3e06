"""Data parallel: gradients are all-reduced in buckets while backward still runs, among the ranks that hold the same parameters.

Where each rank has the whole model, these are all ranks. Where a model group holds one copy, a rank has its part, its inner
index; what torch sums inside the group (FSDP2, tensor parallel) comes complete, and is summed here over the groups.

A bucket is sent as soon as backward has filled it, in one order on all ranks. From then on its parameters have no `.grad`, so
what still comes (a layer whose checkpoint is computed again, a second backward) lands beside it and is summed afterwards. A
parameter that got no gradient for some steps in a row is not waited for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from regroup import strategies
from regroup.bits import float_of
from regroup.checkpoint.shards import local_of
from regroup.data import SamplePlan
from regroup.errors import UsageError
from regroup.generation.groups import Groups, Part, Pending
from regroup.generation.rows import Rows

from . import fsdp
from .buffers import Buffers
from .fingerprint import Fingerprint, ask_settings, settings_hash
from .gradients import Bucket, Gradients, dense, hash_of
from .hooks import Hook, Plain, Rounded, launch_sum
from .host import Scalar, bits_of
from .placement import Place, place_of
from .powersgd import LowRank
from .ring import Ring
from .strategy import Guarantees, Share, Word
from .streams import Streams

PARCEL_BYTES = 256 << 10
"""Of all ranks together. Up to this a gather and a sum by each rank are faster than an all-reduce beside the rows."""
_ALIGN = 16
CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""
_DEFAULT = strategies.DataParallel()
IDLE_STEPS = 8
"""A parameter that no rank has used for so many steps is not waited for. Fewer would mistake models that are trained in turn."""


class DataParallel:
    """See `Strategy`: reduction="fast"."""

    outer = None

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        plan: SamplePlan,
        described: strategies.DataParallel = _DEFAULT,
        inner: int = 0,
        *,
        measures: bool = False,
    ) -> None:
        """`inner`: this process's index in its model group. `measures`: squared norms of gradients, before and after the sum.
        Raises UsageError for a model without anything to train, and for a hook or uneven shares in a model group."""
        self._layout = plan.layout
        self.guarantees = Guarantees(same_bits_at_any_size=False, survivor_has_all=self._layout.size == 1)
        places = {name: place_of(name, one, self._layout, inner) for name, one in model.named_parameters()}
        self._gradients = Gradients(model, self._filled, places if self._layout.size > 1 else None)
        self._streams = Streams(self._gradients.buckets[0].flat.device)
        self._hook = make_hook(described)
        if self._layout.size > 1 and (type(self._hook) is not Plain or described.uneven):
            raise UsageError(f"{described} does not work with regroup.mesh() so far. Leave one of them out.")
        if isinstance(self._hook, LowRank):
            self.guarantees = replace(self.guarantees, lost_with_a_rank="what its gradients still owe (error feedback)")
        self._buffers = Buffers(model)
        self._equal = Equal(model, optimizer, self._buffers, places if self._layout.size > 1 else None)
        self._model, self._plan = model, plan
        fsdp.sum_gradients(model)
        self._order = fsdp.Order(model)
        self._groups: Groups | None = None
        """None where there is nobody else."""
        self._among: dict[frozenset[str], Groups | Part] = {}
        """By `Place.along`: among whom the gradients of a bucket are summed."""
        self._words: Sequence[Word] = ()
        """Of the last rows."""
        self._norm = math.nan
        """Of the gradients of the whole model, after `scale`."""
        self._known_norm: float | None = None
        """That of the step that was put back."""
        self._step = 0
        self._upcoming: int | None = None
        """Number of the step that begins next; None: it is not known in a generation's first one."""
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
        self.measures = measures
        self._own: list[torch.Tensor] = []
        """Squared norm of each bucket that is on its way, before the sum."""
        self._is_measured = True
        """No rank's gradients came late: those are in no bucket."""

    @property
    def gradients(self) -> Gradients:
        """Those that it sums."""
        return self._gradients

    def begin_generation(self, groups: Groups | None) -> None:
        """See Strategy."""
        self._groups = groups if groups is not None and groups.world_size > 1 else None
        if self._groups is not None:
            alongs = {self._layout.summed_dims, *(bucket.place.along for bucket in self._gradients.buckets)}
            self._among = {along: self._part(self._groups, along) for along in alongs}
        self._hook.begin_generation(self._groups)
        self._upcoming = None
        self._buffers.begin_generation(self._alike if self._groups is not None else groups)
        self._idle = bytearray(len(self._gradients.parameters))
        size = sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._gradients.buckets)
        self._in_parcel = (
            self._groups is not None
            and self._layout.size == 1
            and type(self._hook) is Plain
            and all(bucket.flat.device.type == "cpu" for bucket in self._gradients.buckets)
            and size * self._groups.world_size <= PARCEL_BYTES
        )

    def forget(self) -> None:
        """See Strategy."""
        self._hook.forget()

    def begin_step(self) -> None:
        """See Strategy."""
        if self._works:
            self._drop_sums()
        self._armed, self._num_sent, self._late, self._agreed = False, 0, {}, None
        self._own, self._is_measured = [], True
        self._gradients.begin()
        self._streams.begin()
        self._hook.begin_step()
        if self._layout.size > 1:
            # A forward without a backward (an evaluation) leaves parameters gathered. On some ranks of a group only, where others
            # are new or have been asked for their state since: a rank would skip a gather that the others begin.
            fsdp.begin_anew(self._model)
        self._order.hash = 0
        self._buffers.keep()

    def backward(self, v: int, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002
        """See Strategy."""
        self._before_backward(last=last)
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    def run_backward(
        self, run: Callable[[], Any], parameters: Sequence[torch.nn.Parameter] = (), *, last: bool = False
    ) -> None:
        """See Strategy."""
        self._before_backward(last=last)
        run()
        self._gradients.mark_parameters(parameters)

    def _before_backward(self, *, last: bool) -> None:
        self._gradients.check_kept(self._gradients.buckets)
        knows = self._upcoming is not None or not self._hook.needs_step
        if last and self._groups is not None and not self._in_parcel and knows:
            self._armed = True
            self._open = [
                {index for index in bucket.indices if self._idle[index] < IDLE_STEPS}
                for bucket in self._gradients.buckets
            ]
        self._gradients.watch()

    def skip(self, v: int) -> None:
        """See Strategy."""

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """See Strategy."""

    def launch(self, share: Share) -> None:
        """See Strategy."""
        self._armed, self._step = False, share.index
        self._upcoming = share.index
        buckets = self._gradients.buckets
        self._gradients.check_kept(buckets[self._num_sent :])
        if self._groups is None or self._in_parcel:
            for bucket in buckets:
                self._gradients.collect(bucket)
                self._measure(bucket)
                self._hook.alone(bucket)
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
        if self._layout.size > 1:
            self._groups.wait_all(pending)  # with what was summed inside the group: rule REDUCED
        elif pending:  # together: each wait is one of the host for the device
            self._groups.wait(pending)
        if self._num_sent:
            self._works, self._num_sent = [], 0
            self._hook.finish(self._groups)
            for bucket in self._gradients.buckets:
                bucket.attach()
            if self._layout.size > 1:
                self._agreed = self._gradients.used_anywhere()
        self._buffers.average(self._ran())

    def ask(self) -> list[Scalar]:
        """See Strategy."""
        if self._groups is None:
            self._buffers.check_shapes()
            return []
        own = [bits_of(_sum(self._own))] if self.measures else []
        asked = [*own, *self._buffers.ask(), *self._equal.ask(self._step)]
        return asked if self._layout.size == 1 else [self._ask_norm(), *asked]

    def word(self, values: Sequence[int]) -> Word:
        """See Strategy."""
        if self._groups is None:
            return Word()
        used = self._gradients.used if self._agreed is None else self._agreed
        unused, norm_squared, own = hash_of(used), 0.0, -1.0
        if self.measures:
            own, values = float_of(values[0]), values[1:]
        if self._layout.size > 1:
            unused, norm_squared, values = 0, float_of(values[0]), values[1:]
        changed, equal = self._buffers.split(values)
        return self._equal.word(equal)._replace(
            unused=unused,
            late=bool(self._late),
            changed=any(changed),
            norm_squared=norm_squared,
            own_norm_squared=own,
            order=self._order.hash,
        )

    def settle(self, words: Sequence[Word]) -> bool:
        """See Strategy."""
        if self._groups is None:
            self._agreed = self._gradients.used
            return False
        self._words = words
        exchanged = False
        if any(word.late for word in words):
            if self._layout.size > 1:
                raise UsageError(
                    "A gradient came after its sum over the model groups had begun: a layer was computed again in backward, or "
                    "there was a second backward. Use checkpoint(..., use_reentrant=False), and call step.backward() once for each "
                    "batch."
                )
            self._sum_late(self._groups)
            self._is_measured = False
            exchanged = True
        if any(word.changed for word in words):
            self._buffers.average_changed(self._ran())
            exchanged = True
        unused = {word.unused for word in words}
        if 0 in unused:
            if self._layout.size == 1:  # one rank at least has used all; in a model group the set came with the sums
                self._agreed = bytes([1]) * len(self._gradients.parameters)
        elif len(unused) > 1:
            self._agreed = gathered_any(self._groups, self._gradients.used)
            exchanged = True
        elif self._agreed is None:
            self._agreed = self._gradients.used
        return exchanged

    def totals(self) -> tuple[float, float] | None:
        """See Strategy."""
        return None

    def norm_squared(self) -> Scalar | None:
        """See Strategy."""
        if not self.measures or self._groups is None or not self._is_measured:
            return None
        return bits_of(_sum([squared_norm(bucket.flat) for bucket in self._gradients.buckets]))

    def scale(self, weight: float) -> None:
        """See Strategy."""
        assert self._agreed is not None
        self._hook.commit(self._agreed)
        self._upcoming = self._step + 1
        self._gradients.scale(weight, self._agreed)
        if self._known_norm is not None:
            self._norm, self._known_norm = self._known_norm, None
        elif (
            self._groups is not None and self._layout.size > 1
        ):  # all groups have the same sums: the first one's are enough
            squares = [word.norm_squared for word in self._words[: self._layout.size]]
            self._norm = math.sqrt(sum(squares)) / weight
        if 0 in self._agreed or any(self._idle):
            self._idle = bytearray(0 if used else min(idle + 1, 255) for used, idle in zip(self._agreed, self._idle))

    def clip(self, max_norm: float) -> torch.Tensor:
        """See Strategy. In a model group the norm follows from the rows: nothing communicates after them (rule LOCAL)."""
        if self._layout.size == 1:
            return self._gradients.clip(max_norm)
        norm = torch.tensor(self._norm, dtype=torch.float64)
        self._gradients.multiply(float(torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)))
        return norm

    def take(self) -> Any:
        """See Strategy."""
        flats = [bucket.flat for bucket in self._gradients.buckets]
        for bucket in self._gradients.buckets:
            bucket.renew()
            bucket.attach()  # a zero_grad() of the script must not reach what is taken
        assert self._agreed is not None
        return flats, self._agreed, self._buffers.now()

    def put_back(self, taken: Any, norm: float | None) -> None:
        """See Strategy."""
        flats, self._agreed, buffers = taken
        self._drop_sums()  # of a later generation, which was cut off
        self._armed, self._num_sent, self._late = False, 0, {}
        for bucket, flat in zip(self._gradients.buckets, flats):
            bucket.flat.copy_(flat)
            bucket.attach()
        self._buffers.set(buffers)
        self._known_norm = norm

    def undo(self) -> None:
        """See Strategy."""
        fsdp.begin_anew(self._model)
        self._buffers.restore()

    def close(self) -> None:
        """See Strategy."""
        self._order.close()
        self._gradients.close()

    def _drop_sums(self) -> None:
        """Give up sums that were not waited for to the end: a thread or a GPU of a group that has ended may still write into the
        buckets' memory, so they take new."""
        self._works = []
        for bucket in self._gradients.buckets:
            bucket.renew()

    @property
    def _alike(self) -> Groups | Part:
        """The ranks with the same parameters, or the same part of them, that compute different samples or tokens."""
        return self._among[self._layout.summed_dims]

    def _part(self, groups: Groups, along: frozenset[str]) -> Groups | Part:
        return groups if self._layout.size == 1 else groups.part(self._layout.part_name(along))

    def _ran(self) -> list[int]:
        """Return those of `_alike` that have a share of the step, by their place among them."""
        assert self._groups is not None
        shares = self._plan.shares(self._groups.world_size)
        ranks = self._alike.ranks if isinstance(self._alike, Part) else range(self._groups.world_size)
        return [place for place, rank in enumerate(ranks) if shares[rank]]

    def _ask_norm(self) -> Scalar:
        total = torch.zeros((), dtype=torch.float64)
        for bucket in self._gradients.buckets:
            if bucket.place.counts:
                norm = torch.linalg.vector_norm(bucket.values, dtype=torch.float64)
                total = total.to(norm.device) + norm * norm
        return bits_of(total)

    def _filled(self, bucket: Bucket, index: int) -> None:
        """A parameter's gradient is complete, or more of it has come."""
        if not self._armed:
            return
        buckets = self._gradients.buckets
        self._streams.note()
        self._open[bucket.number].discard(index)
        # In one order on every rank, whatever order autograd takes: collectives must match.
        while self._num_sent < len(buckets) and not self._open[self._num_sent]:
            self._send(buckets[self._num_sent])

    def _send(self, bucket: Bucket) -> None:
        assert self._groups is not None
        with self._streams.joined():
            self._gradients.collect(bucket)
            self._measure(bucket)
            for parameter in bucket.parameters:
                parameter.grad = None
            among = self._among[bucket.place.along]
            if among.world_size > 1:
                step = self._step if self._upcoming is None else self._upcoming
                self._works.append(self._hook.send(among, bucket, step))
        self._num_sent += 1

    def _measure(self, bucket: Bucket) -> None:
        if self.measures and self._groups is not None:
            self._own.append(squared_norm(bucket.flat))

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
            groups.wait([launch_sum(groups, flat)])
            low = 0
            for _, view in late:
                view.add_(flat[low : low + view.numel()].view_as(view))
                low += view.numel()
        self._late = {}


def make_hook(described: strategies.DataParallel) -> Hook:
    """Return what sums the buckets."""
    if described.hook is None:
        return Ring() if described.algorithm == "ring" else Plain()
    if isinstance(described.hook, strategies.PowerSGD):
        return LowRank(described.hook)
    return Rounded({"fp16": torch.float16, "bf16": torch.bfloat16}[described.hook])


def squared_norm(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a flat tensor, a scalar on its device."""
    if flat.dtype in (torch.float32, torch.float64):
        return flat @ flat
    norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return norm.square()


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of scalars, in float64: in one order, so with the same bits wherever they are the same."""
    return parts[0] if len(parts) == 1 else torch.stack([part.double() for part in parts]).sum()


def _padded(flat: torch.Tensor) -> torch.Tensor:
    data = flat.view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -len(data) % _ALIGN)) if len(data) % _ALIGN else data


class Equal:
    """What is compared of a model of which each rank has a whole copy."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, buffers: Buffers, places: dict[str, Place] | None = None
    ) -> None:
        """`places`: of each parameter, in a model group."""
        self._parameters = list(model.parameters())
        self._repeated = [
            parameter for name, parameter in model.named_parameters() if places is not None and places[name].is_repeated
        ]
        self._optimizer, self._buffers = optimizer, buffers
        self._fingerprint: Fingerprint | None = None
        self._of_repeated = Fingerprint([local_of(one) for one in self._repeated])
        self._step = 0
        self._num_sums = self._num_repeated = 0
        """Of the values of the last `ask`: those of the fingerprints."""

    def ask(self, step: int) -> list[Scalar]:
        """Return what `word` needs of the state before this step."""
        tensors = [*map(local_of, self._parameters), *self._buffers.kept]
        if self._fingerprint is None:
            self._fingerprint = Fingerprint(tensors)
        sums = self._fingerprint.ask(tensors, step)
        repeated = self._of_repeated.ask([local_of(one) for one in self._repeated], step)
        self._step, self._num_sums, self._num_repeated = step, len(sums), len(repeated)
        return [*sums, *repeated, *ask_settings(self._settings)]

    def word(self, values: Sequence[int]) -> Word:
        """Return the hashes of the state before the step of the last `ask`, whose values these are."""
        assert self._fingerprint is not None
        sums, values = values[: self._num_sums], values[self._num_sums :]
        repeated, values = values[: self._num_repeated], values[self._num_repeated :]
        return Word(
            parameters=self._fingerprint.hash(self._step, sums),
            settings=settings_hash(self._settings, values),
            repeated=self._of_repeated.hash(self._step, repeated) if self._repeated else 0,
        )

    @property
    def _settings(self) -> Sequence[dict[str, Any]]:
        return getattr(self._optimizer, "param_groups", ())


def gathered_any(groups: Groups | Part, mine: bytes) -> bytes:
    """Return for each place whether any rank has a 1 there. Every rank calls it. Raises what `Groups.failed` says."""
    rows = Rows(groups, torch.frombuffer(bytearray(mine), dtype=torch.uint8)).wait()
    return bytes(rows.amax(0).tolist())
