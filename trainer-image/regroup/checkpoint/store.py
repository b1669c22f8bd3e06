"""The files of checkpoints in one directory: writes them aside, renames, commits, verifies and deletes them.

Owns every path and every fsync. `selection` decides. A checkpoint's directory has:

- the files of torch's DCP: `.metadata` and `.distcp` files
- `.job`: UID of the job, written first
- COMMIT.json: size and SHA-256 of the other files, written last

A reader trusts nothing. It verifies the hashes, then reads DCP's index with an unpickler that knows only DCP's classes, then
the tensors (`weights_only`). Values other than tensors come from JSON. DCP's pickled entries are for readers without Regroup.
"""

import contextlib
import dataclasses
import enum
import hashlib
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import shards, stages
from . import tree as trees
from .errors import CheckpointError, skipped
from .selection import ASIDE, CheckpointInfo, Commit, FileMark, Name, parse_commit, parse_name

COMMIT = "COMMIT.json"
_JOB = ".job"
_INDEX = ".metadata"
_PART = "part-"
"""Prefix of the directories of a model group's processes, in the directory that is written aside."""
_OF_PART = "structure.json"
"""File in a part of a pipeline with the structure of its process's tree."""
Choose = Callable[[trees.Tree], trees.Tree]
Like = Callable[[str, tuple[int, ...]], "torch.Tensor | None"]
_STRUCTURE = "regroup.structure"
"""DCP entry with the JSON of `tree.pack`, as uint8."""
_STRAIGHT_BYTES = 1 << 16
"""Size from which tensors are not read through DCP. Of smaller ones the archive around the values takes most of the time."""
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip
"""Classes and functions that DCP's index may name, by module."""


def prepare() -> None:
    """Import DCP, which takes 0.1 s to seconds, and silence its warning that one process writes alone."""
    import torch.distributed.checkpoint

    message = "torch.distributed is disabled, unavailable or uninitialized"
    warnings.filterwarnings("ignore", message=message, module=torch.distributed.checkpoint.__name__)


def names(directory: Path) -> tuple[list[Name], list[Name]]:
    """Return the names of checkpoints with and without a COMMIT.json, newest first. A missing directory has none."""
    committed: list[Name] = []
    unfinished: list[Name] = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            name = parse_name(entry.name)
            if name is not None and entry.is_dir(follow_symlinks=False):
                done = not entry.name.startswith(ASIDE) and Path(entry.path, COMMIT).exists()
                (committed if done else unfinished).append(name)
    return sorted(committed, reverse=True), sorted(set(unfinished), reverse=True)


def write_data(directory: Path, name: Name, job_uid: str, structure: str, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write the state aside, make it durable, rename it into place, and return its path. `commit` makes it a checkpoint.

    The tensors are on the host and must not change meanwhile. Raises OSError and DCP's exceptions; its CheckpointException is a
    BaseException.
    """
    directory.mkdir(parents=True, exist_ok=True)
    aside, path = _paths(directory, name)
    for leftover in (aside, path):
        shutil.rmtree(leftover, ignore_errors=True)  # an attempt of this generation that was never committed
    aside.mkdir()
    _write_durably(aside / _JOB, job_uid.encode())
    state = _with_structure(_for_dcp(trees.unpack(structure, tensors)), structure)
    _save(state, aside)
    _fsync(aside)
    aside.rename(path)
    _fsync(directory)
    return path


def write_part(
    directory: Path, name: Name, job_uid: str, inner: int, structure: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write the part of one process of a model group beside the parts of the others, and make it durable.

    A part is a DCP checkpoint with this process's pieces; that of process 0 also has everything that is not split. A complete part
    is not written again, since process 0 may be joining it. Raises the exceptions of `write_data`.
    """
    aside, path = _paths(directory, name)
    part, complete = aside / f"{_PART}{inner}.writing", aside / f"{_PART}{inner}"
    if complete.is_dir() or path.is_dir():  # in this order, since joined parts have moved to `path`
        return
    aside.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)  # left by an earlier attempt
    part.mkdir()
    # Every process writes the job's UID: process 0 may be dead, and a directory without a job is never deleted. By rename, so
    # that a reader never finds half of it.
    _write_durably(part / _JOB, job_uid.encode())
    (part / _JOB).rename(aside / _JOB)
    tree = trees.unpack(structure, tensors)
    mine: Any = {key: one for key, one in shards.parts_in(tree).items() if shards.writes(one)}
    state = {key: shards.whole(one) for key, one in mine.items()}
    if shards.is_pipelined():  # each process numbers its optimizer's parameters by itself until the parts are joined
        _write_durably(part / _OF_PART, structure.encode())
        if shards.writes(None):
            state |= {key: tensor for key, tensor in tensors.items() if key not in shards.parts_in(tree)}
    elif inner == 0:
        state = _with_structure(_for_dcp(tree), structure)
    _save(state, part, _piece_planner())
    _fsync(part)
    part.rename(complete)
    _fsync(aside)


