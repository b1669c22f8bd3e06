"""CPU time and memory of processes, as the kernel counts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that all threads of a process have used, to the kernel's 10 ms; children do not count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def peak_rss_mib(pid: int) -> float:
    """Return the most resident memory that a process has had, since its start or the last `forget_peak`."""
    return _status_kib(pid, "VmHWM") / 1024


def forget_peak(pid: int) -> None:
    """Begin to count the peak anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise ValueError(f"/proc/{pid}/status has no {name}.")


@dataclass(frozen=True)
class Use:
    """What one process used while a Meter ran."""

    cpu_s: float
    peak_rss_mib: float


class Meter:
    """Measures some processes by name from its making on. All of them must live until the last `read`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        for pid in self._pids.values():
            forget_peak(pid)
        self._before = {name: cpu_s(pid) for name, pid in self._pids.items()}

    def read(self) -> dict[str, Use]:
        """Return what each process has used since the Meter was made."""
        return {name: Use(cpu_s(pid) - self._before[name], peak_rss_mib(pid)) for name, pid in self._pids.items()}
