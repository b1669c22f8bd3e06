"""Copies a state from its device to host memory, while training goes on.

Memory snapshots (`regroup.state.memory`) and checkpoints (`checkpointer`) both copy through here. This module owns the pinned
buffers and the stream of a GPU's copies. A wait keeps a commit from changing tensors that are being read. The reasons
for buffers of a fixed size, and against a copy on the device, are in docs/design/adr/0073.

The main thread calls `Staging.start` after a commit, and `Staging.settle` before the next change of the state. Another thread calls
`Copy.fill` in between. The model's buffers, which a forward may change, are copied in `start`. Everything else is read in `fill`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from .shards import local_of
from .tree import aligned

BUFFER_BYTES = 32 << 20
"""Size of a pinned buffer. Tensors in host memory are copied in pieces of this size, between which other threads can run."""
NUM_BUFFERS = 2
"""Number of pinned buffers: the device fills one while the host empties the other."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor to read, and host memory of the same shape and dtype to write to."""
Room = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Function that returns host memory by name for tensors of these shapes and dtypes."""


class Engine(Protocol):
    """The operations of a device by which `Copy` reads from it asynchronously. Tests use one that records its calls."""

    def mark(self) -> Any:
        """Return a mark behind all work that is enqueued on the current stream."""
        ...

    def behind(self, mark: Any) -> AbstractContextManager[None]:
        """Return a block in which the current stream is the engine's own. That stream waits for the mark."""
        ...

    def wait(self, mark: Any) -> None:
        """Block this thread until all work before the mark is done."""
        ...

    def buffers(self) -> Sequence[torch.Tensor]:
        """Return the pinned buffers, [BUFFER_BYTES] uint8 each. They are allocated at the first copy."""
        ...


class Cuda:
    """The engine of a GPU. Its copies run on a stream of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[torch.Tensor] = []

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def behind(self, mark: torch.cuda.Event) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def buffers(self) -> Sequence[torch.Tensor]:
        while len(self._buffers) < NUM_BUFFERS:
            self._buffers.append(torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True))
        return self._buffers


def engine_of(device: torch.device) -> Engine | None:
    """Return the engine of a device. None if the copying thread reads its tensors itself, as on a CPU."""
    return Cuda(device) if device.type == "cuda" else None


class Staging:
    """The copies of one process's state. The main thread calls all methods."""

    def __init__(
        self,
        changing: Callable[[], Iterable[torch.Tensor]] = tuple,
        make_engine: Callable[[torch.device], Engine | None] = engine_of,
    ) -> None:
        """Take `changing()`, which returns the tensors that may change between two commits."""
        self._changing, self._make_engine = changing, make_engine
        self._engines: dict[torch.device, Engine | None] = {}
        self._turn = threading.Lock()
        """Lock by which copies go through the buffers one after the other."""
        self._begun: list[Copy] = []
        """Copies that may still read the state. `settle` clears the list."""

    def start(self, tensors: Mapping[str, torch.Tensor], *, changes: bool = True) -> "Copy":
        """Return a copy of these tensors as they are now. A thread must `fill` or `abandon` it, since `settle` waits for that.

        Tensors that change between two commits are cloned at once, unless `changes` is False: this process has ended training.
        """
        # A sparse buffer has no memory of its own. It is in no copy (persistent=False).
        changing = (
            {local_of(one).data_ptr() for one in self._changing() if one.layout == torch.strided} if changes else set()
        )
        tensors = {name: one.clone() if one.data_ptr() in changing else one for name, one in tensors.items()}
        for device in {tensor.device for tensor in tensors.values()} - self._engines.keys():
            self._engines[device] = self._make_engine(device)
        copy = Copy(tensors, self._engines, self._turn)
        self._begun = [*(one for one in self._begun if not one.is_read), copy]
        return copy

    def settle(self) -> None:
        """Wait until no copy reads the state any more. Called before any part of the state is changed.

        Each wait ends when the copying thread has read everything or has failed. Until then it only makes room in host memory, and
        does not depend on a volume of checkpoints.
        """
        for copy in self._begun:
            copy.wait_read()
        self._begun.clear()


