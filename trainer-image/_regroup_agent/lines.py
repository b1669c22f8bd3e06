"""What several processes of one pod print, line by line, each with the rank that printed it. Pure."""

from __future__ import annotations

MAX_PARTIAL = 1 << 16
"""Bytes of a line without an end that are held back; then they are passed on as a line."""


class Lines:
    """One process's stream. Whole lines are passed on, so that those of several processes do not mix."""

    def __init__(self) -> None:
        self._partial = b""

    def add(self, data: bytes, label: bytes) -> bytes:
        """Return what can be written now, each line after `label`."""
        lines = (self._partial + data).splitlines(keepends=True)  # of bytes: a carriage return ends one, too
        # A carriage return may be the first half of an end.
        self._partial = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._partial) > MAX_PARTIAL:
            lines.append(self.end(b""))
        return b"".join(label + line for line in lines)

    def end(self, label: bytes) -> bytes:
        """Return what was held back, as a line: the process has ended."""
        rest, self._partial = self._partial, b""
        return label + rest + b"\n" if rest else b""