def has_parts(directory: Path, name: Name, count: int) -> bool:
    """Return whether all `count` processes of the model group have written their parts."""
    aside, path = _paths(directory, name)
    return path.is_dir() or all((aside / f"{_PART}{inner}").is_dir() for inner in range(count))


def join_parts(directory: Path, name: Name, count: int) -> Path:
    """Make one DCP checkpoint of all parts, by moving their files together and writing one index, and return its path.

    Raises OSError and CheckpointError.
    """
    aside, path = _paths(directory, name)
    if path.is_dir():  # an earlier attempt at this checkpoint has joined the parts, and has not committed it
        return path
    joined: Any = None
    renamed, nested = _write_rest(aside, count)
    for inner in range(count + (nested is not None)):
        part = aside / f"{_PART}{inner}"
        index = _renamed(_reader(part).read_metadata(), renamed[inner])
        files = {file.name: f"__{inner}_{i}.distcp" for i, file in enumerate(sorted(part.glob("*.distcp")))}
        for at, info in index.storage_data.items():
            index.storage_data[at] = dataclasses.replace(info, relative_path=files[info.relative_path])
        for old, new in files.items():
            (part / old).rename(aside / new)
        joined = index if joined is None else _joined(joined, index)
    if nested is not None:
        joined.planner_data = nested
    _write_durably(aside / _INDEX, pickle.dumps(joined))
    _fsync(aside)
    aside.rename(path)  # moves the parts as well, so that a process finds its own part before or after
    for part in path.glob(f"{_PART}*"):
        shutil.rmtree(part)
    _fsync(path)
    _fsync(directory)
    return path


def _write_rest(aside: Path, count: int) -> tuple[list[dict[str, str]], Any]:
    """Write one more part for a pipeline, with the entries of the whole state that are no tensors.

    Returns for each part its tensors' keys in the whole by their own keys, and DCP's mapping of nested keys. The latter is None,
    and nothing is written, if the model is no pipeline.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    files = [aside / f"{_PART}{inner}" / _OF_PART for inner in range(count)]
    if not files[0].exists():
        return [{} for _ in files], None
    whole, renamed = stages.merged([trees.unpack(file.read_text(), stages.Keys(), are_whole=True) for file in files])
    keys = stages.stored(whole)
    whole = stages.with_tensors(whole, {one.key: torch.empty(0) for one in keys.values()})
    structure, tensors = trees.pack(whole)
    assert tensors.keys() == keys.keys()
    planner = DefaultSavePlanner()
    planner.set_up_planner(_with_structure(_for_dcp(whole), structure), is_coordinator=True)
    rest = {key: one for key, one in planner.state_dict.items() if key not in keys}
    part = aside / f"{_PART}{count}"
    part.mkdir()
    _save(rest, part, _piece_planner())
    return [*renamed, {}], planner.mappings


def _renamed(index: Any, keys: Mapping[str, str]) -> Any:
    """Return DCP's index with other keys, in place. The data files do not have the keys."""
    index.state_dict_metadata = {keys.get(key, key): entry for key, entry in index.state_dict_metadata.items()}
    index.storage_data = {
        dataclasses.replace(at, fqn=keys.get(at.fqn, at.fqn)): info for at, info in index.storage_data.items()
    }
    return index


def _joined(index: Any, more: Any) -> Any:
    """Add the pieces of another index that an index lacks, and return it."""
    for key, entry in more.state_dict_metadata.items():
        known = index.state_dict_metadata.setdefault(key, entry)
        if known is not entry:
            known.chunks += [chunk for chunk in entry.chunks if chunk not in known.chunks]
    for at, info in more.storage_data.items():
        index.storage_data.setdefault(at, info)
    return index


