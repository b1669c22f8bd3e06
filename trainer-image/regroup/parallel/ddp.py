"""Data parallel: gradients are all-reduced in buckets while backward still runs, among the ranks that hold the same parameters.

Without model groups each rank has the whole model, and all ranks sum. In a model group a rank has its part, its inner index.
Sums of torch inside the group (FSDP2, tensor parallel) come complete, and are summed here over the groups.

A bucket is sent as soon as backward has filled it, in one order on all ranks. From then on its parameters have no `.grad`. Later
gradients, of a layer that is computed again or of a second backward, land beside the bucket and are summed afterwards. A parameter
that got no gradient for some steps in a row is not waited for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from regroup import strategies
from regroup.bits import float_of
from regroup.checkpoint.staging import engine_of
from regroup.data import SamplePlan
from regroup.errors import UsageError
from regroup.generation.groups import Groups, Part, Pending
from regroup.generation.rows import Rows

from . import fsdp
from .buffers import Buffers
from .equal import Equal
from .gradients import Bucket, Gradients, dense, hash_of
from .hooks import Hook, Plain, Rounded, launch_sum
from .host import Scalar, bits_of
from .losses import Losses
from .placement import place_of
from .powersgd import LowRank
from .ring import Ring
from .strategy import Agree, Guarantees, Reduced, Share, Word, settled
from .streams import Streams

PARCEL_BYTES = 256 << 10
"""Largest size of the gradients of all ranks together for which they travel with the rows. Up to it a gather and a sum by each rank
are faster than an all-reduce beside the rows."""
_ALIGN = 16
CLIP_EPSILON = 1e-6
"""The same number as in torch.nn.utils.clip_grad_norm_."""
_DEFAULT = strategies.DataParallel()
IDLE_STEPS = 8
"""A parameter that no rank has used for so many steps is not waited for. Fewer would mistake models that are trained in turn."""


@dataclass
class _Sums:
    """The sums of one step, as far as they have come."""

    is_armed: bool = False
    """The last backward runs: buckets are sent as they are filled."""
    works: list[Pending] = field(default_factory=list)
    num_sent: int = 0
    """Number of buckets that were sent and not waited for."""
    open: list[set[int]] = field(default_factory=list)
    """Parameters whose gradient is waited for, bucket by bucket."""
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that came after their bucket was sent, by parameter."""
    agreed: bytes | None = None
    """Parameters that got a gradient on any rank, once that is known."""
    words: Sequence[Word] = ()
    """The words of the last rows."""
    own: list[torch.Tensor] = field(default_factory=list)
    """Squared norm of each bucket before the sum, if it is measured."""
    is_measured: bool = True
    """All gradients were in a bucket when it was measured. Late ones are in none."""
    losses: Losses | None = None
    """The losses, if rows do not have them."""


