"""The memory tier of a session: copies the state to memory that outlives this process, and reads it back.

The process of local rank 0 of each worker copies, since the state is replicated. If the model is split, each process copies its
part. A thread copies while the next steps compute: `regroup.checkpoint.staging` brings the bytes to the host, `slots` has their
files. `adoption` and `parts` decide whether a generation continues from a snapshot (rule BACKUP). The reasons are in
docs/design/adr/0021, 0046 and 0073.
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
"""Time between two snapshots, unless SNAPSHOT_EVERY_SECONDS is set."""
WAIT_SHARE = 20
"""Training waits for copies at most 1/20 of the time, whatever interval was asked for."""
BUSY_SHARE = 2
"""Copies run at most 1/2 of the time, since they use bandwidth of the memory, and on a CPU its cores."""


class Memory:
    """The memory tier of one process. All methods are for the main thread.

    It does nothing without SNAPSHOT_DIR, and if another process of the worker copies the state.
    """

    def __init__(
        self,
        state: TrainingState,
        plan: SamplePlan,
        send: Callable[[Any], None] | None,
        local_rank: int,
        inner: int = 0,
    ) -> None:
        """`send` sends a message to the agent, from any thread; None in plain `python`. `inner` is this process's inner index."""
        self._state, self._plan = state, plan
        self._send = send
        self._slots: Slots | None = None
        self.whole_step: int | None = None
        """Newest step of which every part of the state is in a snapshot. This process's part of it must stay (rule BACKUP).
        None: the state is not split, and the newest snapshot stays."""
        directory = os.environ.get(env.SNAPSHOT_DIR)
        is_split = plan.layout.size > 1
        self._of_worker: Slots | None = None
        """Slots with the snapshots of this process's state, which may be another process's to write; None: there are none."""
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
        """Time of the last call of `due`, which comes before a commit."""
        self._since_s: float | None = None
        """Time of the call of `due` that led to the last copy. The interval counts from here, not from the start of the copy after
        the commit. Otherwise every second step would be left out, if steps are hardly longer than the interval."""
        self._took_s = 0.0
        """Duration of the last copy, from begin to end."""
        self._last: Copy | None = None
        """The last copy, which measures how long training has waited for it."""
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._said = ""
        self._versions: list[int] = []
        """Version counters of the parameters at the last commit. A change between two commits shows in them."""

    @property
    def step(self) -> int | None:
        """Step of the newest complete snapshot, -1 before the first; None if this process takes none."""
        if self._slots is None:
            return None
        newest = self._slots.newest
        return -1 if newest is None else newest.state.step

    @property
    def newest(self) -> Snapshot | None:
        """Newest snapshot of this process, which `restore` would load; None: there is none."""
        return None if self._slots is None else self._slots.newest

    @property
    def last(self) -> Snapshot | None:
        """The newest snapshot, if a process took it as it ended, so that it has all that the process held. Otherwise None."""
        return self.newest if self.newest is not None and self.newest.is_last else None

    @property
    def held(self) -> tuple[StatePair, ...]:
        """The states of all complete snapshots."""
        return () if self._slots is None else tuple(one.state for one in self._slots.held)

    @property
    def problem(self) -> str | None:
        """Sentence on the failure of the last snapshot, empty if it did not fail. None if this process takes none."""
        return None if self._slots is None else self._failure

    @property
    def late(self) -> str | None:
        """Sentence if snapshots come later than the spec asks for, else an empty one. None if this process takes none."""
        return None if self._slots is None else self.interval.sentence

    def due(self, now_s: float) -> bool:
        """Return whether it is time for a snapshot. `now_s` is a monotonic time."""
        if self._slots is None or self._copies():
            return False
        self._asked_s = now_s
        return self._since_s is None or now_s - self._since_s >= self._apart_s

    @property
    def _apart_s(self) -> float:
        """Least time between the starts of two snapshots. It follows the cost of the last one."""
        waited_s = 0.0 if self._last is None else self._last.waited_s
        return max(self.interval.asked_s, BUSY_SHARE * self._took_s, WAIT_SHARE * waited_s)

    def committed(self) -> None:
        """Note that the state was just committed or adopted. From here on only a commit may change it."""
        if self._slots is not None:
            self._versions = self._versions_now()

    def take(self) -> None:
        """Start to copy the state that was just committed, in a thread. Buffers, which a forward may change, are copied at once."""
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
        """Wait until the last copy is complete or has failed. Training itself waits only until the copy was read (`Staging`)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._say_failure()

    def take_last(self) -> None:
        """Copy the state at the end of this process, which commits nothing more. Does nothing if it holds no whole state."""
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
        """Load the snapshot of a state, or the newest one, into the script's objects. The state is named when it is adopted.

        Raises StateError. A snapshot that is damaged or does not fit the script is removed, so that the next process goes on
        without it. After another error, such as a momentary lack of memory, it stays.
        """
        assert self._slots is not None
        self.settle()
        self._load(self._slots, next(one for one in self._slots.held if wanted in (None, one.state)))

    def restore_exactly(self, step: int, adopted: int) -> StatePair | None:
        """Load the state after `step` steps that was adopted in generation `adopted`, as `restore` does, and return its name.

        Returns None if the worker has no snapshot of it. A process that takes none loads that of local rank 0, since the state is
        replicated.
        """
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
        """Fill the slot and make it the newest snapshot. Runs in a thread, or at the end of the process."""
        assert self._slots is not None
        try:
            writing = copy.fill(self._slots)
            # `to_json` waits for the device; training does not.
            said = {"digest": copy.digest, "record": None if copy.record is None else copy.record.to_json()}
            self._slots.complete(writing, state=copy.pair, adopted=copy.adopted, is_last=copy.is_last, **said)
            self._failure = ""
        except Exception as error:  # nobody else would hear of an error in a thread
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
    """One snapshot while it is taken. It has the state `pair`, which was adopted in generation `adopted`."""

    tensors: Copy
    structure: str
    keep_step: int | None
    """`Memory.whole_step` when the copy began: the snapshot of this step must stay."""
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
