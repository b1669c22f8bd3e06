"""The decisions of a parameter server: the shares of a worker, the gradients of a version, and the ranks to wait for. Pure.

One `Desk` serves one generation. `service` tells it what came and when, and sends what it decides. The desk holds no tensors.
Rules DEALT, OWED and AGE of docs/design/adr/0031-parameter-server.md are here.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from statistics import median

from regroup.data.ids import share_of

from .ledger import Entry, Ledger

LATE_TIMES = 4.0
"""A worker is late after this many usual times without a push. Then its shares are dealt again."""
LATE_LEAST_S = 1.0
"""No worker is late before this. Where a share takes milliseconds, a pause of the machine says nothing."""
WINDOW = 20
"""Number of pushes whose median is the usual time."""


@dataclass(frozen=True)
class Roles:
    """The roles of the ranks of a generation. The server is rank 0."""

    standby: int | None
    """The rank that holds a second copy; None: there is one rank."""
    computing: tuple[int, ...]
    """Ranks that compute gradients."""

    def holds(self, rank: int) -> bool:
        """Return whether a rank holds the state."""
        return rank in (0, self.standby)


def roles_of(world_size: int, per_worker: int, *, computes: bool) -> Roles:
    """Return the roles of a generation, the same on all ranks.

    `per_worker` is the number of processes of a worker. The standby is in another worker than the server, if there is one. With
    `computes` server and standby compute gradients, too. Without it they do so only if no other rank would.
    """
    standby = None if world_size == 1 else per_worker if world_size > per_worker else 1
    everybody = tuple(range(world_size))
    if computes or world_size == 1:
        return Roles(standby, everybody)
    others = tuple(rank for rank in everybody if rank not in (0, standby))
    return Roles(standby, others or tuple(rank for rank in everybody if rank))


@dataclass(frozen=True)
class Terms:
    """The rules of one generation."""

    staleness: int | None
    """The oldest gradient that is applied, in versions; None: no bound."""
    shares_per_version: int
    roles: Roles
    is_whole: bool
    """A version is the gradient of a whole block. No worker is left out of it, however slow."""

    def quotas(self) -> dict[int, int]:
        """Return the number of shares that each computing rank is dealt at a time.

        Together they are a version's shares, and each rank has at least one. If there are more ranks than shares in a version, the
        last ranks are backup workers.
        """
        ranks = self.roles.computing
        return {
            rank: max(1, len(share_of(self.shares_per_version, place, len(ranks)))) for place, rank in enumerate(ranks)
        }


class Answer(Enum):
    """The answer to a worker that asks for work, if there is none."""

    FINISHED = 1
    LEAVE = 2


@dataclass(frozen=True)
class Deal:
    """Shares that a worker computes on a version."""

    rank: int
    base: int
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Push:
    """Record of the gradients that a worker has pushed, summed over its shares. Holds no tensor: the desk needs numbers only."""

    deal: Deal
    weight: float
    loss_sum: float


@dataclass(frozen=True)
class Version:
    """The next version: the pushes that it applies, in the order of the sum."""

    number: int
    pushes: tuple[Push, ...]
    following: int

    @property
    def entry(self) -> Entry:
        """The entry for the ledger."""
        return Entry(
            self.number,
            self.following,
            sum(push.weight for push in self.pushes),
            sum(push.loss_sum for push in self.pushes),
            tuple((push.deal.base, push.deal.shares) for push in self.pushes),
        )


@dataclass
class _Rank:
    """The desk's record of one rank."""

    quota: int
    since_s: float
    """Time from which the rank is waited for: it was dealt shares, or was told the outcome of the last ones."""
    deal: Deal | None = None
    """The rank computes these shares, or has pushed them. None with `is_computing`: the desk has given them up."""
    is_computing: bool = False
    pushed: Push | None = None
    is_told: bool = False
    """The rank was told to leave, or that the job has finished. It asks for nothing any more."""
    knows_newer: bool = False
    """The rank has heard of a newer, planned generation (rule CUTALL)."""
    is_late: bool = False
    away_s: float = 0.0
    """Seconds that the server had been away in all at `since_s`."""
    last_s: float = 0.0
    """Seconds that the rank took for its last push."""