def _piece_planner() -> Any:
    """Return DCP's planner without the check that each tensor has all its pieces, since other processes have some."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan

    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            self.global_plan, metadata = create_default_global_save_plan(all_plans)
            (plan,) = self.global_plan
            self.metadata = dataclasses.replace(metadata, planner_data=plan.planner_data)  # mapping of nested keys
            return self.global_plan, self.metadata

    return Planner()


def _with_structure(state: dict[str, Any], structure: str) -> dict[str, Any]:
    section, entry = _STRUCTURE.split(".")
    return {**state, section: {entry: torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8)}}


def commit(path: Path, record: Commit) -> None:
    """Make the data at `path` a checkpoint, by writing COMMIT.json durably and renaming it. Raises OSError."""
    aside = path / f"{COMMIT}.writing"
    _write_durably(aside, record.to_json().encode())
    aside.rename(path / COMMIT)
    _fsync(path)


def marks(path: Path) -> dict[str, FileMark]:
    """Return size and hash of every file of a checkpoint that is not committed yet."""
    return {file.name: _mark(file) for file in sorted(path.iterdir()) if file.is_file()}


def read_commit(directory: Path, name: Name, job_uid: str) -> CheckpointInfo:
    """Return a checkpoint with its record, without reading the data, which `verify` does. Raises CheckpointError."""
    path = directory / name.directory
    try:
        text = (path / COMMIT).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise skipped(name.directory, "it has no COMMIT.json, its writer stopped before it was complete.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise skipped(name.directory, f"its COMMIT.json cannot be read ({error}).") from error
    return CheckpointInfo(name, str(path), parse_commit(text, name, job_uid))


def verify(info: CheckpointInfo) -> None:
    """Compare every file with the record. Raises CheckpointError at the first difference."""
    lacks = {_INDEX} - set(info.commit.files)
    if lacks or not any(file.endswith(".distcp") for file in info.commit.files):
        raise skipped(info.name.directory, f"its COMMIT.json lists no {_INDEX if lacks else 'data'} file.")
    for file, want in info.commit.files.items():
        path = Path(info.path, file)
        try:
            if "/" in file:
                raise skipped(info.name.directory, f"its COMMIT.json names {file}, outside of it.")
            size = path.stat().st_size
            if size != want.size:
                raise skipped(info.name.directory, f"{file} has {size} bytes, {want.size} were committed.")
            if _mark(path) != want:
                raise skipped(info.name.directory, f"{file} is not what was committed (SHA-256 differs).")
        except FileNotFoundError:
            raise skipped(info.name.directory, f"{file} is missing.") from None
        except OSError as error:
            raise skipped(info.name.directory, f"{file} cannot be read ({error}).") from error
        except ValueError as error:
            raise skipped(
                info.name.directory, f"its COMMIT.json names {file!r}, and no file can have that name."
            ) from error


def read_data(path: Path, like: Like | None = None, choose: Choose | None = None) -> trees.Tree:
    """Return the state, with its tensors on the host. Raises CheckpointError.

    - `like(key, shape)` returns a DTensor with this process's split of a tensor, or None. Of a split tensor only its part is read.
    - `choose(tree)` returns the part of a tree that this process needs. The tree has a `stages.Stored` for each tensor.
    """
    contents = Contents(path)
    with _one_sentence(path):
        tree = contents.tree if choose is None else _chosen(path, contents.tree, choose)
    places = {one.key: place for place, one in stages.stored(tree).items()}  # `choose` may have moved a tensor
    tensors = contents.read(places, None if like is None else lambda key, shape: like(places[key], shape))
    whole: trees.Tree = stages.with_tensors(tree, tensors)
    return whole


class Contents:
    """A checkpoint whose tensors can be read a few at a time, for a state that is larger than the memory."""

    def __init__(self, path: Path) -> None:
        """Read the index and the structure. Raises CheckpointError."""
        self._path = path
        self._reader = _reader(path)
        with _one_sentence(self._path):
            self._index = self._reader.read_metadata().state_dict_metadata
            structure = self._load({_STRUCTURE: torch.empty(self._index[_STRUCTURE].size, dtype=torch.uint8)})
            text = bytes(structure[_STRUCTURE].numpy()).decode()
            self.tree = trees.unpack(text, stages.Keys(), are_whole=True)
            """The state, with a `stages.Stored` in place of each tensor."""

    def empty(self, key: str) -> torch.Tensor:
        """Return a tensor without values (device "meta") that has the shape and the dtype of a stored one."""
        with _one_sentence(self._path):
            entry = self._index[key]
            return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def read(self, keys: Iterable[str], like: Like | None = None) -> dict[str, torch.Tensor]:
        """Return stored tensors by their keys. `like` is that of `read_data`, of the stored key. Raises CheckpointError."""
        with _one_sentence(self._path):
            return self._load(
                {
                    key: _target(self._index[key], None if like is None else like(key, tuple(self._index[key].size)))
                    for key in keys
                }
            )

    def _load(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state, storage_reader=self._reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
        return state


@contextlib.contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    """Turn whatever the reading of a checkpoint raises into a CheckpointError. DCP passes on any exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        why = f"cannot be read ({first_line(error)})."
        raise CheckpointError(f"Checkpoint {path.name} {why}", why=why) from error


def _chosen(path: Path, tree: trees.Tree, choose: Choose) -> trees.Tree:
    try:
        return choose(tree)
    except CheckpointError as error:
        raise CheckpointError(f"Checkpoint {path.name} does not fit the script. {error}") from error


def _target(entry: Any, like: torch.Tensor | None) -> torch.Tensor:
    dtype = entry.properties.dtype
    return torch.empty(entry.size, dtype=dtype) if like is None else shards.empty_like(like, dtype)


