"""The ledger says which shares the versions of a parameter server have counted. It is a part of the state. Pure.

A *share* is one microbatch. Shares are numbered through all blocks: share n is microbatch n mod V of block n // V, and a block is
one global batch. The ledger names the shares that no version has counted. It changes in the same mark as the parameters
(rule LEDGER), on the server and on its standby. `dealing` knows which shares are dealt to which rank. That ends with the
generation, and a share that was dealt and not counted is dealt again (rule OWED).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regroup.data import Key, SamplePlan
from regroup.data.mix import MASK


@dataclass(frozen=True)
class Entry:
    """The shares that one version applies. The entry goes to the standby with the sum of the gradients."""

    version: int
    following: int
    """The first share that had not been dealt."""
    weight: float
    loss_sum: float
    pushes: tuple[tuple[int, tuple[int, ...]], ...]
    """A pair for each push, in the order of the sum: the version that the gradients were computed on, and their shares."""

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(share for _, shares in self.pushes for share in shares)

    def to_numbers(self) -> list[int]:
        """Return the entry as it is sent, without weight and loss."""
        pushes = (number for base, shares in self.pushes for number in (base, len(shares), *shares))
        return [self.version, self.following, *pushes]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int], weight: float, loss_sum: float) -> "Entry":
        pushes, at = [], 2
        while at < len(numbers):
            base, count = numbers[at : at + 2]
            pushes.append((base, tuple(numbers[at + 2 : at + 2 + count])))
            at += 2 + count
        return cls(numbers[0], numbers[1], weight, loss_sum, tuple(pushes))


NAME = "regroup.ledger"
"""Name of the ledger as a part of the state."""


class Ledger:
    """The ledger of the version that this process holds, or has heard of. At most a few shares for each worker are uncounted."""

    def __init__(self) -> None:
        self.version = 0
        self.following = 0
        """The first share that was never dealt."""
        self.uncounted: set[int] = set()
        """Shares below `following` that no version has counted."""
        self.samples = 0
        """Number of samples that versions have counted."""
        self.digest = 0
        """Sum of the hashes of these samples, modulo 2^64."""

    def count(self, entry: Entry, plan: SamplePlan) -> None:
        """Count the shares of the next version. Raises KeyError for a share that is counted already."""
        if entry.version != self.version + 1:
            raise AssertionError(f"version {entry.version} does not follow version {self.version}")
        self.uncounted.update(range(self.following, entry.following))
        self.following = max(self.following, entry.following)
        for share in entry.shares:
            self.uncounted.remove(share)
            self.digest = (self.digest + plan.hash_of(*key_of(share, plan))) & MASK
        self.samples += len(entry.shares) * plan.microbatch
        self.version = entry.version

    def heard(self, version: int, samples: int, digest: int) -> None:
        """Note how far the server is. A process that holds no state calls it."""
        self.version, self.samples, self.digest = version, samples, digest

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger as a part of the state."""
        return {
            "version": self.version,
            "following": self.following,
            "uncounted": sorted(self.uncounted),
            "samples": self.samples,
            "digest": f"{self.digest:016x}",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self.following = state["version"], state["following"]
        self.uncounted = set(state["uncounted"])
        self.samples, self.digest = state["samples"], int(state["digest"], 16)


@dataclass(frozen=True)
class CountedPlan(SamplePlan):
    """A plan whose steps are a parameter server's versions. Their samples are in the ledger."""

    ledger: Ledger = field(default_factory=Ledger, compare=False)
    shares_per_version: int = 1

    @property
    def step_samples(self) -> int:
        """Number of samples in a version."""
        return self.shares_per_version * self.microbatch

    def samples(self, step: int) -> int:  # noqa: ARG002
        """Return the number of samples up to the newest version that is known here. The caller asks for no other version."""
        return self.ledger.samples

    def digest(self, step: int, known: tuple[int, str] | None = None) -> str:  # noqa: ARG002
        """Return the digest of the same samples. `known` is not needed: the ledger has the digest."""
        return f"{self.ledger.digest:016x}"


def key_of(share: int, plan: SamplePlan) -> Key:
    """Return the block of a share and its microbatch there."""
    return Key(*divmod(share, plan.num_virtual))
