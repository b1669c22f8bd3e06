"""The model's buffers (BatchNorm's running statistics): kept for a redo, made equal across ranks at each commit.

Forward changes them on each rank by its own share, and a redo would change them twice. So they are copied when a step
begins, restored when it is interrupted, and averaged over the ranks that ran forward before it commits (integers: the largest).
"""

import torch

from regroup.generation.groups import Groups


class Buffers:
    """All buffers of one model. A model without any costs nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """A step begins: remember the values."""
        self._kept = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    def restore(self) -> None:
        """The step was interrupted: as if it had not begun."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if name in self._kept:
                    buffer.copy_(self._kept[name])

    def changed(self) -> bool:
        """Return whether forward changed any on this rank."""
        return self.name_of_changed() is not None

    def name_of_changed(self) -> str | None:
        """Return the name of the first that forward changed, or None."""
        for name, buffer in self._model.named_buffers():
            kept = self._kept.get(name)
            if kept is not None and not torch.equal(_bytes(kept), _bytes(buffer)):
                return name
        return None

    def average(self, groups: Groups | None, ran: list[int], *, exact: bool) -> None:
        """Make all ranks' values equal. Every rank calls it when any rank's have changed. Raises what `Groups.failed` says.

        ran: the ranks whose share is not empty. The others' values are those from before the step, and count for nothing.
        """
        if groups is None or groups.world_size == 1 or exact:
            return
        with torch.no_grad():
            for _, buffer in sorted(self._model.named_buffers()):
                whole = not (buffer.is_floating_point() or buffer.is_complex())
                gathered = torch.empty((groups.world_size, *buffer.shape), dtype=buffer.dtype, device=buffer.device)
                # Gathered and reduced in rank order here, so that the result has the same bits everywhere. As bytes: a backend
                # knows only some types.
                groups.wait([groups.launch("_allgather_base", _bytes(gathered), _bytes(buffer))])
                values = gathered if len(ran) == groups.world_size else gathered[ran]
                # Torch reduces neither unsigned integers nor floats of one byte.
                if whole:
                    buffer.copy_(values.to(torch.int64).amax(0))
                else:
                    buffer.copy_((values.float() if buffer.itemsize == 1 else values).mean(0))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes; of a contiguous one they are a view."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