@dataclass
class Desk:
    """The server's decisions in one generation."""

    ledger: Ledger
    terms: Terms
    world_size: int
    now_s: float
    """Time at which the generation began."""
    total: int
    """The version at which the job ends."""
    ended: bool = False
    """A script has left its loop. The job ends with the newest version."""
    is_leaving: bool = False
    """All ranks that are not late know of a newer generation. The desk deals no more (rule CUTALL)."""
    decided: list[tuple[Push, bool]] = field(default_factory=list)
    """Pushes whose worker must be told whether they were counted. `service` tells the workers, and empties the list."""

    def __post_init__(self) -> None:
        quotas = self.terms.quotas()
        self._ranks = {rank: _Rank(quotas.get(rank, 0), self.now_s) for rank in range(self.world_size)}
        self._owed = set(self.ledger.uncounted)
        self._following = self.ledger.following
        self._queue: list[int] = []
        """Ranks that have pushed, in the order of their pushes."""
        self._making: Version | None = None
        self.version = self.ledger.version
        """The newest committed version. The ledger is one ahead until the standby has acknowledged the next one (rule COPY)."""
        self._times_s: deque[float] = deque(maxlen=WINDOW)
        self._away_s = 0.0

    def was_away(self, duration_s: float) -> None:
        """Note that the server did not listen for so long, because it computed or evaluated. No worker is late for that."""
        self._away_s += duration_s

    # --- what workers ask --------------------------------------------------------------------------------------------

    def heard(self, rank: int, *, knows_newer: bool, ended: bool = False) -> None:
        """Note whether a rank knows of a newer generation, and whether its script has left its loop."""
        self._ranks[rank].knows_newer = knows_newer
        self.ended = self.ended or ended

    def pull(self, rank: int, now_s: float) -> Deal | Answer:
        """Return the work of a rank that asks for some."""
        one = self._ranks[rank]
        self._begin_wait(one, now_s)
        self._look(now_s)
        if self.is_finished or self.is_leaving:
            one.is_told, one.is_computing, one.deal = True, False, None
            return Answer.FINISHED if self.is_finished else Answer.LEAVE
        one.deal = Deal(rank, self.version, self._take(one.quota))
        one.is_computing = True
        return one.deal

    def push(self, rank: int, weight: float, loss_sum: float, now_s: float) -> None:
        """Take the gradients of a rank. A rank that was dealt nothing pushes, too, and so waits for the next version."""
        one = self._ranks[rank]
        deal, one.is_computing = one.deal, False
        if one.quota:
            one.last_s = now_s - one.since_s
            self._times_s.append(one.last_s)
        if deal is None:  # it was given up, and may be dealt to somebody else (rule DEALT)
            self._begin_wait(one, now_s)
            self.decided.append((Push(Deal(rank, -1, ()), weight, loss_sum), False))
            return
        one.pushed = Push(deal, weight, loss_sum)
        self._queue.append(rank)

    # --- versions ----------------------------------------------------------------------------------------------------

    def next_version(self, now_s: float) -> Version | None:
        """Return the next version; None: too few pushes have come, or a version is being made. The caller calls `made` next."""
        self._look(now_s)
        self.give_up(now_s)
        if self._making is not None:
            return None
        self._refuse_old(now_s)
        if self.is_finished or self._ranks[0].is_told:  # the server makes no more
            self._refuse_all(now_s)
            return None
        chosen: list[int] = []
        count = 0
        for rank in self._queue:
            pushed = self._ranks[rank].pushed
            if pushed is not None and pushed.deal.shares and count < self._needed:
                chosen.append(rank)
                count += len(pushed.deal.shares)
        if not chosen or count < self._needed:
            if self.is_leaving and not any(one.is_computing for one in self._ranks.values()):
                self._refuse_all(now_s)
            return None
        pushes = [push for push in (self._ranks[rank].pushed for rank in chosen) if push is not None]
        pushes.sort(key=lambda push: push.deal.shares)
        self._making = Version(self.version + 1, tuple(pushes), self._following)
        return self._making

    def made(self, now_s: float) -> None:
        """Note that the version of `next_version` is committed. The ledger has counted it."""
        version, self._making = self._making, None
        assert version is not None
        assert self.ledger.version == version.number
        self.version = version.number
        for push in version.pushes:
            self._decide(push.deal.rank, now_s, counted=True)
        for rank in [rank for rank in self._queue if not self._push_of(rank).deal.shares]:
            self._decide(rank, now_s, counted=True)
        # What is too old now will be older when it comes.
        self._refuse_old(now_s)
        for one in self._ranks.values():
            if one.is_computing and one.deal is not None and one.deal.shares and self._is_old(one.deal):
                self._owe(one.deal)
                one.deal = None

    def give_up(self, now_s: float) -> None:
        """Give up the shares of workers that are late, so that they are dealt again (rule OWED).

        A version that needs a whole block waits instead.
        """
        if self.terms.is_whole:
            return
        for one in self._ranks.values():
            if one.quota and one.pushed is None and not one.is_told and self._is_overdue(one, now_s):
                one.is_late = True
                if one.deal is not None:
                    self._owe(one.deal)
                    one.deal = None

    # --- the end of a generation -------------------------------------------------------------------------------------

    def patience_s(self, rank: int) -> float:
        """Return the seconds after which a worker is late. A worker that is slow every time is not late every time.

        There is no bound before the generation's first push: a share may take any time, and no other worker asks for shares. If no
        push comes, the operator finds the hang.
        """
        return self._patience_s(self._ranks[rank])

    def _patience_s(self, one: _Rank) -> float:
        if not self._times_s:
            return inf
        return max(LATE_LEAST_S, LATE_TIMES * max(one.last_s, median(self._times_s)))

    @property
    def is_finished(self) -> bool:
        return self.ended or self.version >= self.total

    @property
    def is_over(self) -> bool:
        """All ranks were told that they need not ask again."""
        return all(one.is_told for one in self._ranks.values())

    def must_break(self, now_s: float) -> bool:
        """Return whether the generation must break because a rank does not come to the cut."""
        self._look(now_s)
        waits = [one for one in self._ranks.values() if not one.is_told]
        return self.is_leaving and any(self._is_overdue(one, now_s) for one in waits)

    def _look(self, now_s: float) -> None:
        """Update `is_leaving`. Of another rank the server knows what it had heard at its last request."""
        ranks = self._ranks.values()
        self.is_leaving = self.is_leaving or (
            self._ranks[0].knows_newer and all(one.knows_newer or self._is_overdue(one, now_s) for one in ranks)
        )

    # --- small parts -------------------------------------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        """Number of shares of the next version. It is lower if the ranks that are not late are dealt fewer."""
        if self.terms.is_whole:
            return self.terms.shares_per_version
        there = sum(one.quota for one in self._ranks.values() if not (one.is_late or one.is_told))
        return max(1, min(self.terms.shares_per_version, there))

    def _begin_wait(self, one: _Rank, now_s: float) -> None:
        one.since_s, one.away_s, one.is_late = now_s, self._away_s, False

    def _is_overdue(self, one: _Rank, now_s: float) -> bool:
        return now_s - one.since_s - (self._away_s - one.away_s) > self._patience_s(one)

    def _take(self, count: int) -> tuple[int, ...]:
        """Return this many shares: first the ones that are owed, then new ones."""
        taken = sorted(self._owed)[:count]
        self._owed.difference_update(taken)
        new = range(self._following, self._following + count - len(taken))
        self._following = new.stop
        return (*taken, *new)

    def _is_old(self, deal: Deal) -> bool:
        """Return whether a gradient is too old (rule AGE). A gradient that was computed on the newest version has age 0."""
        return self.terms.staleness is not None and self.version - deal.base > self.terms.staleness

    def _refuse_old(self, now_s: float) -> None:
        for rank in list(self._queue):
            deal = self._push_of(rank).deal
            if deal.shares and self._is_old(deal):
                self._decide(rank, now_s, counted=False)

    def _refuse_all(self, now_s: float) -> None:
        for rank in list(self._queue):
            self._decide(rank, now_s, counted=False)

    def _decide(self, rank: int, now_s: float, *, counted: bool) -> None:
        push, one = self._push_of(rank), self._ranks[rank]
        self._queue.remove(rank)
        if not counted:
            self._owe(push.deal)
        one.pushed, one.deal = None, None
        self._begin_wait(one, now_s)
        self.decided.append((push, counted))

    def _owe(self, deal: Deal) -> None:
        self._owed.update(deal.shares)

    def _push_of(self, rank: int) -> Push:
        push = self._ranks[rank].pushed
        assert push is not None
        return push
