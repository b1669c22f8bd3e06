"""Writes and reads the checkpoints of a session. Copies and writes run in the background, and never crash training.

Owns the writer thread, which makes one write or deletion at a time, the host memory of the copies, and the sentences about
failures. The caller (`regroup.transaction`) decides which rank writes, when the state is consistent, and which steps all
ranks have committed. With replicated data parallelism the process of rank 0 writes for all.

A write (rule CKPT):

    copy to host memory -> data aside -> fsync -> rename -> wait until every rank has acknowledged the step -> COMMIT.json
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regroup.protocol.document import CheckpointRef, LineageEntry
from regroup.protocol.state import StatePair

from . import selection, store
from .errors import CheckpointError, ImportMissing
from .selection import CheckpointInfo, Commit, Name, name_of
from .staging import Copy, Staging
from .tree import Tree, differences, pack

_DELETING = "Deleting old checkpoints"
_ENDED = "its generation ended before every rank had committed the step."
_NAME_ONE = "See `regroup checkpoint list DIR`, and name one that is complete in spec.checkpoint.resumeFrom."


class Newest(NamedTuple):
    """The newest checkpoint that may be read, or None, and a sentence for each newer one that was passed over."""

    info: CheckpointInfo | None
    skipped: tuple[str, ...]


class _Copied(NamedTuple):
    """A state in host memory. `changed` names a tensor that was changed during the copy; None: there is none."""

    tensors: Mapping[str, torch.Tensor]
    changed: str | None


@dataclass(frozen=True)
class Origin:
    """The generation that writes a checkpoint, and its first step."""

    generation: int
    uid: str
    parent_generation: int
    start_step: int


class Checkpointer:
    """The checkpoints of one job in one directory. The trainer's thread calls all methods; none is collective."""

    def __init__(self, directory: str, every_s: float, job_uid: str, staging: Staging | None = None) -> None:
        """`every_s` is the least time between the starts of two writes. `staging` copies the state; a test may leave it out."""
        store.prepare()
        self._directory = Path(directory)
        self._every_s = every_s
        self._job_uid = job_uid
        self._started_s: float | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.busy = False
        """The writer thread writes or deletes."""
        self._word: tuple[Sequence[str], int] | None = None
        self._next: tuple[Callable[[], None], str] | None = None
        """Write that follows the present one, and its description for `hangs`."""
        self._cancelled: list[threading.Event] = []
        """Events that cancel the last two writes, the newest last."""
        self._staging = staging or Staging()
        self._host_of: threading.Event | None = None
        """Event of the write that still uses the host memory; None: the memory may be overwritten."""
        self._host: dict[str, torch.Tensor] = {}
        """Host memory of the last copy. It is used again, since fresh pages cost more than a copy."""
        self._must_wait = False
        """The script changes the state between two commits, so `save` waits for each copy."""
        self._again = False
        """The last copy failed because the state was changed, so the next `due` is True."""
        self.last_committed: CheckpointRef | None = None
        """Newest checkpoint that this process has committed, which status.checkpoint may name next."""
        self.problem: str | None = None
        """Sentence on why the last write or deletion came to nothing; None: it did not, or none was tried."""
        self.failure: str | None = None
        """Sentence on a failure that needs a repair, such as of the volume. None if a write only ended with its generation."""
        self._doing, self._began_s = "", 0.0
        """Description of the writer thread's work, and the monotonic time of its begin, moved on by waits for other ranks."""
        self._awaits_ranks = False
        """The data is durable and the writer waits for the next commit, which takes a step and does not depend on the volume."""
        self.longest_s: float | None = None
        """Duration of the slowest write so far, without waits for ranks; None: there was none. Failed writes count."""

    def hangs(self, bound_s: float) -> str | None:
        """Return a sentence if one write or deletion has taken longer than `bound_s`, else None."""
        doing, began_s = self._doing, self._began_s
        if not self.busy or self._awaits_ranks or time.monotonic() - began_s <= bound_s:
            return None
        return (
            f"{doing} has taken more than {bound_s:g} s: the volume of {self._directory} does not answer. Check the volume, "
            "and its mount on this worker's node."
        )

    def due(self, now_s: float) -> bool:
        """Return whether it is time to `save`. `now_s` is a monotonic time, and the first call starts the interval."""
        if self._started_s is None:
            self._started_s = now_s
        # A write whose data is durable waits for the next commit, at which the caller asks this. If it had to be over by then, only
        # every second step would be saved, with steps longer than the interval.
        if self._host_of is not None or (now_s - self._started_s < self._every_s and not self._again):
            return False
        self._started_s = now_s
        return True

    def save(
        self,
        tree: Tree,
        *,
        pair: StatePair,
        origin: Origin,
        digest: str = "",
        acknowledged: Callable[[], bool] | None = None,
        part: tuple[int, int] | None = None,
        parts_within_s: float = 300.0,
    ) -> bool:
        """Start to copy the state to host memory and to write it. `Staging.settle` waits for the copy.

        Returns False, and starts nothing, if the data of the last write is not durable yet and the write was not cancelled. If the
        writer thread waits for ranks or deletes, the state is copied now and written afterwards. Raises CheckpointError for a tree
        that cannot be saved. All other failures are in `problem`.

        - `pair`, `digest`: name of the state, and digest of its samples (SamplePlan.digest)
        - `origin`: generation of which this process is a member
        - `acknowledged()`: returns whether every rank has committed this step; None: there is no other rank. The writer thread
          calls it about 50 times a second, once the data is durable, until it is True or until `cancel`. The caller must call
          `cancel` if nobody will commit on this state.
        - `part`: (inner index, size) in a model group. Each of its processes saves its part of one state at the same step, on one
          volume. The first process joins them, and waits `parts_within_s` for the parts of the others.
        """
        if self._host_of is not None:
            if not self._host_of.is_set():
                return False
            # The cancelled write reads its host memory until it ends. In a model group the others write their parts now.
            self._host = {}
        structure, tensors = pack(tree)
        copy = self._staging.start(tensors)
        record = Commit(
            job_uid=self._job_uid,
            generation=origin.generation,
            step=pair.step,
            state_generation=pair.generation,
            parent_generation=origin.parent_generation,
            start_step=origin.start_step,
            digest=digest,
        )
        cancelled = self._host_of = threading.Event()
        self._cancelled = [*self._cancelled[-1:], cancelled]
        name = name_of(origin.generation, pair.step, origin.uid)
        self._again = False
        copied: Future[_Copied] = Future()
        write = partial(self._write, name, structure, copied, record, acknowledged, cancelled, part, parts_within_s)
        doing = f"Writing checkpoint {name.directory}"
        try:
            # In a thread of its own: the writer may wait for the next commit, which waits for this copy.
            threading.Thread(target=self._copy, args=(copy, copied), name="regroup-copy", daemon=True).start()
            with self._lock:
                if self.busy:
                    self._next = write, doing
                else:
                    self._start(write, doing)
        except RuntimeError:  # no thread can be started
            copy.abandon()
            self._release(cancelled)
            raise
        if self._must_wait:
            copy.wait_read()
        return True

    def cancel(self) -> None:
        """End the present write, and one that waits for it, without a COMMIT, because their state was replaced.

        A write that was already found acknowledged is committed all the same.
        """
        for cancelled in self._cancelled:
            cancelled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the writer thread has nothing to do. Returns False if it is still busy after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def newest(
        self, lineage: Sequence[LineageEntry], named: CheckpointRef | None = None, *, is_all: bool = True
    ) -> Newest:
        """Return the newest checkpoint that may be read, after it was verified byte by byte. Raises nothing.

        - `lineage`, `named`: from the generation document
        - `is_all`: no survivor holds a state. If no other may be read, the one that the status names is read although a later
          generation has left it behind.
        """
        skipped: list[str] = []
        try:
            committed, unfinished = store.names(self._directory)
        except OSError as error:
            return Newest(None, (f"Checkpoints in {self._directory} cannot be listed ({error.strerror}).",))
        found = left_behind = None
        for name in sorted({*committed, *unfinished}, reverse=True):
            try:
                info = store.read_commit(self._directory, name, self._job_uid)
                why = selection.refusal(name, lineage, named)
                if why is not None and is_all and selection.is_named(name, named):
                    left_behind = info
                    continue
                if why is not None:
                    raise CheckpointError(why)
                store.verify(info)
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            found = info
            break
        if found is None and left_behind is not None:
            try:
                store.verify(left_behind)
                found = left_behind
            except CheckpointError as error:
                skipped.append(str(error))
        if named is not None and all(named.directory != name.directory for name in [*committed, *unfinished]):
            skipped.append(f"The job's status names checkpoint {named.directory}, which is not in {self._directory}.")
        return Newest(found, tuple(skipped))

    def imported(self, path: str, fingerprint: str | None = None) -> CheckpointInfo:
        """Return the checkpoint at `path`, of any job, as the begin of this job, after it was verified byte by byte.

        `fingerprint` is that of the checkpoint which the job's first generation has read (`Commit.fingerprint`), None in that
        generation. Raises ImportMissing if there is no checkpoint, and CheckpointError if it is damaged, cannot be read, or was
        replaced.
        """
        directory, name = Path(path).parent, selection.parse_name(Path(path).name)
        if name is None:
            raise ImportMissing(f"{path} is not the name of a checkpoint. {_NAME_ONE}")
        try:
            has_directory = Path(path) in directory.iterdir()
            is_there = has_directory and Path(path, store.COMMIT) in Path(path).iterdir()
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be listed ({error.strerror}).") from error
        if not is_there:
            what = "lacks COMMIT.json, so it is not complete" if has_directory else "does not exist"
            raise ImportMissing(f"Checkpoint {path}, from which the job is to resume, {what}. {_NAME_ONE}")
        info = store.read_commit(directory, name, store.job_of(directory, name) or "")
        store.verify(info)
        info = selection.imported(info)
        if fingerprint not in (None, info.commit.fingerprint):
            raise CheckpointError(
                f"{path} was replaced after the job had begun with it: its record has SHA-256 {info.commit.fingerprint[:12]}, not "
                f"{str(fingerprint)[:12]}."
            )
        return info

    def info_of(self, directory: str) -> CheckpointInfo:
        """Return the checkpoint with this directory name, which `newest` has found in another process. Raises CheckpointError."""
        name = selection.parse_name(directory)
        if name is None:
            raise CheckpointError(f"{directory} is not the name of a checkpoint.")
        return store.read_commit(self._directory, name, self._job_uid)

    def load(
        self,
        info: CheckpointInfo,
        into: Mapping[str, Any] | None = None,
        like: store.Like | None = None,
        choose: store.Choose | None = None,
    ) -> Tree:
        """Return the saved tree, with tensors on the host, for the caller's load_state_dict. Raises CheckpointError.

        `into` is the script's own tree, whose "model" must fit by name and shape. `store.read_data` explains `like` and `choose`.
        """
        tree = store.read_data(Path(info.path), like, choose)
        why = differences(tree, into["model"]) if into is not None else None
        if why is not None:
            raise CheckpointError(
                f"Checkpoint {info.name.directory} does not fit the script. {why} Run the script that wrote it, "
                f"or name another checkpoint directory."
            )
        return tree

    def prune(self, keep: Sequence[str], generation: int) -> None:
        """Have the writer thread delete the checkpoints that the operator's word allows (`selection.prunable`). Does not block.

        `keep` is the command's, which was heard in `generation`. Only the newest of several words counts, since it allows all that
        earlier ones did. A failure is in `problem`, and the next word tries again.
        """
        with self._lock:
            self._word = (keep, generation)
            if self.busy:
                return  # the thread reads the word after its present work
        self._start(None, _DELETING)

    # --- the writer thread -------------------------------------------------------------------------------------------

    def _start(self, write: Callable[[], None] | None, doing: str) -> None:
        self._doing, self._began_s, self.busy = doing, time.monotonic(), True
        # Daemon: a trainer that must exit does not wait for a volume that hangs. Readers skip an unfinished checkpoint.
        self._thread = threading.Thread(target=self._work, args=(write,), name="regroup-checkpoint", daemon=True)
        self._thread.start()

    def _work(self, write: Callable[[], None] | None) -> None:
        while True:
            if write is not None:
                write()
                self.longest_s = max(self.longest_s or 0.0, time.monotonic() - self._began_s)
            with self._lock:
                word, self._word = self._word, None
                following, self._next = self._next, None
                if word is None and following is None:
                    self.busy = False
                    return
            # `hangs` reads the description before the time, so the time is set first.
            if word is not None:  # before the next write: if each step is saved, a write always waits
                self._began_s, self._doing = time.monotonic(), _DELETING
                self._prune(*word)
            write = None
            if following is not None:
                self._began_s = time.monotonic()
                write, self._doing = following

    def _prune(self, keep: Sequence[str], generation: int) -> None:
        try:
            committed, unfinished = store.names(self._directory)
            parts = selection.prunable(self._ours(committed), self._ours(unfinished), keep, generation)
            for name in [name for part in parts for name in part]:
                store.delete(self._directory, name)
        except OSError as error:
            self.problem = f"Old checkpoints in {self._directory} cannot be deleted ({error.strerror})."
            self.failure = self.problem

    def _ours(self, names: Sequence[Name]) -> list[Name]:
        return [name for name in names if store.job_of(self._directory, name) == self._job_uid]

    def _write(
        self,
        name: Name,
        structure: str,
        copied: "Future[_Copied]",
        record: Commit,
        acknowledged: Callable[[], bool] | None,
        cancelled: threading.Event,
        part: tuple[int, int] | None,
        parts_within_s: float,
    ) -> None:
        began = False
        try:
            failed = copied.exception()  # blocks until the copy is complete or has failed
            if failed is not None:
                self.problem = self.failure = (
                    f"Checkpoint {name.directory} was not written: the state could not be copied to host memory "
                    f"({store.first_line(failed)}). Raise the container's memory limit if it lacks memory; training goes on."
                )
                return
            tensors, changed = copied.result()
            if changed is not None:
                self.problem = (
                    f"Checkpoint {name.directory} is copied again, and training waits for each copy from now on: {changed} "
                    "was changed outside step.commit(). Change the state in step.commit(before=..., after=...) only."
                )
                self._must_wait = self._again = True
                return
            committed, _ = store.names(self._directory)
            why = selection.unwelcome(self._ours(committed), name.generation)
            if why is None and cancelled.is_set():  # cancelled while it waited for the write before it
                why = _ENDED
            if why is None and name not in committed:
                inner, size = part or (0, 1)
                began = inner == 0
                if part is None:
                    path = store.write_data(self._directory, name, self._job_uid, structure, tensors)
                else:
                    store.write_part(self._directory, name, self._job_uid, inner, structure, tensors)
                    if inner != 0:
                        self.problem = self.failure = None
                        return
                    why = self._await_parts(name, size, cancelled, parts_within_s)
                    if why is None:
                        path = store.join_parts(self._directory, name, size)
                self._release(cancelled)
                why = why or self._await_all(acknowledged, cancelled)
                if why is None:
                    store.commit(path, replace(record, files=store.marks(path)))
                else:
                    store.delete(self._directory, name)
            if why is None:
                self.last_committed = CheckpointRef(name.generation, name.step, name.directory)
                self.problem = self.failure = None
            else:
                self.problem = f"Checkpoint {name.directory} was not committed: {why}"
        except BaseException as error:  # DCP's exception is a BaseException; training must not die of any error here
            self.problem = (
                f"Checkpoint {name.directory} could not be written to {self._directory} ({store.first_line(error)}). "
                f"Check the volume's space and permissions; training goes on without it."
            )
            self.failure = self.problem
            if began:
                with contextlib.suppress(OSError):
                    store.delete(self._directory, name)
        finally:
            self._release(cancelled)

    def _release(self, cancelled: threading.Event) -> None:
        """Free the host memory after the write with this event, unless the next write has taken it already."""
        if self._host_of is cancelled:
            self._host_of = None

    def _copy(self, copy: Copy, copied: "Future[_Copied]") -> None:
        """Copy the tensors to host memory. Runs in a thread of its own."""

        def room(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            old = self._host
            fits = {key for key in tensors.keys() & old.keys() if _kind(tensors[key]) == _kind(old[key])}
            self._host = old = {key: old[key] for key in fits}  # what does not fit is freed before there is more
            self._host = {
                key: old[key] if key in fits else torch.empty(one.shape, dtype=one.dtype)
                for key, one in tensors.items()
            }
            return self._host

        try:
            copy.fill(room)
            copied.set_result(_Copied(self._host, copy.changed))
        except BaseException as error:  # the writer reports it
            copied.set_exception(error)

    def _await_parts(self, name: Name, size: int, cancelled: threading.Event, within_s: float) -> str | None:
        """Wait until every process of the model group has written its part. Returns a sentence if that fails, else None.

        All began to write after the same commit, so the wait depends on their volume and not on the length of a step.
        """
        deadline_s = time.monotonic() + within_s
        while not store.has_parts(self._directory, name, size):
            if cancelled.is_set():
                return "its generation ended before every process of the model group had written its part."
            if time.monotonic() > deadline_s:
                why = (
                    f"not every process of the model group had written its part after {within_s:g} s. Check the volume of "
                    f"{self._directory}, its mounts on the nodes of the first model group's workers, and their logs."
                )
                self.failure = f"Checkpoint {name.directory} was not committed: {why}"
                return why
            cancelled.wait(0.02)
        return None

    def _await_all(self, acknowledged: Callable[[], bool] | None, cancelled: threading.Event) -> str | None:
        """Wait until every rank has acknowledged the step, as the next commit shows. Returns a sentence after `cancel`, else None.

        The wait has no bound, since a step has none. `cancel` ends it if there will be no next commit.
        """
        began_s, self._awaits_ranks = time.monotonic(), True
        try:
            while True:
                # Asked before the event is read: a step that is acknowledged after a cancel is one of another state.
                known = acknowledged is None or acknowledged()
                if cancelled.is_set():
                    return _ENDED
                if known:
                    return None
                cancelled.wait(0.02)
        finally:
            self._began_s += time.monotonic() - began_s
            self._awaits_ranks = False


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
