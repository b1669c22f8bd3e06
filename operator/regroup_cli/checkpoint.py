"""`regroup checkpoint`: lists the checkpoints in a directory, verifies that they can be read, and exports one. It changes none.

`regroup.checkpoint.selection` has the rules by which a job chooses one; this module shows the files to a person.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from regroup.checkpoint import selection, store
from regroup.checkpoint.errors import CheckpointError
from regroup.checkpoint.selection import CheckpointInfo, Name
from regroup_cli import export
from regroup_client.views import counted
from regroup_operator.api import SpecError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit code. Raises SpecError."""
    directory, only = Path(args.directory), None
    if args.kind == "export":
        directory, only = export.place(directory)
    try:
        if not directory.is_dir():
            raise SpecError(
                f"DIR ({directory}) is not a directory. Give the directory of spec.checkpoint, or of --checkpoint."
            )
        complete, incomplete = store.names(directory)
    except OSError as error:
        raise SpecError(
            f"DIR ({directory}) cannot be read ({error.strerror}). Check its name, its owner and its mount."
        ) from None
    if args.kind == "list":
        return _list(directory, complete, incomplete)
    if args.kind == "export":
        return _export(args, directory, export.chosen(directory, only, args.step, (complete, incomplete)))
    return _verify(directory, _chosen(args, directory, complete, incomplete))


def _list(directory: Path, complete: list[Name], incomplete: list[Name]) -> int:
    rows = [("NAME", "STEP", "GENERATION", "WRITTEN", "SIZE", "")]
    for name in sorted({*complete, *incomplete}, reverse=True):
        written = size = ""
        try:
            info = _read(directory, name)
            text = "complete"
            written = time.strftime(
                "%Y-%m-%d %H:%M:%S", time.localtime((Path(info.path) / store.COMMIT).stat().st_mtime)
            )
            size = _size(sum(mark.size for mark in info.commit.files.values()))
        except CheckpointError as error:
            text = error.why or str(error)
        rows.append((name.directory, str(name.step), str(name.generation), written, size, text))
    if len(rows) == 1:
        print(f"{directory} holds no checkpoint.")
        return 0
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[5]]).rstrip())
    return 0


def _chosen(args: argparse.Namespace, directory: Path, complete: list[Name], incomplete: list[Name]) -> list[Name]:
    if args.name is not None:
        name = selection.parse_name(args.name)
        if name is None or name not in (*complete, *incomplete):
            raise SpecError(
                f"NAME ({args.name}) is no checkpoint in {directory}. `regroup checkpoint list {directory}` shows all."
            )
        return [name]
    if not complete:
        raise SpecError(f"{directory} holds no complete checkpoint. `regroup checkpoint list {directory}` shows all.")
    return complete if args.all else complete[:1]


def _verify(directory: Path, names: list[Name]) -> int:
    store.prepare()
    failed = 0
    for name in names:
        try:
            info = _read(directory, name)
            store.verify(info)
            num_tensors = _num_tensors(store.read_data(Path(info.path)))
        except CheckpointError as error:
            failed += 1
            print(f"{name.directory}: FAILED: {error.why or error}")
            continue
        files = info.commit.files
        size = _size(sum(mark.size for mark in files.values()))
        print(
            f"{name.directory}: ok: {counted(len(files), 'file')}, {size}, as committed; {counted(num_tensors, 'tensor')} read"
        )
    return 1 if failed else 0


def check_targets(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Return the files that `export` writes: the model, and the optimizer's state. Raises SpecError if one cannot be made."""
    to, optimizer = Path(args.to), Path(args.optimizer) if args.optimizer is not None else None
    if optimizer is not None and optimizer.absolute() == to.absolute():
        raise SpecError(f"--optimizer ({optimizer}) is the file of --to. Name another one.")
    export.check_target("--to", to)
    if optimizer is not None:
        export.check_target("--optimizer", optimizer)
    return to, optimizer


def _export(args: argparse.Namespace, directory: Path, name: Name) -> int:
    to, optimizer = check_targets(args)
    store.prepare()
    try:
        info = _read(directory, name)
        store.verify(info)
        export.export(info, to, optimizer)
    except CheckpointError as error:
        print(f"regroup: {name.directory} cannot be exported: {error.why or error}", file=sys.stderr)
        return 1
    return 0


def _read(directory: Path, name: Name) -> CheckpointInfo:
    return store.read_commit(directory, name, store.job_of(directory, name) or "")


def _num_tensors(node: object) -> int:
    if isinstance(node, dict):
        return sum(map(_num_tensors, node.values()))
    if isinstance(node, (list, tuple)):
        return sum(map(_num_tensors, node))
    return int(hasattr(node, "dtype"))


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), _UNITS[0]
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
