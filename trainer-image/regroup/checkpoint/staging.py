"""Copies of a state from its device to host memory, while training goes on.

The one path for memory snapshots (`regroup.state.memory`) and checkpoints (`checkpointer`). Owns the pinned buffers and the stream
of its own that a GPU's copies go through, and the wait that keeps a commit from changing what is being read. Where the bytes go is
the caller's affair. Why buffers of a fixed size, and no copy on the device: docs/design/adr/0073.

The main thread calls `Staging.start` after a commit and `Staging.settle` before the next change of the state; another thread calls
`Copy.fill` in between. What a forward may change, the model's buffers, is set aside in `start`; all else is read in `fill`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from .shards import local_of

BUFFER_BYTES = 32 << 20
"""Size of a pinned buffer. On the host this is also the size of the pieces between which the interpreter's lock is free."""
NUM_BUFFERS = 2
"""While the device fills one, the host empties the other."""
_ALIGN = 64
"""Bytes."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""What is read, and where it goes: host memory of the same shape and type."""
Room = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Returns host memory for tensors of these shapes and types, by name."""


class Engine(Protocol):
    """What copying from a device asynchronously needs of it. `Cuda` is the real one; tests have one that keeps a record."""

    def mark(self) -> Any:
        """Return a mark of everything that was enqueued on the current stream."""
        ...

    def behind(self, mark: Any) -> AbstractContextManager[None]:
        """Return a block in which the current stream is the engine's own, which waits for the mark."""
        ...

    def wait(self, mark: Any) -> None:
        """Block this thread until everything before the mark has been done."""
        ...

    def buffers(self) -> Sequence[torch.Tensor]:
        """Return the pinned buffers, [BUFFER_BYTES] uint8 each. They are allocated once, in the first copy."""
        ...


class Cuda:
    """A GPU: its copies run on a stream of their own, which computes nothing."""

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
    """Return the engine of a device; None: this thread reads its tensors itself, as on a CPU."""
    return Cuda(device) if device.type == "cuda" else None


class Staging:
    """The copies of one process's state. All methods are for the main thread."""

    def __init__(
        self,
        changing: Callable[[], Iterable[torch.Tensor]] = tuple,
        make_engine: Callable[[torch.device], Engine | None] = engine_of,
    ) -> None:
        """`changing`: the tensors that change between two commits, too."""
        self._changing, self._make_engine = changing, make_engine
        self._engines: dict[torch.device, Engine | None] = {}
        self._turn = threading.Lock()
        """One copy after the other goes through the buffers."""
        self._begun: list[Copy] = []
        """Copies that may read the state still; `settle` clears it."""

    def start(self, tensors: Mapping[str, torch.Tensor], *, changes: bool = True) -> "Copy":
        """Return a copy of these tensors as they are now. One thread must `fill` it, or `abandon` it: `settle` waits for that.
        `changes`: the state goes on changing; False where this process changes nothing more."""
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
        """Wait until no copy reads the state any more. Called before anything of the state is changed. Each wait ends when the
        thread that copies has read everything, or has failed. Before that it makes room in host memory, and touches no volume of
        checkpoints."""
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
        """After `fill`: name of a tensor that was changed meanwhile, so the copy is of no state. None: there is none."""
        self.waited_s = 0.0
        """How long the main thread has waited for this copy."""

    @property
    def is_read(self) -> bool:
        """True once the copy reads the state no more."""
        return self._read.is_set()

    def wait_read(self) -> None:
        """Wait until the copy reads the state no more."""
        began_s = time.monotonic()
        self._read.wait()
        self.waited_s += time.monotonic() - began_s

    def fill(self, room: Room) -> None:
        """Copy the tensors to where `room` says. Raises what `room` raises, and what torch raises for a device that failed."""
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
        """Read nothing more of the state. For a copy whose thread could not be started."""
        self._tensors = {}
        self._read.set()


def _through(engine: Engine, mark: Any, pairs: Iterable[Pair]) -> None:
    """Copy from a device through its pinned buffers. Returns once everything has arrived."""
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
                offset += _aligned(tensor.nbytes)
            full.append((engine.mark(), moving))
        while full:
            _empty(engine, *full.popleft())


def _empty(engine: Engine, mark: Any, moving: Iterable[Pair]) -> None:
    engine.wait(mark)
    for staged, place in moving:
        place.copy_(staged)


def _batches(pairs: Iterable[Pair], num_bytes: int) -> Iterator[list[Pair]]:
    """Yield pieces together that fit into one buffer: an optimizer has a scalar for each parameter."""
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        needed = _aligned(pair[0].nbytes)
        if batch and size + needed > num_bytes:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += needed
    if batch:
        yield batch


def pieces(pairs: Iterable[Pair], num_bytes: int) -> Iterator[Pair]:
    """Yield tensors with their places in pieces of at most `num_bytes`, whatever their order in memory is."""
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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _version(tensor: torch.Tensor) -> int:
    """Return a number that changes with each change in place. Tensors made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version
