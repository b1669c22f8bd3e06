"""The durable checkpoints of a simulated job, read by the rules of `regroup.checkpoint.selection`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regroup.checkpoint.selection import Name, is_named, name_of, refusal
from regroup.generation.adoption import Copy, Fallback, Refuse
from regroup.protocol.document import Document
from regroup.protocol.state import StatePair
from tests.simulator.policies import CORRUPTED, MISSING

if TYPE_CHECKING:
    from tests.simulator.trainers import Group, Trainer
    from tests.simulator.world import World


RESUME_STEP = 10
RESUME_FROM = f"step-{RESUME_STEP}.g3-5f0c1a2b"
"""spec.checkpoint.resumeFrom of jobs that begin with an earlier job's checkpoint, after RESUME_STEP steps."""


@dataclass(frozen=True)
class Missing:
    """There is no such checkpoint: all ranks end with this line."""

    reason: str


@dataclass
class Checkpoint:
    name: Name
    state: StatePair
    is_whole: bool = True


class Disk:
    """One directory that all workers see."""

    def __init__(self, world: World, every_steps: int = 0, resumes: str = "") -> None:
        """`resumes`: `policies.Policy.resumes`."""
        self._world = world
        self._resumes = resumes
        self._imported = Checkpoint(
            name_of(3, RESUME_STEP, "5f0c1a2b"), StatePair(0, RESUME_STEP), resumes != CORRUPTED
        )
        self.imported_digest = "5f0c" * 16
        self.every_steps = every_steps
        """0: no checkpoints."""
        self.checkpoints: list[Checkpoint] = []
        self.blind: set[str] = set()
        """Pod UIDs of workers that cannot read the volume now."""
        self.is_hidden = False
        """Nobody can."""
        self.is_full = False
        """Nothing can be written."""
        self.num_refused = 0
        """How often a generation that needed a checkpoint found none."""
        self.read: list[Checkpoint] = []
        """What generations continued from."""
        self._removed: list[Checkpoint] = []
        self._problems: dict[int, str] = {}
        """What keeps a generation's writer from saving."""
        self._said: dict[int, dict[str, Any]] = {}

    def write(self, group: Group, state: StatePair) -> dict[str, Any] | None:
        """Begin to write, where one is due; return what rank 0 reports with this commit: the last complete one."""
        if not self.every_steps:
            return None
        writer, is_last = group.ranks[0], state.step >= self._world.total_steps

        def complete() -> None:
            if not writer.alive or writer.stopped:
                return
            name = name_of(group.number, state.step, group.uid)
            if self.is_full or not self.sees(writer.agent.uid):
                self._problems[group.number] = f"Checkpoint {name.directory} could not be written."
            else:
                self._problems.pop(group.number, None)
                self.checkpoints.append(Checkpoint(name, state))
                self._said[group.number] = {
                    "generation": group.number, "step": state.step, "directory": name.directory
                }  # fmt: skip

        if is_last:  # the library waits for it, or gives it up, before it says that it has finished (adr/0015)
            complete()
        elif state.step % self.every_steps == 0:
            self._world.happened("checkpoint", writer.agent.uid)
            self._world.after(self._world.pace.some(self._world.pace.checkpoint_s), complete)
        return self._said.pop(group.number, None)

    def write_last(self, group: Group, writer: Trainer, state: StatePair) -> None:
        """Write what rank 0 holds at the end of its pod's grace (`Job._end`); nobody hears of it."""
        if self.every_steps and group.ranks.get(0) is writer and not self.is_full and self.sees(writer.agent.uid):
            self.checkpoints.append(Checkpoint(name_of(group.number, state.step, group.uid), state))

    def find(self, directory: str, reader: str) -> Checkpoint | None:
        """Return the checkpoint of this name, None if this reader cannot read it."""
        there = (c for c in self.checkpoints if c.is_whole and c.name.directory == directory)
        return next(there, None) if self.sees(reader) else None

    def problem(self, group: Group) -> str | None:
        """Return what rank 0 says of the volume; empty: it is well. None: no checkpoints are written."""
        return self._problems.get(group.number, "") if self.every_steps else None

    @property
    def begins_at(self) -> int:
        """The first step of a job that has no state yet."""
        return RESUME_STEP if self._resumes and self._world.script == "session" else 0

    def fall_back(
        self, document: Document, decision: Fallback, reader: str
    ) -> Copy | Checkpoint | Refuse | Missing | None:
        """As `Adopter._fall_back`: the newest of the best survivor and the newest checkpoint, else what the job begins with."""
        best = decision.best
        found = self._newest(document, is_all=best is None) if self.sees(reader) else None
        if found is not None and (best is None or found.state > best.state):
            self.read.append(found)
            return found
        if best is None and document.checkpoint is not None:
            self.num_refused += 1
            return Refuse(f"The job's status names checkpoint {document.checkpoint.directory}, and none can be read.")
        if best is None and self._resumes:
            return self._import(document, reader)
        return best

    def _import(self, document: Document, reader: str) -> Checkpoint | Refuse | Missing:
        """As `Checkpointer.imported`."""
        if self.sees(reader) and self._resumes == MISSING:
            return Missing(f"regroup.errors.UsageError: Checkpoint {RESUME_FROM} does not exist.")
        if (
            not self.sees(reader)
            or not self._imported.is_whole
            or document.imported not in (None, self.imported_digest)
        ):
            self.num_refused += 1
            return Refuse(f"The job is to begin with checkpoint {RESUME_FROM}, which cannot be read.")
        self.read.append(self._imported)
        return self._imported

    def truncate_newest(self) -> bool:
        """Damage the newest checkpoint that is whole; return False if there is none."""
        newest = self._newest_whole()
        if newest is not None:
            newest.is_whole = False
        return newest is not None

    def remove_newest(self) -> bool:
        """Take the newest checkpoint away; return False if there is none."""
        newest = self._newest_whole()
        if newest is not None:
            self.checkpoints.remove(newest)
            self._removed.append(newest)
        return newest is not None

    @property
    def is_damaged(self) -> bool:
        """Whether a checkpoint cannot be read by anybody, until a person puts it right."""
        return bool(self._removed) or any(not c.is_whole for c in [*self.checkpoints, self._imported])

    def repair(self) -> None:
        self.checkpoints += self._removed
        self._removed.clear()
        for checkpoint in [*self.checkpoints, self._imported]:
            checkpoint.is_whole = True

    def hide(self, for_s: float) -> bool:
        """Nobody can read or write for a time; return False if that is so already."""
        if self.is_hidden:
            return False
        self.is_hidden = True
        self._world.lasts(for_s, lambda: setattr(self, "is_hidden", False))
        return True

    def fill(self, for_s: float) -> bool:
        """Nothing can be written for a time; return False if that is so already."""
        if self.is_full:
            return False
        self.is_full = True
        self._world.lasts(for_s, lambda: setattr(self, "is_full", False))
        return True

    def _newest_whole(self) -> Checkpoint | None:
        return max((c for c in self.checkpoints if c.is_whole), key=lambda c: c.name, default=None)

    def sees(self, uid: str) -> bool:
        return not self.is_hidden and uid not in self.blind

    def _newest(self, document: Document, *, is_all: bool) -> Checkpoint | None:
        whole = [c for c in self.checkpoints if c.is_whole]
        may = [c for c in whole if refusal(c.name, document.lineage, document.checkpoint) is None]
        may = may or [c for c in whole if is_all and is_named(c.name, document.checkpoint)]
        return max(may, key=lambda c: c.name, default=None)
