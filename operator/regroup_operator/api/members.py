"""The spelling of a member list in the status: ranges of slot or slot.attempt, "0-3,5.2". 5000 members must fit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class MemberId(NamedTuple):
    """A pod of the job: attempt numbers are never used twice for a slot while a generation names them."""

    slot: int
    attempt: int

    def __str__(self) -> str:
        """Return slot or slot.attempt: as the status and all texts spell a worker."""
        return f"{self.slot}.{self.attempt}" if self.attempt else f"{self.slot}"


def gone_name(member: MemberId) -> str:
    """Return what stands for the UID of a pod that the API no longer has; it is always among a document's `lost`."""
    return f"gone/{member.slot}.{member.attempt}"


def format_members(members: Iterable[MemberId], *, in_order: bool = False) -> str:
    """Return the shortest spelling; slots in order, attempt 0 left out, runs of attempt 0 as ranges. `in_order`: the members are in
    the order of their ranks, which is kept: where several workers are a group, it says who is in one."""
    parts: list[str] = []
    run: list[int] = []

    def flush() -> None:
        if run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run.clear()

    for member in members if in_order else sorted(members):
        if member.attempt:
            flush()
            parts.append(str(member))
            continue
        if run and member.slot != run[-1] + 1:
            flush()
        run.append(member.slot)
    flush()
    return ",".join(parts)


@lru_cache(maxsize=64)  # each plan reads the list several times, and the jobs of a cluster have few different ones
def parse_members(text: str) -> tuple[MemberId, ...]:
    """Return the members in the order in which they are written. Raises ValueError for what `format_members` does not write."""
    members: list[MemberId] = []
    for part in filter(None, text.split(",")):
        if "." in part:
            slot, attempt = part.split(".")
            members.append(MemberId(int(slot), int(attempt)))
        elif "-" in part:
            first, last = part.split("-")
            members.extend(MemberId(slot, 0) for slot in range(int(first), int(last) + 1))
        else:
            members.append(MemberId(int(part), 0))
    return tuple(members)
