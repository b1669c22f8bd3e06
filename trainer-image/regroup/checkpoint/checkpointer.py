"""What a session holds of the durable tier: copy and write in the background, never crash training.

Owns the writer thread (one write at a time, then what is to be pruned), the host memory it copies to (`staging`), and the sentences
about what went wrong. Which rank writes, when the state is consistent and which ranks have committed the step is the
caller's (`regroup.transaction`); with replicated data parallelism the process of rank 0 writes for all.

A write: copy to host memory -> data aside -> fsync -> rename -> wait until every rank has acknowledged the step -> COMMIT.json
(rule CKPT).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
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
    """The newest checkpoint that may be read, or None; and one sentence for each newer one that was passed over."""

    info: CheckpointInfo | None
    skipped: tuple[str, ...]


class _Copied(NamedTuple):
    """A state in host memory. `changed`: name of a tensor that was changed while it was copied; None: there is none."""

    tensors: Mapping[str, torch.Tensor]
    changed: str | None


@dataclass(frozen=True)
class Origin:
    """The generation that a checkpoint is written in, and where that began."""

    generation: int
    uid: str
    parent_generation: int
    start_step: int


class Checkpointer:
    """The checkpoints of one job in one directory. Methods are called from one thread, the trainer's; none is collective."""

    def __init__(self, directory: str, every_s: float, job_uid: str, staging: Staging | None = None) -> None:
        """every_s: least time between the starts of two writes. staging: what copies the state; None: it is not changed while it
        is copied."""
        store.prepare()
        self._directory = Path(directory)
        self._every_s = every_s
        self._job_uid = job_uid
        self._started_s: float | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._word: tuple[Sequence[str], int] | None = None
        self._next: tuple[Callable[[], None], str] | None = None
        """The write that begins when the one under way has been committed, and what it does."""
        self._cancelled: list[threading.Event] = []
        """Of the last two writes, the newest last."""
        self._staging = staging or Staging()
        self._host_of: threading.Event | None = None
        """The write that uses the host memory still; None: it may be overwritten."""
        self._host: dict[str, torch.Tensor] = {}
        """The memory of the last copy: fresh pages would cost more than a copy."""
        self._must_wait = False
        """The script changes the state between two commits: the caller waits for each copy."""
        self._again = False
        self._last: CheckpointRef | None = None
        self._problem: str | None = None
        self._failure: str | None = None
        self._doing, self._began_s = "", 0.0
        """What the writer thread does, while it is busy, and since when (monotonic seconds), less its waits for other ranks."""
        self._awaits_ranks = False
        """The data is durable, and the next commit is awaited: that takes a step, and the volume has no part in it."""
        self.longest_s: float | None = None
        """How long the volume took for the slowest write that came to an end, whatever end; None: there was none."""

    @property
    def last_committed(self) -> CheckpointRef | None:
        """The newest checkpoint that this process has committed: what status.checkpoint may name next."""
        return self._last

    @property
    def problem(self) -> str | None:
        """One sentence: why the last write or deletion came to nothing. None: it did not fail, or none was tried."""
        return self._problem

    @property
    def failure(self) -> str | None:
        """The same, where there is something to repair: the volume, or too little memory. Not for a generation that ended in
        between."""
        return self._failure

    @property
    def busy(self) -> bool:
        """True while the writer thread writes or deletes."""
        return self._busy

    def hangs(self, bound_s: float) -> str | None:
        """Return one sentence if the writer thread has been at one write or deletion for longer than `bound_s`."""
        doing, began_s = self._doing, self._began_s
        if not self._busy or self._awaits_ranks or time.monotonic() - began_s <= bound_s:
            return None
        return (
            f"{doing} has taken more than {bound_s:g} s: the volume of {self._directory} does not answer. Check the volume, "
            "and its mount on this worker's node."
        )

    def due(self, now_s: float) -> bool:
        """Return True when it is time to `save`. now_s: any monotonic clock; the first call only starts it."""
        if self._started_s is None:
            self._started_s = now_s
        # A write whose data is durable waits for the next commit, at which the caller asks this. If it had to be over by then, only
        # every second one of steps that are longer than the interval would be saved.
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
        """Start to copy the state to host memory and to write it; `Staging.settle` waits for the copy. False: the data of the last
        one is not durable yet, and it was not cancelled. While the last one waits for its ranks, or old checkpoints are being
        deleted, the new one is copied, and waits for the writer thread.

        origin: the generation that this process is a member of; pair: the state's; digest: of the samples (SamplePlan.digest).
        `acknowledged` is asked from another thread, about 50 times a second, once the data is durable: True when every rank has
        committed this step; None: there is no other rank. It is asked until that is so, however long a step takes, or until
        `cancel`: the caller calls that where nobody will commit on this state. part: (inner index, size) in a model group: each of
        its processes saves its own part of one state at the same step, on one volume, and the first one makes the checkpoint of
        them. It waits `parts_within_s` for the parts of the others. What goes wrong is in `problem`; nothing is raised but for a
        tree that cannot be saved (CheckpointError, which names the entry).
        """
        if self._host_of is not None:
            if not self._host_of.is_set():
                return False
            # The write that was cancelled reads its host memory until it ends. In a model group the others write their parts now.
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
                if self._busy:
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
        """Have the write that runs, and one that waits for it, end without a COMMIT, whatever is acknowledged from now on: their
        state was replaced.

        One that was found acknowledged before this call is committed still.
        """
        for cancelled in self._cancelled:
            cancelled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the writer thread has nothing to do; return False if it still has after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def newest(
        self, lineage: Sequence[LineageEntry], named: CheckpointRef | None = None, *, is_all: bool = True
    ) -> Newest:
        """Return the newest checkpoint that may be read and whose every byte is as committed; reads it once for that.

        lineage, named: the generation document's. `is_all`: no survivor holds a state, so that the one that is named may be read
        although it was left behind, where no other may. Raises nothing: a directory that cannot be listed is a sentence.
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
        """Return the checkpoint at `path`, whatever job wrote it, as what this job begins with; reads all of it for that.

        fingerprint: of what the job's first generation has read there (`Commit.fingerprint`); None: this one is the first. Raises
        ImportMissing where there is none, CheckpointError for one that cannot be read, is damaged or another one; a sentence each.
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
        """Return a checkpoint by its directory's name, as `newest` found it in another process. Raises CheckpointError."""
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
        """Return the tree that was saved, tensors on the host, for the caller's load_state_dict.

        into: the script's own tree; its "model" is compared by name and shape before anything is touched. like, choose: see
        `store.read_data`. Raises CheckpointError, one sentence.
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
        """Have the writer thread delete what the operator's word allows (`selection.prunable`). Does not block.

        keep: the command's; generation: the one it was heard in. Of several words the newest counts: it keeps no more of
        what is old. A directory that cannot be deleted is left for the next word, and is in `problem`.
        """
        with self._lock:
            self._word = (keep, generation)
            if self._busy:
                return  # the thread comes to it
        self._start(None, _DELETING)

    # --- the writer thread -------------------------------------------------------------------------------------------

    def _start(self, write: Callable[[], None] | None, doing: str) -> None:
        self._doing, self._began_s, self._busy = doing, time.monotonic(), True
        # Daemon: a trainer that is told to exit does not wait for a volume that hangs; the reader skips the half.
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
                    self._busy = False
                    return
            # `hangs` reads what is done before it reads since when, so the time is set first.
            if word is not None:  # first: where each step is saved, a write always waits
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
            self._problem = f"Old checkpoints in {self._directory} cannot be deleted ({error.strerror})."
            self._failure = self._problem

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
            failed = copied.exception()  # comes when the copy has been read, or has failed
            if failed is not None:
                self._problem = self._failure = (
                    f"Checkpoint {name.directory} was not written: the state could not be copied to host memory "
                    f"({store.first_line(failed)}). Raise the container's memory limit if it lacks memory; training goes on."
                )
                return
            tensors, changed = copied.result()
            if changed is not None:
                self._problem = (
                    f"Checkpoint {name.directory} is copied again, and training waits for each copy from now on: {changed} "
                    "was changed outside step.commit(). Change the state in step.commit(before=..., after=...) only."
                )
                self._must_wait = self._again = True
                return
            committed, _ = store.names(self._directory)
            why = selection.unwelcome(self._ours(committed), name.generation)
            if why is None and cancelled.is_set():  # while it waited for the write before it
                why = _ENDED
            if why is None and name not in committed:
                inner, size = part or (0, 1)
                began = inner == 0
                if part is None:
                    path = store.write_data(self._directory, name, self._job_uid, structure, tensors)
                else:
                    store.write_part(self._directory, name, self._job_uid, inner, structure, tensors)
                    if inner != 0:
                        self._problem = self._failure = None
                        return
                    why = self._await_parts(name, size, cancelled, parts_within_s)
                    if why is None:
                        path = store.join_parts(self._directory, name, size)
                self._release(cancelled)
                why = why or self._await_all(acknowledged, cancelled)
                if why is None:
                    store.commit(path, record.with_files(store.marks(path)))
                else:
                    store.delete(self._directory, name)
            if why is None:
                self._last = CheckpointRef(name.generation, name.step, name.directory)
                self._problem = self._failure = None
            else:
                self._problem = f"Checkpoint {name.directory} was not committed: {why}"
        except BaseException as error:  # DCP's exception is no Exception; whatever it is, training must not die of it
            self._problem = (
                f"Checkpoint {name.directory} could not be written to {self._directory} ({store.first_line(error)}). "
                f"Check the volume's space and permissions; training goes on without it."
            )
            self._failure = self._problem
            if began:
                with contextlib.suppress(OSError):
                    store.delete(self._directory, name)
        finally:
            self._release(cancelled)

    def _release(self, cancelled: threading.Event) -> None:
        """A write, known by its event, has no more use for the host copies. The next one may have taken them since."""
        if self._host_of is cancelled:
            self._host_of = None

    def _copy(self, copy: Copy, copied: "Future[_Copied]") -> None:
        """Copy the tensors to host memory; in a thread."""

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
        except BaseException as error:  # the writer says so
            copied.set_exception(error)

    def _await_parts(self, name: Name, size: int, cancelled: threading.Event, within_s: float) -> str | None:
        """Return None when every process of the model group has written its part, else the sentence why not.

        All began to write after the same commit, so this takes as long as their volume does, whatever a step takes.
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
                self._failure = f"Checkpoint {name.directory} was not committed: {why}"
                return why
            cancelled.wait(0.02)
        return None

    def _await_all(self, acknowledged: Callable[[], bool] | None, cancelled: threading.Event) -> str | None:
        """Return None when every rank has acknowledged, which the next commit shows, else the sentence why not.

        Without a bound: a step takes as long as it takes. `cancel` ends the wait where there will be no next commit.
        """
        began_s, self._awaits_ranks = time.monotonic(), True
        try:
            while True:
                # Asked before it is looked at: what is acknowledged after a cancel is a step of another state.
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
