"""The edges of a pipeline in one generation: tensors from one stage to the next, and their gradients back.

An edge is two parts of the generation with two ranks each, one for each direction. A tensor goes over it by a broadcast. A wait for
gloo's send cannot be cut into slices, and may never end once the peer is gone (docs/design/adr/0038-pipelines.md). Tensors come out
of an edge in the order in which they went in, so no header has the microbatch. Sending never waits.

Between GPUs NCCL sends tensors, and gloo the headers before them. Gloo receives gradients as soon as they are expected. NCCL
receives them when they are needed, because its kernel would occupy a part of the GPU until they come.

Every wait is one of `Groups`: it ends with the generation, or when the peer's connection does.
"""

from collections.abc import Sequence

import torch

from regroup.errors import UsageError
from regroup.layout import PIPELINE, Layout

from . import nccl
from .broadcast import from_rank
from .groups import Groups, Part, Pending

ACTIVATIONS, GRADIENTS = "activations", "gradients"
HEADER = 64
"""Numbers in front of the activations of a microbatch:
how many tensors, and for each its type, whether it needs a gradient, and its shape."""
_TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_num_stages = 1
"""Number of stages of this process's model. Set before the first generation (`regroup.pipeline`)."""


def plan(num_stages: int) -> None:
    """Open the edges between `num_stages` stages, from the next generation on."""
    global _num_stages
    _num_stages = num_stages


def parts(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the two ranks of each edge of this rank's stages, by name. The names have one order on all ranks."""
    line = layout.line(rank, PIPELINE)
    if len(line) == 1:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for low in range(_num_stages - 1):
        both = line[low % len(line)], line[(low + 1) % len(line)]
        if rank in both:
            found |= {_name(low, way): both for way in (ACTIVATIONS, GRADIENTS)}
    return found


def _name(low: int, way: str) -> str:
    return f"{way} of stages {low} and {low + 1}"


class Edges:
    """This rank's ends of the edges, for one step. `low` is the number of the edge's first stage."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._sent: list[tuple[Pending, torch.Tensor]] = []
        """Messages on their way, each with the tensor that it reads."""
        self._headers: dict[int, tuple[Pending, torch.Tensor]] = {}
        """Headers of the activations that are received next, by edge. They are asked for early, so that they come meanwhile."""

    def send(self, low: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send the activations of one microbatch to the next stage. Raises UsageError for what cannot be sent."""
        part = self._part(low, ACTIVATIONS)
        self._put(part, header_of(tensors, part.device), control=True)
        for tensor in tensors:
            self._put(part, tensor)

    def expect(self, low: int) -> None:
        """Let the next activations of an edge come: `receive` returns them."""
        header = torch.empty(HEADER, dtype=torch.int64)
        self._headers[low] = _get(self._part(low, ACTIVATIONS), header, control=True), header

    def receive(self, low: int) -> list[torch.Tensor]:
        """Return the activations of the last `expect`. They are leaves, and need a gradient where the sender's do. Blocks."""
        part = self._part(low, ACTIVATIONS)
        pending, header = self._headers.pop(low)
        part.wait([pending])
        tensors = empty_like(header.tolist(), part.device)
        coming = [(one, _get(part, one.detach())) for one in tensors if one.numel()]
        part.order([pending for one, pending in coming if not nccl.hold_places(one)])
        part.wait([pending for one, pending in coming if nccl.hold_places(one)])
        return tensors

    def send_gradients(self, low: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of those activations of one microbatch that need one, to the stage that they came from."""
        for gradient in gradients:
            self._put(self._part(low, GRADIENTS), gradient)

    def expect_gradients(self, low: int, outputs: Sequence[torch.Tensor]) -> "Coming":
        """Let the gradients of these activations come. They come in the order in which they were sent."""
        return Coming(self._part(low, GRADIENTS), [(one.shape, one.dtype, one.device) for one in outputs])

    def finish(self) -> None:
        """Wait until everything has been sent. Raises what `Groups.wait` does."""
        self._groups.wait([pending for pending, _ in self._sent])
        self._sent = []

    def _part(self, low: int, way: str) -> Part:
        return self._groups.part(_name(low, way))

    def _put(self, part: Part, tensor: torch.Tensor, *, control: bool = False) -> None:
        self._sent = [one for one in self._sent if not self._groups.is_completed(one[0].work)]
        self._groups.forget_ended()  # else a stage that receives no headers would hold what it has sent until the step's end
        if tensor.numel():
            tensor = tensor.detach().contiguous()
            self._sent.append((part.launch("broadcast", [tensor], from_rank(part.rank), control=control), tensor))


class Coming:
    """Gradients that are on their way."""

    def __init__(self, part: Part, shapes: Sequence[tuple[torch.Size, torch.dtype, torch.device]]) -> None:
        """`shapes` has shape, type and device of each gradient."""
        self._part, self._shapes = part, shapes
        self._begun = self._receive() if part.nccl is None else None

    def wait(self) -> list[torch.Tensor]:
        """Return the gradients, for the next launches of this thread on their device. Raises what `Groups.order` does."""
        gradients, pending = self._receive() if self._begun is None else self._begun
        self._part.order(pending)
        return gradients

    def _receive(self) -> tuple[list[torch.Tensor], list[Pending]]:
        gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._shapes]
        return gradients, [_get(self._part, one) for one in gradients if one.numel()]


def header_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the header of tensors on the model's device. Raises UsageError for tensors that no header describes."""
    numbers = [len(tensors)]
    for tensor in tensors:
        if tensor.dtype not in _TYPES or tensor.device != device or tensor.layout != torch.strided:
            raise UsageError(
                f"A stage of the pipeline returns a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}; "
                f"only dense tensors of numbers on the model's device ({device}) can be sent to the next stage. Convert it there."
            )
        numbers += [_TYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.ndim, *tensor.shape]
    if len(numbers) > HEADER:
        raise UsageError(
            f"A stage of the pipeline returns {len(tensors)} tensors, which take {len(numbers)} numbers to describe; "
            f"{HEADER} are the most. "
            "Cut the model where fewer tensors go from one module to the next (boundaries of regroup.pipeline())."
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def empty_like(header: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return tensors without values as a header describes them."""
    tensors, at = [], 1
    for _ in range(header[0]):
        kind, needs_gradient, ndim = header[at : at + 3]
        shape = tuple(header[at + 3 : at + 3 + ndim])
        empty = torch.empty(shape, dtype=_TYPES[kind], device=device)
        tensors.append(empty.requires_grad_(bool(needs_gradient)))
        at += 3 + ndim
    return tensors


def _get(part: Part, tensor: torch.Tensor, *, control: bool = False) -> Pending:
    return part.launch("broadcast", [tensor], from_rank(1 - part.rank), control=control)
