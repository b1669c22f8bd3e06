"""A checkpoint volume that does not answer: every look at it blocks in the kernel, in a real process, until the test lets go.

Without root there is no file server to take away. A FIFO stands in for it: a checkpoint of another job lies in the
directory, and the file that says whose it is blocks whoever opens it. Writers look there first, and so does whoever deletes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from types import TracebackType

_steps = itertools.count()


class DeadVolume:
    """The volume of this directory is dead from here to `answer`."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"step-{next(_steps)}.g0-00000000"
        path.mkdir(parents=True)
        self._file = path / ".job"
        os.mkfifo(self._file)
        (path / "COMMIT.json").write_text("{}")  # last: from here on it is looked at

    def answer(self) -> None:
        """Let everybody go on who waits, and nobody wait any more."""
        plain = self._file.with_name(".plain")
        plain.write_text("another job")
        fifo = os.open(self._file, os.O_RDWR | os.O_NONBLOCK)  # whoever waits to open it is let in, ...
        plain.rename(self._file)
        os.close(fifo)  # ... and reads its end

    def __enter__(self) -> DeadVolume:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.answer()
