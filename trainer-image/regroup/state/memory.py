"""The memory tier of a session: when the state is copied to memory that outlives this process, and when it is read back.

The process of local rank 0 of each worker copies, since the state is replicated; where a model is split, each process copies its
part. A thread does it while the next steps compute; how the bytes get to the host is `regroup.checkpoint.staging`'s affair.
Why: docs/design/adr/0021, 0046 and 0073. Where the bytes lie is `slots`' affair, and whether a snapshot is what a generation
continues from is decided in `adoption` and `parts` (rule BACKUP).
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regroup.checkpoint.staging import Copy
from regroup.data import SamplePlan
from regroup.errors import StateError
from regroup.protocol import env, local
from regroup.protocol.snapshot import Snapshot, directory_of
from regroup.protocol.state import StatePair

from .intervals import Interval
from .slots import Slots, SnapshotError, UnusableError, Writing
from .training import CommitRecord, TrainingState

EVERY_S = 10.0
"""Time between two snapshots where nothing else is said (SNAPSHOT_EVERY_SECONDS)."""
WAIT_SHARE = 20
"""Training waits for copies at most one part in so many of the time, whatever was asked for."""
BUSY_SHARE = 2
"""Copies are under way at most one part in so many of the time: they take bandwidth of the memory, and on a CPU its cores."""


class Memory:
    """The memory tier of one process; without SNAPSHOT_DIR, and where another process of the worker copies, it does nothing.

    All methods are for the main thread.
    """

    def __init__(
        self,
        state: TrainingState,
        plan: SamplePlan,
        send: Callable[[Any], None] | None,
        local_rank: int,
        inner: int = 0,
    ) -> None:
        """`send` tells the agent; any thread may call it. None: plain `python`. `inner`: this process's inner index."""
        self._state, self._plan = state, plan
        self._send = send
        self._slots: Slots | None = None
        self.whole_step: int | None = None
        """Newest step whose snapshots make up a whole state: no copy may be written over this process's part of it (rule BACKUP).
        None: the state is not split, so the newest one will do."""
        directory = os.environ.get(env.SNAPSHOT_DIR)
        is_split = plan.layout.size > 1
        self._of_worker: Slots | None = None
        """Where the snapshots lie of what this process holds; None: nowhere."""
        if directory and send is not None:
            self._of_worker = Slots(
                directory_of(Path(directory), local_rank if is_split else 0),
                os.environ.get(env.JOB_UID) or "local",
                int(os.environ.get(env.SNAPSHOT_BYTES) or 0),
                processes=int(os.environ.get(env.LOCAL_WORLD_SIZE) or 1) if is_split else 1,
                place=f"{inner} of {plan.layout}" if is_split else "",
            )
            if is_split or local_rank == 0:
                self._slots = self._of_worker
        every_s = float(os.environ.get(env.SNAPSHOT_EVERY_SECONDS) or EVERY_S)
        self.interval = Interval("Memory snapshots", "spec.memorySnapshot.everySeconds", every_s)
        self._asked_s = 0.0
        """When `due` was last asked, which is before a commit."""
        self._since_s: float | None = None
        """When it was asked for the last copy: from then on the time to the next one counts. A copy begins after the commit, and
        counting from there would leave out every second one of steps that are hardly longer than the interval."""
        self._took_s = 0.0
        """How long the last copy took, from its begin to its end."""
        self._last: Copy | None = None
        """The last copy, which knows how long training has waited for it."""
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._said = ""
        self._versions: list[int] = []
        """Of the parameters, at the last commit: a change between two commits shows in them."""

    @property
    def step(self) -> int | None:
        """Step of the newest complete snapshot, -1 before the first; None: this process takes none."""
        if self._slots is None:
            return None
        newest = self._slots.newest
        return -1 if newest is None else newest.state.step

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot of this process's worker that `restore` would load; None: there is none."""
        return None if self._slots is None else self._slots.newest

    @property
    def last(self) -> Snapshot | None:
        """The newest snapshot, if its process took it as it ended: it is what that process held. None: it is not."""
        return self.newest if self.newest is not None and self.newest.is_last else None

    @property
    def held(self) -> tuple[StatePair, ...]:
        """The states of all complete snapshots."""
        return () if self._slots is None else tuple(one.state for one in self._slots.held)

    @property
    def problem(self) -> str | None:
        """What keeps this process from taking snapshots, one sentence; empty: nothing. None: it takes none."""
        return None if self._slots is None else self._failure

    @property
    def late(self) -> str | None:
        """Why snapshots come less often than was asked for, one sentence; empty: they do not. None: this process takes none."""
        return None if self._slots is None else self.interval.sentence

    def due(self, now_s: float) -> bool:
        """Return whether it is time for a snapshot. now_s: monotonic seconds."""
        if self._slots is None or self._copies():
            return False
        self._asked_s = now_s
        return self._since_s is None or now_s - self._since_s >= self._apart_s

    @property
    def _apart_s(self) -> float:
        """Least time between the starts of two snapshots, by what the last one took."""
        waited_s = 0.0 if self._last is None else self._last.waited_s
        return max(self.interval.asked_s, BUSY_SHARE * self._took_s, WAIT_SHARE * waited_s)

    def committed(self) -> None:
        """The state has just been committed, or adopted: from here on nothing but a commit may change it."""
        if self._slots is not None:
            self._versions = self._versions_now()

    def take(self) -> None:
        """Copy the state that was just committed, in a thread. What changes before the next commit is set aside now."""
        if self._slots is None or self._state.pair is None:
            return
        self.settle()
        self._since_s, began_s = self._asked_s, time.monotonic()
        copy = self._begin(is_last=False)
        if copy is None:
            return
        self.interval.began(began_s, self._why_not_earlier())
        self._last = copy.tensors
        self._thread = threading.Thread(target=self._run, args=(copy, began_s), name="regroup-snapshot", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started
            self._thread = None
            copy.tensors.abandon()
            raise

    def _why_not_earlier(self) -> str:
        waited_s = 0.0 if self._last is None else self._last.waited_s
        if WAIT_SHARE * waited_s > max(self.interval.asked_s, BUSY_SHARE * self._took_s):
            return f"training waits {waited_s:.2g} s for a copy, and may do so for a twentieth of the time"
        if BUSY_SHARE * self._took_s > self.interval.asked_s:
            return f"a copy takes {self._took_s:.2g} s, and copies may run for half of the time"
        return "a snapshot is taken after a step, once all workers find it due"

    def settle(self) -> None:
        """Wait until the last copy is complete or has failed. Training waits for less: until the copy has been read (`Staging`)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._say_failure()

    def take_last(self) -> None:
        """This process ends and commits nothing more: copy what it holds, if that is a state."""
        if self._slots is None:
            return
        self.settle()
        if self._state.pair is None:
            return
        names = [name for name, _ in self._state.model.named_parameters()]
        changed = [name for name, old, now in zip(names, self._versions, self._versions_now()) if old != now]
        if changed:
            self._failure = _changed_outside(f"model.{changed[0]}")
            self._say_failure()
            return
        copy = self._begin(is_last=True)
        if copy is not None:
            self._run(copy, time.monotonic())
        self._say_failure()

    def restore(self, wanted: StatePair | None = None) -> None:
        """Load the snapshot of a state, None: the newest, into the script's objects; it has no name before it is adopted.

        Raises StateError. A snapshot that is damaged, or does not fit the script, is removed, so that the next process goes on
        without it. Anything else, such as too little memory for the moment, leaves it as it is.
        """
        assert self._slots is not None
        self.settle()
        self._load(self._slots, next(one for one in self._slots.held if wanted in (None, one.state)))

    def restore_exactly(self, step: int, adopted: int) -> StatePair | None:
        """As `restore`, the state after `step` steps that was adopted in generation `adopted`; return its name, None where there is
        no snapshot of it in the worker. A process that takes none loads that of its worker's local rank 0: they have one state."""
        if self._of_worker is None:
            return None
        self.settle()
        self._of_worker.look()
        held = self._of_worker.held
        found = next((one for one in held if (one.state.step, one.adopted) == (step, adopted)), None)
        if found is None:
            return None
        self._load(self._of_worker, found)
        return found.state

    def _load(self, slots: Slots, found: Snapshot) -> None:
        try:
            tree = slots.load(found)
            misfit = self._state.misfit(tree)
            if misfit is not None:
                raise UnusableError(
                    f"The memory snapshot does not fit this script. {misfit} Run one script in all workers."
                )
            said = found.description["said"]
        except UnusableError:
            slots.discard(found)
            self._tell()
            raise
        self._state.load(tree)
        self._plan.digest(found.state.step, known=(found.state.step, said["digest"]))
        self._state.record = None if said["record"] is None else CommitRecord.from_json(said["record"])

    # --- one copy ----------------------------------------------------------------------------------------------------

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self._state.model.parameters()]

    def _copies(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _begin(self, *, is_last: bool) -> "_Copy | None":
        state = self._state
        assert state.pair is not None
        try:
            structure, tensors = state.packed()
        except StateError as error:
            self._failure = str(error)
            self._say_failure()
            return None
        copy = state.staging.start(tensors, changes=not is_last)
        digest = self._plan.digest(state.pair.step)
        return _Copy(copy, structure, self.whole_step, state.pair, state.adopted, is_last, digest, state.record)

    def _run(self, copy: "_Copy", began_s: float) -> None:
        """Fill the slot and make it the newest; in a thread, or at the end of the process."""
        assert self._slots is not None
        try:
            writing = copy.fill(self._slots)
            # Waits for the device, and training does not.
            said = {"digest": copy.digest, "record": None if copy.record is None else copy.record.to_json()}
            self._slots.complete(writing, state=copy.pair, adopted=copy.adopted, is_last=copy.is_last, **said)
            self._failure = ""
        except Exception as error:  # in a thread: whatever it is, the next copy must hear of it
            self._failure = (
                str(error) if isinstance(error, SnapshotError) else f"The memory snapshot failed: {error!r}."
            )
            return
        finally:
            self._took_s = time.monotonic() - began_s
        self._tell()

    def _tell(self) -> None:
        if self._slots is None or self._send is None:
            return
        newest = self._slots.newest
        said = (
            local.Snapshotted(None)
            if newest is None
            else local.Snapshotted(newest.state, newest.adopted, newest.is_last)
        )
        self._send(said)

    def _say_failure(self) -> None:
        if self._failure and self._failure != self._said:
            print(self._failure, flush=True)
        self._said = self._failure


def _changed_outside(name: str) -> str:
    return (
        f"The memory snapshot was dropped: {name} was changed outside step.commit(). Change the state in "
        "step.commit(before=..., after=...) only."
    )


@dataclass(frozen=True)
class _Copy:
    """One snapshot while it is taken: of the state `pair`, which was adopted in generation `adopted`."""

    tensors: Copy
    structure: str
    keep_step: int | None
    """See `Memory.whole_step`, as it was when the copy began."""
    pair: StatePair
    adopted: int
    is_last: bool
    digest: str
    record: CommitRecord | None

    def fill(self, slots: Slots) -> Writing:
        """Return the slot with all tensors in it. Raises SnapshotError."""
        made: list[Writing] = []

        def room(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            made.append(slots.begin(self.structure, tensors, self.keep_step))
            return made[0].places

        self.tensors.fill(room)
        if self.tensors.changed is not None:
            raise SnapshotError(_changed_outside(self.tensors.changed))
        return made[0]
