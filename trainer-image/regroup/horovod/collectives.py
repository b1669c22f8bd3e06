"""Runs a collective that was ordered, with torch.distributed: on gloo for tensors on the CPU, on NCCL for those on a GPU.

Called by the engine's runner alone. All members of the process set run the same orders in the same sequence.
A rank that has joined adds zeros to an allreduce, whose average still divides by all members, as in Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from regroup.horovod import negotiation as n
from regroup.horovod.adasum import combine
from regroup.horovod.handles import Handle

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
_REDUCTIONS = {
    AVERAGE: dist.ReduceOp.SUM, SUM: dist.ReduceOp.SUM, MIN: dist.ReduceOp.MIN, MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}  # fmt: skip
_CARRIED_ON_CPU = {
    torch.int16: torch.int32, torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8,
}  # fmt: skip
"""Types that gloo cannot reduce, or reduces with a rounding in each step, and the types in which their values travel."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.bool,
    )
}  # fmt: skip
"""Types that Horovod's operations take."""


class Collectives:
    """Holds the group of each process set, and runs orders on them."""

    def __init__(self, rank: int, group: Any, backend: str) -> None:
        self._rank, self._backend = rank, backend
        self._groups: dict[int, Any] = {n.GLOBAL_SET: group}
        self._members: dict[int, tuple[int, ...]] = {n.GLOBAL_SET: tuple(range(dist.get_world_size(group)))}
        self.join_gpu: int | None = None
        """GPU on which this rank adds its zeros once it has joined. The device of the runner's thread is always the first one."""
        self._runs: dict[str, Callable[[n.Order, Handle | None], Any]] = {
            n.ALLREDUCE: self._allreduce, n.ALLGATHER: self._allgather, n.BROADCAST: self._broadcast, n.ALLTOALL: self._alltoall,
            n.REDUCESCATTER: self._reducescatter, n.ADD_SET: self._add_set, n.REMOVE_SET: self._remove_set,
            n.BARRIER: self._answer, n.JOIN: self._answer,
        }  # fmt: skip

    def members(self, set_id: int) -> tuple[int, ...]:
        """Return the ranks of a process set."""
        return self._members[set_id]

    def close(self) -> None:
        """Destroy the groups, and with them their connections. Called once nothing runs any more."""
        groups, self._groups = list(self._groups.values()), {}
        for group in groups if dist.is_initialized() else ():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def run(self, order: n.Order, handle: Handle | None) -> Any:
        """Run one order and return the result. `handle` is None on a rank that has joined, or is no member of the set."""
        if self._rank not in self._members.get(order.request.set_id, ()):
            return None
        if handle is None or handle.ready is None:
            device = None
            if order.request.device != "CPU":
                device = torch.device("cuda", torch.cuda.current_device() if self.join_gpu is None else self.join_gpu)
            with torch.no_grad():
                return self._run_on(device, order, handle)
        device = handle.tensors[0].device
        with torch.cuda.device(device), torch.no_grad():
            torch.cuda.current_stream().wait_event(handle.ready)
            result = self._run_on(device, order, handle)
            torch.cuda.current_stream().synchronize()
            return result

    def _run_on(self, device: torch.device | None, order: n.Order, handle: Handle | None) -> Any:
        self._device = device or torch.device("cpu")
        result = self._runs[order.request.kind](order, handle)
        if handle is not None and handle.outputs is not None:
            for output, value in zip(handle.outputs, result):
                output.data.copy_(value.reshape(output.shape))
            return list(handle.outputs)
        return result

    def _inputs(self, order: n.Order, handle: Handle | None) -> Sequence[torch.Tensor]:
        if handle is not None:
            return handle.tensors
        request = order.request
        return [
            torch.zeros(shape, dtype=DTYPES[dtype], device=self._device)
            for shape, dtype in zip(request.shapes, request.dtypes)
        ]

    # One entry of `_runs` each. ------------------------------------------------------------------------------------------

    def _allreduce(self, order: n.Order, handle: Handle | None) -> list[torch.Tensor]:
        return self._reduced(order, self._inputs(order, handle))

    def _reduced(self, order: n.Order, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each input reduced over all members. Inputs of one type travel together."""
        request = order.request
        group, num_members = self._groups[request.set_id], len(self._members[request.set_id])
        results: list[torch.Tensor] = [torch.empty(0)] * len(inputs)
        by_type: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(inputs):
            by_type.setdefault(tensor.dtype, []).append(index)
        for dtype, indices in by_type.items():
            flat = torch.cat([scaled(inputs[i].detach(), request.factors[0]).reshape(-1) for i in indices])
            if request.op == ADASUM:
                lengths = [inputs[i].numel() for i in indices]
                flat = averaged(self._adasum(flat, lengths, group, num_members), request.factors[1], 1, dtype)
            elif flat.numel():
                carried = flat.to(_CARRIED_ON_CPU.get(dtype, dtype)) if flat.device.type == "cpu" else flat
                dist.all_reduce(carried, _REDUCTIONS[request.op], group=group)
                divisor = num_members if request.op == AVERAGE else 1
                flat = averaged(carried, request.factors[1], divisor, dtype)
            at = 0
            for i in indices:
                results[i] = flat[at : at + inputs[i].numel()].reshape(inputs[i].shape)
                at += inputs[i].numel()
        return results if len(inputs) == 1 else [result.clone() for result in results]

    def _adasum(self, flat: torch.Tensor, lengths: Sequence[int], group: Any, num_members: int) -> torch.Tensor:
        """Return the combination of each tensor. `flat` has tensors of these lengths, one behind the other."""
        parts = [torch.empty_like(flat) for _ in range(num_members)]
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(flat), group=group)
        return torch.cat([combine(pieces) for pieces in zip(*(torch.split(part, list(lengths)) for part in parts))])

    def _allgather(self, order: n.Order, handle: Handle | None) -> list[torch.Tensor]:
        """Return the concatenation of each tensor. Ranks with fewer rows send padding, since gloo wants equal sizes."""
        assert handle is not None
        results = []
        for index, tensor in enumerate(handle.tensors):
            rows = [sizes[index] for sizes in order.sizes]
            tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
            padded = torch.zeros((max(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
            padded[: tensor.shape[0]] = tensor
            parts = [torch.zeros_like(padded) for _ in rows]
            if padded.numel():
                dist.all_gather(
                    [as_bytes(part) for part in parts], as_bytes(padded), group=self._groups[order.request.set_id]
                )
            results.append(torch.cat([part[:count] for part, count in zip(parts, rows)]))
        return results

    def _broadcast(self, order: n.Order, handle: Handle | None) -> list[torch.Tensor]:
        assert handle is not None
        results = []
        for tensor in handle.tensors:
            result = tensor.detach().clone(memory_format=torch.contiguous_format)
            if result.numel():
                dist.broadcast(as_bytes(result), order.request.root, group=self._groups[order.request.set_id])
            results.append(result)
        return results

    def _alltoall(self, order: n.Order, handle: Handle | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that were sent to this rank, and how many each member has sent."""
        assert handle is not None
        request = handle.request
        index = self._members[request.set_id].index(self._rank)
        received = [splits[index] for splits in order.sizes]
        tensor = handle.tensors[0].detach().contiguous()
        result = torch.zeros((sum(received), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        width = tensor.element_size()
        for length in tensor.shape[1:]:
            width *= length
        if width:
            dist.all_to_all_single(
                as_bytes(result), as_bytes(tensor)[: sum(request.splits) * width], [count * width for count in received],
                [count * width for count in request.splits], group=self._groups[request.set_id],
            )  # fmt: skip
        return result, torch.tensor(received, dtype=torch.int32)

    def _reducescatter(self, order: n.Order, handle: Handle | None) -> list[torch.Tensor]:
        """Return this rank's rows of each reduced tensor. The first ranks get one row more if the rows cannot be dealt evenly."""
        members = self._members[order.request.set_id]
        index, results = members.index(self._rank), []
        for reduced in self._reduced(order, self._inputs(order, handle)):
            each, more = divmod(reduced.shape[0], len(members))
            begin = index * each + min(index, more)
            results.append(reduced[begin : begin + each + (index < more)].clone())
        return results

    def _answer(self, order: n.Order, handle: Handle | None) -> int:  # noqa: ARG002
        return order.value

    def _add_set(self, order: n.Order, handle: Handle | None) -> int:  # noqa: ARG002
        self._groups[order.value] = dist.new_group(list(order.request.ranks), backend=self._backend)
        self._members[order.value] = order.request.ranks
        return order.value

    def _remove_set(self, order: n.Order, handle: Handle | None) -> int:  # noqa: ARG002
        members, group = self._members.pop(order.value), self._groups.pop(order.value)
        if self._rank in members:
            dist.destroy_process_group(group)
        return order.value


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor in one dimension. Bytes travel in every backend, whatever the type is."""
    return tensor.reshape(-1).view(torch.uint8)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times the factor. Integers are scaled in float64 and truncated, 16-bit floats in float32."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def averaged(tensor: torch.Tensor, factor: float, divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a sum times the factor, divided by the number of members, in the type of the inputs."""
    if factor == 1.0 and divisor == 1:
        return tensor.to(dtype)
    if tensor.dtype.is_floating_point:
        tensor = tensor if factor == 1.0 else scaled(tensor, factor)
        return (tensor / divisor).to(dtype) if divisor != 1 else tensor.to(dtype)
    return (tensor.double() * (factor / divisor)).to(dtype)
