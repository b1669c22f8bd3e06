"""Turns an object into bytes and back, without pickle: bytes of a peer can never run code here.

The bytes are a JSON text, which describes the object, and after it the raw content of tensors, arrays and byte strings. Known types
are those that state dicts, settings and metrics are made of. `encode` raises TypeError for any other, with one sentence.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict, defaultdict
from typing import Any

import torch

_PLAIN = (type(None), bool, int, str)
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_NUMPY_KINDS = "biufcSU"
_TORCH_NAMES = {
    str(value): value for value in vars(torch).values() if isinstance(value, (torch.dtype, torch.memory_format))
}


def encode(value: Any) -> bytes:
    """Return the bytes of an object. Raises TypeError if it has a part of a type that is not known."""
    blobs: list[bytes] = []
    try:
        described = json.dumps(_describe(value, blobs), separators=(",", ":")).encode()
    except RecursionError:
        raise TypeError("An object that contains itself, or is nested very deeply, cannot be sent.") from None
    return b"".join([struct.pack(">Q", len(described)), described, *blobs])


def decode(data: bytes) -> Any:
    """Return the object that `encode` made these bytes of. Raises ValueError for other bytes."""
    try:
        (length,) = struct.unpack_from(">Q", data)
        reader = _Reader(memoryview(data)[8 + length :])
        return reader.read(json.loads(data[8 : 8 + length].decode()))
    except (struct.error, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise ValueError(f"These bytes are no object of a peer: {error}") from None


def _describe(value: Any, blobs: list[bytes]) -> Any:
    """Return JSON for a value. A plain value stands for itself, and any other is a list that begins with its type."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind in (bytes, bytearray):
        return [kind.__name__, _blob(bytes(value), blobs)]
    for name, container in _CONTAINERS.items():
        if kind is container:
            return [name, [_describe(each, blobs) for each in value]]
    if kind in (dict, OrderedDict, defaultdict):
        name = "ordered" if kind is OrderedDict else "dict"  # the function of a defaultdict is code, and stays here
        return [name, [[_describe(key, blobs), _describe(each, blobs)] for key, each in value.items()]]
    if kind in (range, slice):
        return [kind.__name__, [_describe(each, blobs) for each in (value.start, value.stop, value.step)]]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        return _describe_tensor(value, blobs)
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return ["torch", str(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    numpy = _describe_numpy(value, blobs)
    if numpy is not None:
        return numpy
    raise TypeError(
        f"An object of type {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks, because only data travels. Send "
        "numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, sets and dicts of them, such as a state_dict()."
    )


def _describe_tensor(value: torch.Tensor, blobs: list[bytes]) -> Any:
    """Describe a tensor. A parameter stays one. Its device is that of the sender's type, so a receiver without GPU gets a CPU's."""
    is_parameter = isinstance(value, torch.nn.Parameter)
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    name = str(value.dtype).removeprefix("torch.")
    return ["tensor", name, list(value.shape), _blob(content, blobs), value.requires_grad, is_parameter, value.is_cuda]


def _describe_numpy(value: Any, blobs: list[bytes]) -> Any:
    dtype: Any = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") not in _NUMPY_KINDS or not hasattr(dtype, "str") or type(value).__module__ != "numpy":
        return None
    is_array = type(value).__name__ == "ndarray"
    return ["numpy", dtype.str, list(value.shape), _blob(value.tobytes(), blobs), is_array]


def _blob(content: bytes, blobs: list[bytes]) -> int:
    blobs.append(content)
    return len(content)


class _Reader:
    """Reads the raw contents in the order in which they were written."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def read(self, described: Any) -> Any:
        if not isinstance(described, list):
            return described
        kind, *rest = described
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([self.read(each) for each in rest[0]])
        if kind in ("dict", "ordered"):
            items = [(self.read(key), self.read(each)) for key, each in rest[0]]
            return OrderedDict(items) if kind == "ordered" else dict(items)
        return getattr(self, f"_{kind}")(*rest) if kind in _READ else _unknown(kind)

    def _float(self, text: str) -> float:
        return float.fromhex(text)

    def _complex(self, real: str, imag: str) -> complex:
        return complex(float.fromhex(real), float.fromhex(imag))

    def _bytes(self, length: int) -> bytes:
        if not 0 <= length <= len(self._content):
            raise ValueError("These bytes are no object of a peer: they end too early.")
        content, self._content = bytes(self._content[:length]), self._content[length:]
        return content

    def _bytearray(self, length: int) -> bytearray:
        return bytearray(self._bytes(length))

    def _range(self, numbers: list[Any]) -> range:
        return range(*[int(each) for each in numbers])

    def _slice(self, parts: list[Any]) -> slice:
        return slice(*[self.read(each) for each in parts])

    def _torch(self, name: str) -> Any:
        return _TORCH_NAMES[name]

    def _device(self, name: str) -> torch.device:
        return torch.device(name)

    def _tensor(
        self, name: str, shape: list[int], length: int, requires_grad: bool, is_parameter: bool, on_gpu: bool
    ) -> torch.Tensor:
        dtype: Any = _TORCH_NAMES[f"torch.{name}"]
        content = bytearray(self._bytes(length))
        tensor = torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
        if on_gpu and torch.cuda.is_available():
            tensor = tensor.cuda()
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)

    def _numpy(self, dtype: str, shape: list[int], length: int, is_array: bool) -> Any:
        import numpy

        kind = numpy.dtype(dtype)
        if kind.kind not in _NUMPY_KINDS:
            raise ValueError("These bytes are no object of a peer: an array of objects.")
        content = bytearray(self._bytes(length))
        # frombuffer refuses no bytes, and the type of an empty string
        is_empty = not content or not kind.itemsize
        array = numpy.zeros(shape, kind) if is_empty else numpy.frombuffer(content, dtype=kind).reshape(shape)
        return array if is_array else array[()]


_READ = ("float", "complex", "bytes", "bytearray", "range", "slice", "torch", "device", "tensor", "numpy")


def _unknown(kind: Any) -> Any:
    raise ValueError(f"These bytes are no object of a peer: the type {kind!r}.")