def job_of(directory: Path, name: Name) -> str | None:
    """Return the UID of the job that began a checkpoint, or None if it is not known."""
    for path in reversed(_paths(directory, name)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (path / _JOB).read_text(encoding="utf-8")
    return None


def delete(directory: Path, name: Name) -> None:
    """Delete a checkpoint. COMMIT.json goes first, so that the rest never counts as a checkpoint. Raises OSError."""
    aside, path = _paths(directory, name)
    with contextlib.suppress(FileNotFoundError):
        (path / COMMIT).unlink()
        _fsync(path)
    for part in (path, aside):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(part)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error. For DCP's wrapper these are of the error inside."""
    for inner, _ in getattr(error, "failures", {}).values():
        return first_line(inner)
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"


def _for_dcp(value: Any) -> Any:
    """Return the tree in a form that DCP can flatten: it finds tensors in dicts and lists, not in tuples."""
    if isinstance(value, trees.TensorPart):
        return shards.whole(value)
    if isinstance(value, dict):
        return {key: _for_dcp(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_for_dcp(item) for item in value]
        plain = isinstance(value, tuple) and not any(isinstance(item, (torch.Tensor, dict, list)) for item in items)
        return tuple(items) if plain else items
    return value


def _enum_member(kind: Any, name: Any) -> Any:
    """Return a member of an enum, in place of the `getattr` by which Python 3.11.0 to 3.11.3 pickles it. Refuses all else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"its index asks for {name!r} of {kind!r}, which is no part of DCP's format")
    return kind[name]


def _reader(path: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("builtins", "getattr"):
                return _enum_member
            if name not in _CLASSES.get(module, ()):
                raise pickle.UnpicklingError(f"its index names {module}.{name}, which is no part of DCP's format")
            return super().find_class(module, name)

    class Reader(FileSystemReader):
        index: Any = None
        """Kept, since a state may be read in many pieces."""

        def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
            if self.index is None:
                with open(path / _INDEX, "rb") as file:
                    self.index = Unpickler(file).load()
            return self.index

        def read_data(self, plan: Any, planner: Any) -> Any:
            with contextlib.ExitStack() as closes:
                streams: dict[str, BinaryIO] = {}
                left = []
                for item in plan.items:
                    info = self.storage_data[item.storage_index]
                    name = info.relative_path
                    if name not in streams:
                        streams[name] = closes.enter_context(open(path / name, "rb"))
                    if not _read_straight(item, info, self._slice_file(streams[name], info), streams[name], planner):
                        left.append(item)
            return super().read_data(dataclasses.replace(plan, items=left), planner)

    return Reader(path)


def _read_straight(item: Any, info: Any, part: Any, stream: BinaryIO, planner: Any) -> bool:
    """Read a whole tensor from the file into its place, or return False if DCP must read it.

    DCP copies each tensor four times on its way, which is most of the time of a restore. `item` and `info` are the tensor's entries
    in DCP's plan and index. `part` is its archive within `stream`, as a file. Raises OSError, and torch.load's exceptions for a
    damaged archive.
    """
    from torch.distributed.checkpoint.planner import LoadItemType

    if item.type == LoadItemType.BYTE_IO or getattr(info, "transform_descriptors", None):
        return False
    place = planner.resolve_tensor(item).detach()
    if place.nbytes < _STRAIGHT_BYTES or place.device.type != "cpu" or not place.is_contiguous():
        return False
    saved = torch.load(part, map_location="meta", weights_only=True)  # reads no values
    is_whole = saved.shape == place.shape and not any(item.storage_offsets) and saved.storage_offset() == 0
    if not is_whole or saved.dtype != place.dtype or not saved.is_contiguous() or saved.is_conj() or saved.is_neg():
        return False
    part.seek(0)
    archive: Any = torch._C.PyTorchFileReader(part)
    if archive.has_record("byteorder") and archive.get_record("byteorder").decode() != sys.byteorder:
        return False
    stream.seek(info.offset + archive.get_record_offset("data/0"))
    values = memoryview(place.view(-1).view(torch.uint8).numpy())
    if stream.readinto(values) != len(values):  # type: ignore[attr-defined]
        raise OSError(f"the file of {item.storage_index.fqn} ends too early")
    planner.commit_tensor(item, place)
    return True


def _mark(file: Path) -> FileMark:
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileMark(stream.tell(), digest)


def _paths(directory: Path, name: Name) -> tuple[Path, Path]:
    """Return the directory in which a checkpoint is written aside, and the one in which it is read."""
    return directory / f"{ASIDE}{name.directory}", directory / name.directory


def _save(state: dict[str, Any], directory: Path, planner: Any = None) -> None:
    """Write a DCP checkpoint of this process, durably."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    save(state, storage_writer=writer, planner=planner, no_dist=True)


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _fsync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