class DataParallel:
    """The strategy of reduction="fast", with and without model groups."""

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
        """`inner` is this process's index in its model group. `measures` asks for squared norms of gradients before and after the
        sum. Raises UsageError for a model without anything to train, and for a hook or uneven shares in a model group."""
        self._layout = plan.layout
        self.guarantees = Guarantees(same_bits_at_any_size=False, survivor_has_all=self._layout.size == 1)
        places = {name: place_of(name, one, self._layout, inner) for name, one in model.named_parameters()}
        self._gradients = Gradients(model, self._filled, places if self._layout.size > 1 else None)
        devices = [bucket.flat.device for bucket in self._gradients.buckets]
        self._device = devices[0]
        self._streams = Streams(self._device)
        self._hook = make_hook(described)
        if self._layout.size > 1 and (type(self._hook) is not Plain or described.uneven):
            raise UsageError(f"{described} does not work with regroup.mesh() so far. Leave one of them out.")
        if isinstance(self._hook, LowRank):
            self.guarantees = replace(self.guarantees, lost_with_a_rank="what its gradients still owe (error feedback)")
        self._buffers = Buffers(model)
        self._runs_ahead = (
            all(engine_of(device) is not None for device in devices)
            and self._layout.size == 1
            and self._buffers.are_none
            and not (measures or described.uneven)
        )
        """Rows leave before the device has ended backward: losses and the parameters' hash come after them (adr/0074)."""
        is_group = self._layout.size > 1
        self.equal = Equal(model, optimizer, self._buffers, places if is_group else None, is_late=self._runs_ahead)
        self._model, self._plan = model, plan
        fsdp.sum_gradients(model)
        self._order = fsdp.Order(model)
        self._groups: Groups | None = None
        """None where no other rank is there."""
        self._among: dict[frozenset[str], Groups | Part] = {}
        """The ranks that sum a bucket, with `Place.along` as key."""
        self._norm = math.nan
        """Norm of the gradients of the whole model, after `scale`."""
        self._known_norm: float | None = None
        """Norm of the step that was put back."""
        self._step = 0
        self._upcoming: int | None = None
        """Number of the step that begins next; None: it is not known in a generation's first one."""
        self._idle = bytearray(len(self._gradients.parameters))
        """Number of steps in a row in which no rank had a gradient, parameter by parameter."""
        self._in_parcel = False
        """Gradients are so small that they travel with the rows."""
        self.measures = measures
        self._sums = _Sums()

    @property
    def gradients(self) -> Gradients:
        """The gradients that it sums."""
        return self._gradients

    def begin_generation(self, groups: Groups | None, *, replaced: bool = False) -> None:
        """Learn anew which buffers change and which parameters are idle: joining ranks do not know it."""
        if replaced:
            self._hook.forget()
        self._groups = groups if groups is not None and groups.world_size > 1 else None
        if self._groups is not None:
            alongs = {self._layout.summed_dims, *(bucket.place.along for bucket in self._gradients.buckets)}
            self._among = {along: self._part(self._groups, along) for along in alongs}
        self._hook.begin_generation(self._groups)
        self._upcoming = None
        self.equal.begin_generation()
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

    def begin_step(self) -> None:
        """Zero the gradients and keep the buffers' values. Drops the sums of a step that was cut off."""
        if self._sums.works:
            self._drop_sums()
        self._sums = _Sums()
        self._gradients.begin()
        self._streams.begin()
        self._hook.begin_step()
        if self._layout.size > 1:
            # A forward without a backward (an evaluation) leaves parameters gathered. On some ranks of a group only, where others
            # are new or have been asked for their state since: a rank would skip a gather that the others begin.
            fsdp.begin_anew(self._model)
        self._order.hash = 0
        self._buffers.keep()

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one microbatch. In the last one, buckets are sent as autograd fills them."""
        self._before_backward(last=last)
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    def run_backward(
        self, run: Callable[[], Any], parameters: Sequence[torch.nn.Parameter] = (), *, last: bool = False
    ) -> None:
        """Call `run`, a piece of the backward pass of a pipeline's stage. Called in a model group only.

        `parameters` are those that got more of their gradient in it without autograd. `last`: no other piece of this rank follows.
        """
        self._before_backward(last=last)
        run()
        self._gradients.mark_parameters(parameters)

    def added(self, v: int, weight: float | torch.Tensor) -> None:
        """Do nothing: gradients are weighted by the loss."""

    def reduce(self, share: Share, agree: Agree) -> Reduced:
        """Sum the buckets, beside the rows except in a model group. There the rows come after the sums (rule REDUCED): a row
        says that this rank's reductions are complete."""
        self._launch(share)
        if self._layout.size > 1:
            self._wait()
            agreed = agree(self._asked(), self._word)
        else:
            agreed = agree(self._asked(), self._word, self._wait, self._parcel())
            if agreed.parcels is not None:
                self._unpack(agreed.parcels)
        agreed = settled(agreed, self._settle, lambda: agree(self._asked(), self._word))
        weight, losses = agreed.weight, self._sums.losses
        loss = agreed.loss_sum / weight if losses is None else losses.mean(weight)
        return Reduced(loss, weight, self._norm_squared())

    def scale(self, weight: float) -> None:
        """Divide the sums by the step's weight. Parameters that no rank has used have no gradient then."""
        assert self._sums.agreed is not None
        self._hook.commit(self._sums.agreed)
        self._upcoming = self._step + 1
        self._gradients.scale(weight, self._sums.agreed)
        if self._known_norm is not None:
            self._norm, self._known_norm = self._known_norm, None
        elif self._groups is not None and self._layout.size > 1:
            # All groups have the same sums: those of the first one are enough.
            squares = [word.norm_squared for word in self._sums.words[: self._layout.size]]
            self._norm = math.sqrt(sum(squares)) / weight
        if 0 in self._sums.agreed or any(self._idle):
            self._idle = bytearray(
                0 if used else min(idle + 1, 255) for used, idle in zip(self._sums.agreed, self._idle)
            )

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the norm and return it. In a model group it follows from the rows: nothing communicates after them (rule LOCAL)."""
        if self._layout.size == 1:
            return self._gradients.clip(max_norm)
        norm = torch.tensor(self._norm, dtype=torch.float64)
        self._gradients.multiply(float(torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)))
        return norm

    def take(self) -> Any:
        """Give away all that was summed, for `put_back`: the rows of the step did not come. Called in a model group only.

        Nothing changes what was taken any more: the gradients get other memory.
        """
        flats = [bucket.flat for bucket in self._gradients.buckets]
        for bucket in self._gradients.buckets:
            bucket.renew()
            bucket.attach()  # a zero_grad() of the script must not reach what is taken
        assert self._sums.agreed is not None
        return flats, self._sums.agreed, self._buffers.now()

    def put_back(self, taken: Any, norm: float | None) -> None:
        """Take the sums of `take` for the gradients: `scale` and `clip` of their step come next. Called in a model group only.

        `norm` is the one that `clip` returned on a rank that has applied the step; None: it did not clip.
        """
        flats, agreed, buffers = taken
        self._drop_sums()  # of a later generation, which was cut off
        self._sums = _Sums(agreed=agreed)
        for bucket, flat in zip(self._gradients.buckets, flats):
            bucket.flat.copy_(flat)
            bucket.attach()
        self._buffers.set(buffers)
        self._known_norm = norm

    def undo(self) -> None:
        """Put the buffers back, and split again the parameters that a forward has gathered."""
        fsdp.begin_anew(self._model)
        self._buffers.restore()

    def close(self) -> None:
        """Take the hooks off the model."""
        self._order.close()
        self._gradients.close()

    # --- sending -----------------------------------------------------------------------------------------------------

    def _before_backward(self, *, last: bool) -> None:
        self._gradients.check_kept(self._gradients.buckets)
        knows = self._upcoming is not None or not self._hook.needs_step
        if last and self._groups is not None and not self._in_parcel and knows:
            self._sums.is_armed = True
            self._sums.open = [
                {index for index in bucket.indices if self._idle[index] < IDLE_STEPS}
                for bucket in self._gradients.buckets
            ]
        self._gradients.watch()

    def _filled(self, bucket: Bucket, index: int) -> None:
        """Send buckets in turn: a parameter's gradient is complete, or more of it has come."""
        if not self._sums.is_armed:
            return
        buckets = self._gradients.buckets
        self._streams.note()
        self._sums.open[bucket.number].discard(index)
        # In one order on every rank, whatever order autograd takes: collectives must match.
        while self._sums.num_sent < len(buckets) and not self._sums.open[self._sums.num_sent]:
            self._send(buckets[self._sums.num_sent])

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
                self._sums.works.append(self._hook.send(among, bucket, step))
        self._sums.num_sent += 1

    def _launch(self, share: Share) -> None:
        """Start every sum that the last backward has not started: buckets, buffers and losses."""
        self._sums.is_armed, self._step = False, share.index
        self._upcoming = share.index
        buckets = self._gradients.buckets
        self._gradients.check_kept(buckets[self._sums.num_sent :])
        if self._groups is None or self._in_parcel:
            for bucket in buckets:
                self._gradients.collect(bucket)
                self._measure(bucket)
                self._hook.alone(bucket)
        else:
            self._note_late(buckets[: self._sums.num_sent])
            while self._sums.num_sent < len(buckets):
                self._send(buckets[self._sums.num_sent])
        self._buffers.launch()
        if self._runs_ahead:
            self._sums.losses = Losses(self._groups, share.take_losses(self._device))
            self._sums.works += self._sums.losses.sent

    def _note_late(self, sent: Sequence[Bucket]) -> None:
        """Note the gradients that came after their bucket was sent."""
        for bucket in sent:
            for index, parameter in zip(bucket.indices, bucket.parameters):
                if parameter.grad is not None:
                    self._sums.late[index] = dense(parameter.grad)
                    self._gradients.mark_used(index)

    def _parcel(self) -> torch.Tensor | None:
        """Return the gradients as bytes that travel with the row: [bytes]. None: they have collectives of their own."""
        if not self._in_parcel:
            return None
        return torch.cat([_padded(bucket.flat) for bucket in self._gradients.buckets])

    def _unpack(self, parcels: torch.Tensor) -> None:
        """Add up the parcels, [ranks, bytes], in rank order, so that the sum has the same bits on all ranks."""
        low = 0
        for bucket in self._gradients.buckets:
            size = bucket.flat.numel() * bucket.flat.element_size()
            parts = [parcel[low : low + size].view(bucket.flat.dtype) for parcel in parcels]
            bucket.flat.copy_(parts[0])
            for part in parts[1:]:
                bucket.flat.add_(part)
            low += -(-size // _ALIGN) * _ALIGN

    def _wait(self) -> None:
        """Wait until everything is summed."""
        if self._groups is None:
            return
        pending = [*self._sums.works, *self._buffers.sent]
        if self._layout.size > 1:
            self._groups.wait_all(pending)  # with what was summed inside the group: rule REDUCED
        elif pending:  # together: each wait is one of the host for the device
            self._groups.wait(pending)
        if self._sums.num_sent:
            self._sums.works, self._sums.num_sent = [], 0
            self._hook.finish(self._groups)
            for bucket in self._gradients.buckets:
                bucket.attach()
            if self._layout.size > 1:
                self._sums.agreed = self._gradients.used_anywhere()
        self._buffers.average(self._ran())

    def _drop_sums(self) -> None:
        """Give up sums that were not waited for to the end, and take new memory for the buckets. A thread or a GPU of a group that
        has ended may still write into the old."""
        self._sums.works = []
        for bucket in self._gradients.buckets:
            bucket.renew()

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def _asked(self) -> list[list[Scalar]]:
        """Return the scalars that `_word` needs, in three lists."""
        if self._groups is None:
            return [[], [], []]
        own = [bits_of(_sum(self._sums.own))] if self.measures else []
        return [own, [self._squared_norm()] if self._layout.size > 1 else [], self._buffers.ask()]

    def _word(self, own: Sequence[int], norm: Sequence[int], changed: Sequence[int]) -> Word:
        if self._groups is None:
            return Word()
        used = self._gradients.used if self._sums.agreed is None else self._sums.agreed
        return Word(
            unused=0 if self._layout.size > 1 else hash_of(used),
            late=bool(self._sums.late),
            changed=any(changed),
            norm_squared=float_of(norm[0]) if norm else 0.0,
            own_norm_squared=float_of(own[0]) if own else -1.0,
            order=self._order.hash,
        )

    def _settle(self, words: Sequence[Word]) -> bool:
        """Do what the words of all ranks ask for. Returns True if something was exchanged: then rows are gathered again."""
        if self._groups is None:
            self._sums.agreed = self._gradients.used
            return False
        self._sums.words = words
        exchanged = False
        if any(word.late for word in words):
            self._sum_late(self._groups)
            exchanged = True
        if any(word.changed for word in words):
            self._buffers.average_changed(self._ran())
            exchanged = True
        return self._settle_used(self._groups, {word.unused for word in words}) or exchanged

    def _settle_used(self, groups: Groups, unused: set[int]) -> bool:
        """Agree on the parameters that any rank has used. Returns True if they had to be gathered."""
        if 0 in unused:
            if self._layout.size == 1:  # one rank at least has used all; in a model group the set came with the sums
                self._sums.agreed = bytes([1]) * len(self._gradients.parameters)
        elif len(unused) > 1:
            self._sums.agreed = gathered_any(groups, self._gradients.used)
            return True
        elif self._sums.agreed is None:
            self._sums.agreed = self._gradients.used
        return False

    def _sum_late(self, groups: Groups) -> None:
        """Sum what came late on any rank, a bucket's together. Raises UsageError in a model group."""
        if self._layout.size > 1:
            raise UsageError(
                "A gradient came after its sum over the model groups had begun: a layer was computed again in backward, or "
                "there was a second backward. Use checkpoint(..., use_reentrant=False), and call step.backward() once for each "
                "batch."
            )
        mine = bytearray(len(self._gradients.parameters))
        for index in self._sums.late:
            mine[index] = 1
        any_late = gathered_any(groups, bytes(mine))
        for bucket in self._gradients.buckets:
            late = [(index, view) for index, view in zip(bucket.indices, bucket.views) if any_late[index]]
            if not late:
                continue
            parts = [
                self._sums.late[index] if index in self._sums.late else torch.zeros_like(view) for index, view in late
            ]
            flat = torch.cat([part.reshape(-1) for part in parts])
            groups.wait([launch_sum(groups, flat)])
            low = 0
            for _, view in late:
                view.add_(flat[low : low + view.numel()].view_as(view))
                low += view.numel()
        self._sums.late, self._sums.is_measured = {}, False

    # --- norms and places --------------------------------------------------------------------------------------------

    def _measure(self, bucket: Bucket) -> None:
        if self.measures and self._groups is not None:
            self._sums.own.append(squared_norm(bucket.flat))

    def _norm_squared(self) -> Scalar | None:
        """Return the squared norm of the sum over all ranks, as its bits; None: it is not measured in this step."""
        if not self.measures or self._groups is None or not self._sums.is_measured:
            return None
        return bits_of(_sum([squared_norm(bucket.flat) for bucket in self._gradients.buckets]))

    def _squared_norm(self) -> Scalar:
        """Return the squared norm of this rank's part of a model group's gradients, as its bits."""
        total = torch.zeros((), dtype=torch.float64)
        for bucket in self._gradients.buckets:
            if bucket.place.counts:
                norm = torch.linalg.vector_norm(bucket.values, dtype=torch.float64)
                total = total.to(norm.device) + norm * norm
        return bits_of(total)

    @property
    def _alike(self) -> Groups | Part:
        """The ranks with the same parameters, or the same part of them, that compute different samples or tokens."""
        return self._among[self._layout.summed_dims]

    def _part(self, groups: Groups, along: frozenset[str]) -> Groups | Part:
        return groups if self._layout.size == 1 else groups.part(self._layout.part_name(along))

    def _ran(self) -> list[int]:
        """Return the places among `_alike` of those ranks that have a share of the step."""
        assert self._groups is not None
        shares = self._plan.shares(self._groups.world_size)
        ranks = self._alike.ranks if isinstance(self._alike, Part) else range(self._groups.world_size)
        return [place for place, rank in enumerate(ranks) if shares[rank]]


def make_hook(described: strategies.DataParallel) -> Hook:
    """Return the hook that sums the buckets."""
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


def gathered_any(groups: Groups | Part, mine: bytes) -> bytes:
    """Return for each place whether any rank has a 1 there. Every rank calls it. Raises what `Groups.failed` says."""
    rows = Rows(groups, torch.frombuffer(bytearray(mine), dtype=torch.uint8)).wait()
    return bytes(rows.amax(0).tolist())
