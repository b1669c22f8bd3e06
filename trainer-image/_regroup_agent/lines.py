"""Cuts the output of a pod's processes into lines and puts the rank before each. Pure."""

from __future__ import annotations

MAX_PARTIAL = 1 << 16
"""Longest unfinished line that is held back, in bytes. A longer one is passed on as a line."""


class Lines:
    """The output stream of one process. It passes on whole lines, so that lines of several processes do not mix."""

    def __init__(self) -> None:
        self._partial = b""

    def add(self, data: bytes, label: bytes) -> bytes:
        """Take in output and return the lines that are complete, each after `label`."""
        lines = (self._partial + data).splitlines(keepends=True)  # splits bytes at a carriage return as well
        # A carriage return at the end may be the first half of "\r\n".
        self._partial = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._partial) > MAX_PARTIAL:
            lines.append(self.end(b""))
        return b"".join(label + line for line in lines)

    def end(self, label: bytes) -> bytes:
        """Return the unfinished line that was held back. Called when the process has ended."""
        rest, self._partial = self._partial, b""
        return label + rest + b"\n" if rest else b""
