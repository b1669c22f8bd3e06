"""The checkpoint that a generation continues from. One rank looks for it, and tells the others.

One worker's volume may be what cannot be read, so each generation has another reader (rule RETRY; `Document.reader`).
"""

import json
from dataclasses import asdict, dataclass

from regroup.checkpoint import CheckpointError, CheckpointInfo, ImportMissing
from regroup.errors import Refused, UsageError
from regroup.protocol.document import Document
from regroup.protocol.state import StatePair
from regroup.protocol.text import shorten
from regroup.state.durable import Durable

from . import transfer
from .groups import Groups


@dataclass(frozen=True)
class OnDisk:
    """The result of the search."""

    pair: StatePair | None = None
    """The state of the checkpoint; None: there is none to continue from."""
    directory: str = ""
    """Name of the checkpoint's directory."""
    imported: str | None = None
    """The fingerprint of another job's checkpoint, with which this job begins; None: the checkpoint is this job's."""
    why: str = ""
    """Sentences on checkpoints that could not be read."""
    missing: str = ""
    """Sentence: the checkpoint that the job is to begin with does not exist."""


class Checkpoints:
    """The checkpoints of a job, as a generation reads them. All ranks call `find`."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._found: CheckpointInfo | None = None

    def find(self, groups: Groups, document: Document, reader: int, above: StatePair | None) -> OnDisk:
        """Return the newest checkpoint that is newer than `above`, as rank `reader` finds it.

        A job that has neither a state nor a checkpoint finds the one that it is to begin with. Raises Refused or UsageError, on all
        ranks, if without a checkpoint the job would begin anew although it must not.
        """
        self._found, mine = None, OnDisk()
        if groups.rank == reader:
            mine = self._newest(document, above)
        said = json.loads(transfer.share_text(groups, reader, json.dumps(asdict(mine))))
        disk = OnDisk(**{**said, "pair": None if said["pair"] is None else StatePair(*said["pair"])})
        if disk.pair is None and above is None:
            self._refuse_to_begin_anew(document, disk)
        return disk

    def load(self, disk: OnDisk) -> None:
        """Load the checkpoint into the script's objects. Raises CheckpointError."""
        checkpointer, info = self._durable.checkpointer, self._found
        assert checkpointer is not None
        if info is None and disk.imported is not None:
            assert self._durable.resume_from is not None
            info = checkpointer.imported(self._durable.resume_from, disk.imported)
        self._durable.load(info or checkpointer.info_of(disk.directory))
        self._found = None

    def _newest(self, document: Document, above: StatePair | None) -> OnDisk:
        checkpointer = self._durable.checkpointer
        if checkpointer is None:
            return OnDisk()
        newest = checkpointer.newest(document.lineage, document.checkpoint, is_all=above is None)
        for sentence in newest.skipped:
            print(sentence, flush=True)
        info = newest.info
        if info is not None and (above is None or info.pair > above):
            self._found = info
            return OnDisk(info.pair, info.name.directory)
        why = shorten(" ".join(newest.skipped), 300)
        # Once the status names a checkpoint of the job's own, that one is waited for: what the job began with is older.
        if above is not None or document.checkpoint is not None or self._durable.resume_from is None:
            return OnDisk(why=why)
        try:
            info = self._found = checkpointer.imported(self._durable.resume_from, document.imported)
        except ImportMissing as error:
            return OnDisk(missing=str(error))
        except CheckpointError as error:
            return OnDisk(why=shorten(str(error), 300))
        return OnDisk(info.pair, info.name.directory, info.commit.fingerprint)

    def _refuse_to_begin_anew(self, document: Document, disk: OnDisk) -> None:
        """Raise Refused if the job's status names a checkpoint, or the job is to begin with one, and none can be read.

        A volume that cannot be read today may be read tomorrow, and a history that begins anew would let the checkpoint be pruned.
        The operator tries again with a pause, and another worker reads (rule RETRY). Raises UsageError if the checkpoint that the
        job is to begin with does not exist.
        """
        if document.checkpoint is not None:
            raise Refused(
                f"The job's status names checkpoint {document.checkpoint.directory}, and no checkpoint can be read: "
                f"{disk.why or 'REGROUP_CHECKPOINT_DIR is not set.'} "
                "Make it readable; it is tried again automatically.",
                cause="checkpoint",
            )
        if disk.missing:
            raise UsageError(disk.missing)
        if self._durable.resume_from:
            raise Refused(
                f"The job is to begin with checkpoint {self._durable.resume_from}, which cannot be read: {disk.why} "
                "Restore it, or make it readable; it is tried again automatically.",
                cause="checkpoint",
            )
