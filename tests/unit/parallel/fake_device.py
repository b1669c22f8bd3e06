"""A device without hardware: its tensors live in host memory, and each time that the host has to wait for it is noted.

Inside `with FakeDevice() as device:` tensors that are made on DEVICE or moved to it are on it, and what is computed from them is.
Noted is what has the host wait for a CUDA stream: a value that it reads (`item`, `float`, `tolist`, `equal`), a copy to host
memory, a copy from it that is not `non_blocking`, an operator whose result's size depends on values, and an index in host memory.

With `engine_of` in place of `staging.engine_of` its work is asynchronous: a `non_blocking` copy to host memory has no values before
its mark was waited for, and a mark is not reached before the test sets `ended`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
"""Reported by its tensors: a type that torch makes no tensors of by itself."""
LIBRARY = str(Path("trainer-image", "regroup"))
aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_SIZES = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default}


class OnDevice(torch.Tensor):
    """A tensor on the device. `held` has its values, in host memory; views of it are views of that."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        assert held.device.type == "cpu", held
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on the fake device, outside `with FakeDevice()`")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"


_here = threading.local()
"""`device`: the fake device of this thread."""
TIMEOUT_S = 20.0


class FakeEngine:
    """The `staging.Engine` of a fake device, as far as single values go."""

    def mark(self) -> tuple[FakeDevice, int]:
        device: FakeDevice = _here.device
        return device, len(device.landing)

    def wait(self, mark: tuple[FakeDevice, int]) -> None:
        device, number = mark
        device.wait("mark")
        assert device.ended.wait(TIMEOUT_S), "the device's work does not end"
        for place, values in device.landing[:number]:
            place.copy_(values)


def engine_of(device: torch.device) -> Any:
    """In place of `staging.engine_of`."""
    return FakeEngine() if device == DEVICE else None


class FakeDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`waits`: for each time that the host waited, which operator and which function of the library had it do so."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        self.ended = threading.Event()
        """The device has ended all that it was given; a test may clear it."""
        self.ended.set()
        self.landing: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Copies to host memory, in their order: where they go, and the values."""

    def __enter__(self) -> FakeDevice:
        _here.device = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def take(self) -> list[str]:
        """Return what was noted since the last call."""
        taken, self.waits = self.waits, []
        return taken

    def wait(self, what: str) -> None:
        """Note that the host waits for the device."""
        self.waits.append(f"{_caller()}: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        wrappers = {id(one.held): one for one in tensors if isinstance(one, OnDevice)}
        self._look(func, args, kwargs, bool(wrappers))
        target = kwargs.get("device")
        wraps = bool(wrappers) if target is None else torch.device(target) == DEVICE
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        inner_args, inner_kwargs = tree_map(lambda one: one.held if isinstance(one, OnDevice) else one, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if func is aten._to_copy.default and target is not None and bool(wrappers) != wraps:
            out = out.clone()  # what crosses is a copy, though both sides are in host memory
            if not wraps and kwargs.get("non_blocking"):
                place = torch.full_like(out, -1)  # NaN, as the bits of a float64
                self.landing.append((place, out))
                out = place

        def wrapped(one: Any) -> Any:
            if not wraps or not isinstance(one, torch.Tensor):
                return one
            return wrappers.get(id(one)) if id(one) in wrappers else OnDevice(one)

        return tree_map(wrapped, out)

    def _look(self, func: Any, args: Any, kwargs: Any, is_on_device: bool) -> None:
        name = str(func.overloadpacket.__name__)
        if func is aten.copy_.default:
            to, of = (isinstance(one, OnDevice) for one in args[:2])
            if to != of and not (len(args) > 2 and args[2]):
                self.wait("copy to the host" if of else "copy to the device")
        elif func is aten._to_copy.default and "device" in kwargs:
            to_device = torch.device(kwargs["device"]) == DEVICE
            if to_device != is_on_device and not kwargs.get("non_blocking"):
                self.wait("copy to the device" if to_device else "copy to the host")
        elif is_on_device and (func in _READS or func in _SIZES):
            self.wait(name)
        elif is_on_device and name in ("index", "index_put_", "_index_put_impl_"):
            for index in args[1]:
                if index is None:
                    continue
                if not isinstance(index, OnDevice):
                    self.wait(f"{name} by a host tensor")
                elif index.dtype in (torch.bool, torch.uint8):
                    self.wait(f"{name} by a mask")


def _caller() -> str:
    """Return the innermost function of the library that is being called, and that does not only read what another one asked
    for; "script": there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if LIBRARY in str(module) and module.stem != "host" and not function.startswith("__"):
            return f"{module.stem}.{function}"
        frame = frame.f_back
    return "script"
