"""Encodes a state as named tensors and one JSON text, never pickle, for files and for copies between ranks.

A state consists of dicts (with keys of strings and integers), lists, tuples, tensors, numbers, strings, booleans and None. Other
values are refused by name. Key types, tuples and empty containers survive, since `Optimizer.load_state_dict` needs them even for an
optimizer without a state.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import CheckpointError

Tree = dict[str, Any]
_ALIGN = 64
"""Alignment of tensors in bytes."""


@dataclass(frozen=True)
class TensorPart:
    """The part that a process holds of a tensor which is split over its model group, and its place in the whole."""

    local: torch.Tensor
    dims: tuple[str, ...]
    """Names of the mesh's dimensions over which the tensor is placed."""
    placements: tuple[tuple[str, int, int], ...]
    """(kind, dimension of the tensor, split factor) for each of these dimensions, as `regroup.checkpoint.shards` writes them."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


def pack(tree: Tree) -> tuple[str, dict[str, torch.Tensor]]:
    """Return (structure, tensors): a JSON text, and the tree's own tensors by the dotted paths that DCP gives them.

    Equal trees give equal structures and equal keys in equal order. Raises CheckpointError that names an entry of another type.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = _encode(tree, (), tensors)
    return json.dumps(structure, separators=(",", ":")), tensors


def unpack(structure: str, tensors: Mapping[str, torch.Tensor], *, are_whole: bool = False) -> Tree:
    """Return the tree from the structure of `pack` and tensors. Raises CheckpointError for a text that `pack` did not write.

    If the tensors `are_whole`, a tensor stands in place of each TensorPart.
    """
    try:
        tree = _decode(json.loads(structure), tensors, are_whole)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"The structure of a state is damaged ({type(error).__name__}: {error}).") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"The structure of a state is a {type(tree).__name__}, not a dict.")
    return tree


def unsaved_kind(tensor: torch.Tensor) -> str | None:
    """Return the kind of a tensor that cannot be saved byte by byte, such as a sparse one. None for a dense tensor."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return None if tensor.layout == torch.strided else str(tensor.layout)


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, TensorPart):
        key = _encode(value.local, path, tensors)["tensor"]
        return {"part": [key, value.dims, value.placements, value.shape]}
    if isinstance(value, torch.Tensor):
        key = ".".join(path)
        if (kind := unsaved_kind(value)) is not None:
            raise CheckpointError(f"{key} is a {kind} tensor; only dense ones can be saved. Convert it in state_dict.")
        if key in tensors:
            raise CheckpointError(f"Two tensors of the state are called {key}. Rename a key that has a dot in it.")
        tensors[key] = value.detach()
        return {"tensor": key}
    if value is None or isinstance(value, (bool, int, float, str)):
        # A subclass (numpy.float64, an enum) is refused, since it would come back as its base.
        if type(value) in (type(None), bool, int, float, str):
            return value
    elif isinstance(value, dict):
        return {"dict": [[_key(k, path), _encode(v, (*path, str(k)), tensors)] for k, v in value.items()]}
    elif type(value) in (list, tuple):
        items = [_encode(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{'.'.join(path)} is a {kind}, which cannot be saved. Return tensors, numbers, strings, lists and dicts from state_dict."
    )


def _key(key: Any, path: tuple[str, ...]) -> str | int:
    if type(key) not in (str, int):
        raise CheckpointError(
            f"{'.'.join(path)} has the key {key!r}, a {type(key).__name__}. Use strings or integers as keys."
        )
    checked: str | int = key
    return checked


def _decode(node: Any, tensors: Mapping[str, torch.Tensor], are_whole: bool) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors, are_whole) for item in node]
    if isinstance(node, dict):
        ((kind, inner),) = node.items()
        if kind == "tensor":
            return tensors[inner]
        if kind == "part":
            key, dims, placements, shape = inner
            if are_whole:
                return tensors[key]
            return TensorPart(
                tensors[key], tuple(dims), tuple((kind, dim, factor) for kind, dim, factor in placements), tuple(shape)
            )
        if kind == "dict":
            return {key: _decode(item, tensors, are_whole) for key, item in inner}
        if kind == "tuple":
            return tuple(_decode(item, tensors, are_whole) for item in inner)
        raise ValueError(f"unknown node {kind!r}")
    return node


def differences(loaded: Tree, model: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first difference between the model of a loaded tree and `model`, a state_dict, or None."""
    held = loaded.get("model")
    if not isinstance(held, dict):
        return "It holds no model."
    missing, extra = sorted(set(model) - set(held)), sorted(set(held) - set(model))
    if missing:
        return f"Its model lacks {_some(missing)}."
    if extra:
        return f"Its model has {_some(extra)}, which the script's has not."
    for name, ours in model.items():
        theirs = held[name]
        if isinstance(ours, torch.Tensor) and (not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape):
            found = list(theirs.shape) if isinstance(theirs, torch.Tensor) else type(theirs).__name__
            return f"Its model's {name} is {found}, the script's is {list(ours.shape)}."
    return None


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each piece of these sizes, one behind the other and aligned for any type, and the total size."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += aligned(size)
    return offsets, end


def aligned(num_bytes: int) -> int:
    """Return a size rounded up to the alignment of tensors."""
    return -(-num_bytes // _ALIGN) * _ALIGN


def mapped(value: Any, change: Callable[[str, Any], Any], path: tuple[str, ...] = ()) -> Any:
    """Return a tree with `change(dotted path, leaf)` in place of each leaf. Dicts, lists and tuples are no leaves."""
    if isinstance(value, dict):
        return {key: mapped(one, change, (*path, str(key))) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change, (*path, str(i))) for i, one in enumerate(value))
    return change(".".join(path), value)


def leaves(value: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their dotted paths."""
    found: dict[str, Any] = {}
    mapped(value, found.__setitem__)
    return found
