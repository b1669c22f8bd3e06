"""The files of the memory snapshot: two slots in a directory in memory, each complete or absent.

Owns files, layout and descriptions (`regroup.protocol.snapshot`): JSON and raw bytes, never pickle. One process of a worker
writes, from one thread at a time. `memory` decides when a state is copied and when it is read.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regroup.checkpoint import tree as trees
from regroup.checkpoint.errors import CheckpointError
from regroup.errors import StateError
from regroup.protocol import snapshot as protocol
from regroup.protocol.snapshot import SLOTS, Snapshot

_MIB = 1 << 20
_DESCRIPTIONS = 4
"""Room for descriptions, in structures. Quotes in one are escaped, and the new one lies beside the old one for a moment."""
_A_TENSOR_BYTES = 100
"""Room for name, type and shape of a tensor in a description."""


class SnapshotError(Exception):
    """A snapshot cannot be taken. The text is one sentence."""


class UnusableError(StateError):
    """A snapshot is damaged or of another model. No process of this script will ever be able to load it."""


@dataclass
class Writing:
    """A slot that is being filled. It counts as absent until `Slots.complete`."""

    slot: str
    structure: str
    places: dict[str, torch.Tensor]
    """Memory of the slot for each tensor by name, in the tensor's shape and type."""


class Slots:
    """The slots of one process. `place` names its part of a split model; snapshots of another part are ignored."""

    def __init__(
        self, directory: Path, job_uid: str, limit_bytes: int = 0, *, processes: int = 1, place: str = ""
    ) -> None:
        """`limit_bytes` bounds the slots of all `processes` of the worker that have some; 0: only the directory has a limit."""
        self._directory, self._job_uid, self._limit_bytes = directory, job_uid, limit_bytes
        self._processes, self._place = processes, place
        self._mapped: dict[str, torch.Tensor] = {}
        self.held: list[Snapshot] = []
        """The complete snapshots, the newest first."""
        self.look()

    @property
    def newest(self) -> Snapshot | None:
        """Newest complete snapshot, or None."""
        return self.held[0] if self.held else None

    def look(self) -> None:
        """Read the descriptions again. Another process of the worker may have written one."""
        held = protocol.held(self._directory, self._job_uid)
        self.held = [one for one in held if one.description.get("place", "") == self._place]

    def begin(self, structure: str, tensors: Mapping[str, torch.Tensor], keep_step: int | None = None) -> Writing:
        """Return room for these tensors, in the slot without the snapshot that must stay. Raises SnapshotError.

        The snapshot of step `keep_step` stays, or the newest one if there is none of that step.
        """
        kept = next((one for one in self.held if one.state.step == keep_step), self.newest)
        slot = next(name for name in SLOTS if kept is None or name != kept.slot)
        offsets, total = trees.layout([tensor.nbytes for tensor in tensors.values()])
        needed = 2 * self._processes * (total + _DESCRIPTIONS * (len(structure) + len(tensors) * _A_TENSOR_BYTES))
        if 0 < self._limit_bytes < needed:
            raise SnapshotError(
                f"The memory snapshot needs {_mib(needed)} MiB (two copies of the state), and "
                f"spec.memorySnapshot.sizeLimit is {self._limit_bytes / _MIB:.3g} MiB. Raise it to at least {_mib(needed)}Mi."
            )
        try:
            self._directory.mkdir(exist_ok=True)
            protocol.description_path(self._directory, slot).unlink(missing_ok=True)
            self.held = [one for one in self.held if one.slot != slot]
            memory = self._map(slot, total)
        except OSError as error:
            raise SnapshotError(
                f"The memory snapshot cannot be written to {self._directory}: {error.strerror or error}. It needs "
                f"{_mib(needed)} MiB there (two copies of the state). Check spec.memorySnapshot.sizeLimit and the directory."
            ) from error
        places = {
            name: memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), offset in zip(tensors.items(), offsets)
        }
        return Writing(slot, structure, places)

    def complete(self, writing: Writing, *, state: Sequence[int], adopted: int, is_last: bool, **said: Any) -> None:
        """Make a slot with all its bytes the newest snapshot. `said` goes into its description. Raises SnapshotError."""
        tensors = [
            [name, str(place.dtype).removeprefix("torch."), list(place.shape)] for name, place in writing.places.items()
        ]
        data = {
            "version": protocol.VERSION,
            "job": self._job_uid,
            "place": self._place,
            "state": list(state),
            "adopted": adopted,
            "is_last": is_last,
            "structure": writing.structure,
            "tensors": tensors,
            "said": said,
        }
        path = protocol.description_path(self._directory, writing.slot)
        aside = path.with_suffix(".new")
        try:
            aside.write_text(json.dumps(data), encoding="utf-8")
            aside.rename(path)
        except OSError as error:
            raise SnapshotError(
                f"The memory snapshot's description cannot be written to {path}: {error.strerror or error}. Check "
                "spec.memorySnapshot.sizeLimit and the directory."
            ) from error
        self.look()

    def load(self, snapshot: Snapshot) -> trees.Tree:
        """Return the tree of a complete snapshot, in memory of its own.

        Raises UnusableError if the snapshot is damaged, and StateError if it cannot be read at the moment.
        """
        described = snapshot.description
        try:
            shapes = [(name, getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in described["tensors"]]
            if not all(isinstance(dtype, torch.dtype) for _, dtype, _ in shapes):
                raise ValueError("a tensor has an unknown type")
            sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in shapes]
            offsets, total = trees.layout(sizes)
            memory = self._map(snapshot.slot, total, is_new=False)
            tensors = {
                name: memory[offset : offset + size].view(dtype).view(shape).clone()
                for (name, dtype, shape), offset, size in zip(shapes, offsets, sizes)
            }
            return trees.unpack(described["structure"], tensors)
        except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
            raise UnusableError(f"The memory snapshot of step {snapshot.state.step} is damaged: {error}.") from error
        except (OSError, RuntimeError) as error:
            raise StateError(f"The memory snapshot of step {snapshot.state.step} cannot be read: {error}.") from error

    def discard(self, snapshot: Snapshot) -> None:
        """Remove a snapshot. The other one becomes the newest if it is complete."""
        with contextlib.suppress(OSError):
            protocol.description_path(self._directory, snapshot.slot).unlink(missing_ok=True)
        self.look()

    def _map(self, slot: str, total: int, *, is_new: bool = True) -> torch.Tensor:
        """Return the bytes of a slot. They stay mapped, because fresh pages cost more than the copy. Raises OSError."""
        known = self._mapped.get(slot)
        if known is not None and known.numel() == total:
            return known
        self._mapped.pop(slot, None)
        fd = os.open(protocol.data_path(self._directory, slot), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if is_new:
                os.ftruncate(fd, total)
                if total:
                    os.posix_fallocate(fd, 0, total)  # without room a write to the mapped memory would kill the process
            elif os.fstat(fd).st_size < total:
                raise ValueError(f"it has {os.fstat(fd).st_size} bytes and should have {total}")
            if total == 0:
                return torch.empty(0, dtype=torch.uint8)
            mapped = torch.frombuffer(mmap.mmap(fd, total), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._mapped[slot] = mapped
        return mapped


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // _MIB)
