"""The model's persistent buffers (BatchNorm's running statistics): kept for a redo, made equal across ranks at each commit.

Forward changes them on each rank by its own share, and a redo would change them twice. So they are copied when a step begins and
put back when it is interrupted. Before a commit they are averaged over the ranks that ran forward (integers: the largest).
Those that forward changed once are averaged in every step of the generation, together. Buffers with `persistent=False` are
caches: they are in no state_dict, so nobody else gets them, and they are left alone.
"""

from collections.abc import Mapping, Sequence

import torch

from regroup.errors import UsageError
from regroup.generation.groups import Groups, Part, Pending
from regroup.generation.rows import Rows

from .host import Scalar, to_host


class Buffers:
    """All persistent buffers of one model, by name. A model without any costs nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._at = _places(model)
        self._kept: dict[str, torch.Tensor] = {}
        self._live: list[str] = []
        """Forward has changed these on some rank in this generation, so every rank averages them. In one order on all ranks."""
        self._groups: Groups | Part | None = None
        self._looked = False
        """Buffers that the script has added were looked for in this generation."""
        self._sent: tuple[Pending, torch.Tensor] | None = None

    @property
    def are_none(self) -> bool:
        """True if the model has no persistent buffer."""
        return not self._at

    def begin_generation(self, groups: Groups | Part | None) -> None:
        """Forget which buffers forward changes: that is learned with the new ranks."""
        self._groups = groups if groups is not None and groups.world_size > 1 else None
        self._live, self._looked = [], False

    def keep(self) -> None:
        """Remember the values: a step begins."""
        self._sent = None
        self._kept = {name: self._now(name).detach().clone() for name in self._at}

    @property
    def kept(self) -> list[torch.Tensor]:
        """The values from before the step, equal on all ranks, in the order of their names."""
        return [self._kept[name] for name in sorted(self._kept)]

    def now(self) -> dict[str, torch.Tensor]:
        """Return copies of the values as they are, averaged or not."""
        return {name: self._now(name).detach().clone() for name in self._at}

    def set(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give them the values of `now`."""
        with torch.no_grad():
            for name, value in values.items():
                self._now(name).copy_(value)

    def restore(self) -> None:
        """Put the values back: the step was interrupted, as if it had not begun."""
        with torch.no_grad():
            for name, (module, key) in self._at.items():
                buffer = module._buffers[key]
                if buffer is not None and buffer.shape == self._kept[name].shape:
                    buffer.copy_(self._kept[name])

    def ask(self) -> list[Scalar]:
        """Return for each that is not averaged in each step whether forward changed it on this rank: 1, or 0.

        Raises what `check_shapes` does: values of two shapes cannot be compared on a GPU.
        """
        self.check_shapes()
        return [_differs(self._kept[name], self._now(name)) for name in self._at if name not in self._live]

    def changed(self) -> list[str]:
        """Return the names of those that forward changed on this rank and that are not averaged in each step.

        Waits for the device. Raises what `check_shapes` does.
        """
        names = [name for name in self._at if name not in self._live]
        return [name for name, differs in zip(names, to_host(self.ask())) if differs]

    def launch(self) -> None:
        """Start to gather those that are averaged in each step. Raises what `Groups.failed` says."""
        if self._groups is not None and self._live:
            self._sent = self._gather(self._live)

    @property
    def sent(self) -> list[Pending]:
        """The gather that `launch` started. It has to be waited for before `average`."""
        return [self._sent[0]] if self._sent is not None else []

    def average(self, ran: Sequence[int]) -> None:
        """Average what `launch` gathered. `ran`: the ranks whose share is not empty; the others' values are those from before
        the step, and count for nothing."""
        if self._sent is not None:
            (_, gathered), self._sent = self._sent, None
            self._average(self._live, gathered, ran)

    def average_changed(self, ran: Sequence[int]) -> None:
        """Average also what forward changed on any rank for the first time, now and in every further step of the
        generation. Every rank calls it. Raises what `Groups.failed` says.

        In a model group there may be nobody to average with, and another stage of a pipeline may have none that changed."""
        names = sorted(set(self._at) - set(self._live))
        changed = set(self.changed())
        if self._groups is None or not names:
            self._live += [name for name in names if name in changed]
            return
        mine = torch.zeros(len(names), dtype=torch.uint8)
        for i, name in enumerate(names):
            mine[i] = name in changed
        theirs = Rows(self._groups, mine).wait()
        new = [name for name, any_ in zip(names, theirs.amax(0).tolist()) if any_]
        if not new:
            return
        pending, gathered = self._gather(new)
        self._groups.wait([pending])
        self._average(new, gathered, ran)
        self._live += new

    def _gather(self, names: list[str]) -> tuple[Pending, torch.Tensor]:
        # As bytes: a backend knows only some types.
        assert self._groups is not None
        with torch.no_grad():
            flats = [torch.cat([one.resolve_conj().reshape(-1) for one in alike]) for alike in self._alike(names)]
            mine = torch.cat([flat.view(torch.uint8).to(self._groups.device) for flat in flats])
        gathered = torch.empty((self._groups.world_size, len(mine)), dtype=torch.uint8, device=mine.device)
        return self._groups.launch("_allgather_base", gathered.view(-1), mine), gathered

    def _average(self, names: list[str], gathered: torch.Tensor, ran: Sequence[int]) -> None:
        # Reduced in rank order here, so that the result has the same bits everywhere; and all buffers of one type together,
        # because a ResNet-50 has 159 of them: each by itself, from each of 64 ranks, took 51,421 operations a step.
        low = 0
        with torch.no_grad():
            values = torch.stack([gathered[rank] for rank in ran])
            for buffers in self._alike(names):
                dtype, sizes = buffers[0].dtype, [buffer.numel() for buffer in buffers]
                high = low + sum(sizes) * dtype.itemsize
                rows = values[:, low:high].clone(memory_format=torch.contiguous_format).view(dtype)
                low = high
                # Torch reduces neither unsigned integers nor floats of one byte.
                if not (dtype.is_floating_point or dtype.is_complex):
                    mean = rows.to(torch.int64).amax(0)
                else:
                    mean = (rows.float() if dtype.itemsize == 1 else rows).mean(0)
                parts = torch.split(mean.to(buffers[0].device, dtype), sizes)
                for buffer, part in zip(buffers, parts):
                    buffer.copy_(part.view(buffer.shape))

    def _alike(self, names: list[str]) -> list[list[torch.Tensor]]:
        """Return the buffers of these names by type and device: lists in one order on all ranks."""
        lists: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for name in names:
            buffer = self._now(name)
            lists.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        return list(lists.values())

    def _now(self, name: str) -> torch.Tensor:
        module, key = self._at[name]
        buffer = module._buffers[key]
        if buffer is None:
            raise UsageError(f"Buffer {name} was set to None in a step. Keep it a tensor: it is a part of the state.")
        return buffer

    def check_shapes(self) -> None:
        """Raise UsageError for one that has another shape than before the step, or that was not there: a copy would not fit."""
        names = self._at.keys()
        if not self._looked:  # once in a generation is often enough to see what is new
            self._looked, names = True, _places(self._model).keys()
        for name in names:
            kept = self._kept.get(name)
            if kept is None or kept.shape != self._now(name).shape:
                became = (
                    "was made"
                    if kept is None
                    else f"went from shape {list(kept.shape)} to {list(self._now(name).shape)}"
                )
                raise UsageError(
                    f"Buffer {name} {became} in a step, and is a part of the state: a worker that joins could not load it. "
                    "Create it in __init__ with its final shape, or register it with persistent=False if it is a cache."
                )


def _places(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the module and the name in it of each persistent buffer, by its full name."""
    return {
        f"{prefix}.{key}" if prefix else key: (module, key)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def _differs(before: torch.Tensor, now: torch.Tensor) -> Scalar:
    """Return whether the bits differ: 1, or 0."""
    before, now = _bytes(before), _bytes(now)
    if now.device.type == "cpu":
        return int(not torch.equal(before, now))
    return (before != now).any().to(torch.int64)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes; of a contiguous one they are a view."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