class Copy:
    """One copy of a state. The tensors stay alive until they have been read."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], engines: Mapping[torch.device, Engine | None], turn: threading.Lock
    ) -> None:
        self._tensors, self._turn = dict(tensors), turn
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}
        self._engines = {device: engines[device] for device in {one.device for one in tensors.values()}}
        self._marks = {device: one.mark() for device, one in self._engines.items() if one is not None}
        self._read = threading.Event()
        self.changed: str | None = None
        """Name of a tensor that was changed during `fill`, so that the copy is of no state; None: there is none."""
        self.waited_s = 0.0
        """Seconds for which the main thread has waited for this copy."""

    @property
    def is_read(self) -> bool:
        """True once the copy does not read the state any more."""
        return self._read.is_set()

    def wait_read(self) -> None:
        """Wait until the copy does not read the state any more."""
        began_s = time.monotonic()
        self._read.wait()
        self.waited_s += time.monotonic() - began_s

    def fill(self, room: Room) -> None:
        """Copy the tensors into the memory that `room` returns. Raises exceptions of `room`, and of torch for a failed device."""
        try:
            places = room(self._tensors)
            with self._turn:
                for device, engine in self._engines.items():
                    pairs = [(one, places[name]) for name, one in self._tensors.items() if one.device == device]
                    if engine is None:
                        for tensor, place in pieces(pairs, BUFFER_BYTES):
                            place.copy_(tensor)
                    else:
                        _through(engine, self._marks[device], pairs)
            self.changed = next(
                (name for name, tensor in self._tensors.items() if _version(tensor) != self._versions[name]), None
            )
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the state without reading it. Called if the copying thread could not be started."""
        self._tensors = {}
        self._read.set()


def _through(engine: Engine, mark: Any, pairs: Iterable[Pair]) -> None:
    """Copy from a device through its pinned buffers. Returns once all bytes have arrived."""
    full: deque[tuple[Any, list[Pair]]] = deque()
    with engine.behind(mark):
        buffers = engine.buffers()
        size = len(buffers[0])
        for number, batch in enumerate(_batches(pieces(pairs, size), size)):
            if len(full) == len(buffers):
                _empty(engine, *full.popleft())
            buffer, offset, moving = buffers[number % len(buffers)], 0, []
            for tensor, place in batch:
                staged = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                staged.copy_(tensor, non_blocking=True)
                moving.append((staged, place))
                offset += aligned(tensor.nbytes)
            full.append((engine.mark(), moving))
        while full:
            _empty(engine, *full.popleft())


def _empty(engine: Engine, mark: Any, moving: Iterable[Pair]) -> None:
    engine.wait(mark)
    for staged, place in moving:
        place.copy_(staged)


def _batches(pairs: Iterable[Pair], num_bytes: int) -> Iterator[list[Pair]]:
    """Yield lists of pieces that fit into one buffer together, since an optimizer has many scalars."""
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        needed = aligned(pair[0].nbytes)
        if batch and size + needed > num_bytes:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += needed
    if batch:
        yield batch


def pieces(pairs: Iterable[Pair], num_bytes: int) -> Iterator[Pair]:
    """Yield tensors and their places in pieces of at most `num_bytes`, for any strides."""
    for tensor, place in pairs:
        if tensor.nbytes == 0:
            continue
        if tensor.nbytes <= num_bytes:
            yield tensor, place
        elif tensor.is_contiguous() and place.is_contiguous():
            flat, flat_place, length = tensor.view(-1), place.view(-1), max(1, num_bytes // tensor.element_size())
            yield from zip(torch.split(flat, length), torch.split(flat_place, length))
        elif len(tensor) == 1:
            yield from pieces([(tensor[0], place[0])], num_bytes)
        else:
            length = max(1, len(tensor) * num_bytes // tensor.nbytes)
            yield from pieces(zip(torch.split(tensor, length), torch.split(place, length)), num_bytes)


def _version(tensor: torch.Tensor) -> int:
    """Return a number that changes with each change in place. It is 0 for tensors made in inference mode, which have none."""
    return 0 if tensor.is_inference() else tensor._version
