"""`regroup checkpoint export`: writes the model of one checkpoint as a safetensors file.

A checkpoint describes whole tensors, whatever split its parts were written in, so this command needs neither the script nor its
mesh. Tensors are read and written a few at a time (adr/0091).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from regroup.checkpoint import stages, store
from regroup.checkpoint import tree as trees
from regroup.checkpoint.selection import CheckpointInfo, Name, parse_name
from regroup_cli import safetensors_file
from regroup_client.views import counted
from regroup_operator.api import SpecError


def place(given: Path) -> tuple[Path, Name | None]:
    """Return the directory of checkpoints, and the name of the checkpoint if `given` is one itself."""
    only = parse_name(given.resolve().name)
    return (given, None) if only is None else (given.resolve().parent, only)


def chosen(directory: Path, only: Name | None, step: int | None, found: tuple[list[Name], list[Name]]) -> Name:
    """Return `only`, or the newest complete checkpoint, or that of `step`. Raises SpecError.

    `found` are the names of the complete and of the other checkpoints, the newest first.
    """
    complete, incomplete = ([name for name in names if only in (None, name)] for names in found)
    listing = f"`regroup checkpoint list {directory}` shows all."
    if not complete and only is not None:
        raise SpecError(f"DIR ({directory / only.directory}) is not a complete checkpoint. {listing}")
    if not complete:
        what = "complete checkpoint" if incomplete else "checkpoint"
        raise SpecError(f"DIR ({directory}) holds no {what}. {listing}")
    fitting = [name for name in complete if step in (None, name.step)]
    if fitting:
        return fitting[0]
    half = any(name.step == step for name in incomplete)
    what = "a checkpoint that is not complete" if half else "no checkpoint"
    raise SpecError(f"--step ({step}) is the step of {what} in {directory}. {listing}")


def check_target(option: str, file: Path) -> None:
    """Refuse a file that exists or that cannot be made. Raises SpecError."""
    with _one_sentence(option, file):
        if file.exists() or file.is_symlink():
            raise SpecError(f"{option} ({file}) exists. Name another file, or delete this one.")
        if not file.parent.is_dir():
            raise SpecError(f"{option} ({file}) is in no directory: {file.parent} is none. Make it first.")


def export(info: CheckpointInfo, to: Path, optimizer: Path | None) -> None:
    """Write the model of a verified checkpoint to `to`, and the optimizer's state to `optimizer`.

    Both files appear at the end, each by one rename. Raises SpecError and CheckpointError.
    """
    contents = store.Contents(Path(info.path))
    about = {"format": "pt", "checkpoint": info.name.directory, "step": str(info.name.step)}
    files = [("--to", to, contents.tree.get("model"), about)]
    if optimizer is not None:
        state = stages.named(contents.tree.get("optimizer"), contents.tree.get(stages.NAMES, ()))
        files.append(("--optimizer", optimizer, state, {**about, "optimizer": json.dumps(_as_json(state))}))
    said = []
    with contextlib.ExitStack() as renames:
        for option, file, tree, metadata in files:
            stored = stages.stored(tree)
            tensors = {name: contents.empty(one.key) for name, one in stored.items()}
            if (name := safetensors_file.unknown_type(tensors)) is not None:
                raise SpecError(
                    f"{name} is of the type {tensors[name].dtype}, which safetensors has not. Load the checkpoint with torch "
                    "instead."
                )

            def read(names: Any, stored: Mapping[str, stages.Stored] = stored) -> Mapping[str, torch.Tensor]:
                held = contents.read([stored[name].key for name in names])
                return {name: held[stored[name].key] for name in names}

            renames.enter_context(_one_sentence(option, file))
            renames.enter_context(safetensors_file.written(file, tensors, metadata, read))
            size = sum(one.nbytes for one in tensors.values())
            said.append(
                f"{file}: {counted(len(tensors), 'tensor')}, {size:,} bytes, of checkpoint {info.name.directory}"
            )
            left = len(trees.leaves(tree)) - len(tensors)
            if option == "--to" and left:
                said.append(f"{file}: left out {left} values of the model's state_dict that are no tensors")
    print("\n".join(said))


@contextlib.contextmanager
def _one_sentence(option: str, file: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise SpecError(
            f"{option} ({file}) cannot be written ({error.strerror}). Check its directory, the owner and the free space."
        ) from error


def _as_json(value: Any) -> Any:
    """Return an optimizer's tree with {"tensor": name in the file} in place of each tensor."""
    return trees.mapped(value, lambda path, one: {"tensor": path} if isinstance(one, stages.Stored) else one)
