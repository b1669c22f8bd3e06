"""Judge whether a script refuses the size of the newest generation, and to which size the job then goes back. Pure.

Some scripts do not run with every number of workers. nanoGPT asserts that its number of micro-batches is divisible by the world
size. No restart helps there, and the job trained with another size a moment ago. So the job goes back to that size, no failure
counts, and another size is tried once the job wants one (docs/design/adr/0081-sizes-of-a-script.md).

A job that has trained with one size has each other size *on trial* until its script has trained with that. A script has trained
when it has run for STEADY_S, or has reported steps. Most report none, and one may fail after `init_process_group`: nanoGPT does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from regroup.protocol.text import shorten
from regroup_operator.api.conditions import TRAINING
from regroup_operator.api.spec import ElasticPolicy, ExitRule
from regroup_operator.api.status import JobStatus, RefusedSize
from regroup_operator.model.plan import Clock, Crash, Failure, seconds_of
from regroup_operator.model.worker import Current, Standing, Wait, Worker
from regroup_operator.plan.failures.crashes import STEADY_S, place_of
from regroup_operator.plan.failures.exits import failure_of
from regroup_operator.plan.failures.on_exit import first_match
from regroup_operator.plan.failures.script_hints import is_torn

SETTLE_S = 5.0
"""The failures of the other members are waited for so long. They raise at the same line, but their imports take different times."""
HOLD_S = 60.0
"""Workers that a smaller size on trial does not need keep their pods for so long. If the size is refused, they are there."""
AGAIN_S = 0.05
"""A refusal is in the status first, and the job is planned by it after this time."""
MAX_LINE = 200
"""Characters of a failure's last line that are quoted."""
_SENTENCE = re.compile(r"[^\W\d][\w.]*: +\S")
"""The begin of a line such as `ValueError: 10 is odd`."""
_CONSEQUENCE = re.compile(
    r"connection (was (likely )?)?(closed|reset|refused|aborted|lost)|broken pipe|timed out|timeout|ncclRemoteError"
    r"|by peer|remote process|UNAVAILABLE",
    re.IGNORECASE,
)
"""Texts of gloo, NCCL, TCPStore and gRPC about a process that has gone."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The size of the newest generation, with which the script has not run for STEADY_S yet, although it has with another one."""

    current: Current
    members: tuple[Worker, ...]
    good: int
    """The number of workers with which the script has run so long."""
    wanted: int
    """The number of workers that the job wants."""
    clock: Clock
    crash: Crash | None = None
    """The crash that came last, in an earlier generation."""
    rules: Sequence[ExitRule] = ()
    """spec.recovery.onExit."""

    @property
    def size(self) -> int:
        """Number of workers of the newest generation."""
        return len(self.current.members)

    @property
    def is_asked_for(self) -> bool:
        """Return whether people or an autoscaler asked for this size. A smaller one may be all that a loss has left."""
        return self.size >= min(self.good, self.wanted)

    @property
    def held_until_s(self) -> float | None:
        """Return until when workers that the size does not need keep their pods; None: they need not."""
        return self.current.announced_at_s + HOLD_S if self.size < self.good else None


@dataclass(frozen=True)
class SizeVerdict:
    """The verdict on the size of the newest generation, by its failures."""

    good: int = 0
    """status.lastGoodSize; 0: there is none."""
    refused: RefusedSize | None = None
    """The refusal that has just been found."""
    wait: Wait | None = None
    """No generation is announced until then: it is open whether the size is refused, or the refusal is not in the status yet."""
    undecided: int = 0
    """The generation whose exits count nothing before it is known whether they refuse its size; 0: there is none."""
    spared: frozenset[int] = field(default_factory=frozenset)
    """The generations whose sizes were refused: their exits count nothing."""
    held_until_s: float | None = None
    """Trial.held_until_s."""


def steady_at_s(status: JobStatus, current: Current | None, clock: Clock) -> float | None:
    """Return when the script has run for STEADY_S with the size of the newest generation (monotonic); None: it does not run."""
    said = status.condition(TRAINING)
    if current is None or not current.adopted or said is None or said.status != "True":
        return None
    # The condition may be the one of the generation before, where this one is planned.
    return max(clock.at_s(seconds_of(said.last_transition_time)), current.announced_at_s) + STEADY_S


def may_go_back(policy: ElasticPolicy, good: int, size: int) -> bool:
    """Return whether a job whose newest generation has this `size` could go back to the `good` one, if the script refused it."""
    permitted = policy.permitted is None or good in policy.permitted
    return good not in (0, size) and permitted and policy.min_replicas <= good <= policy.max_replicas


def judge_trial(trial: Trial) -> SizeVerdict:
    """Return whether the script refuses the size that is on trial.

    It does if several members have all raised at the same place. It also does if the newest generation and an earlier one failed at
    the same place first. Else one process has failed, and the others as a consequence: that counts as without a trial. Signals, a
    lack of memory and lost members count, too, and so do exits for which a rule of spec.recovery.onExit fails the job.

    A refusal of a size that a loss has left stops the job. What caused the loss may also make the script fail for a moment. So
    there all members must have failed, and the newest generation and an earlier one at the same place first.
    """
    failures = [failure for worker in trial.members if (failure := _failure(trial, worker)) is not None]
    held = SizeVerdict(trial.good, held_until_s=trial.held_until_s)
    is_lost = any(w.standing == Standing.LOST or w.pod is None for w in trial.members)
    if not failures or is_lost or not all(_is_raised(trial, failure) for failure in failures):
        return held
    first = min(failures, key=lambda failure: failure.at)
    place = place_of(first)
    same = bool(place) and all(place_of(failure) == place for failure in failures)
    crash = trial.crash
    again = crash is not None and crash.place == place and 0 < crash.last.generation < trial.current.number
    everywhere = same and len(failures) == trial.size > 1  # one member alone may have failed by chance
    until_s = trial.clock.at_s(first.at) + SETTLE_S
    is_settled = len(failures) == trial.size or trial.clock.now_s >= until_s
    if (everywhere or again) if trial.is_asked_for else (again and len(failures) == trial.size):
        how = "in every one of them" if everywhere and trial.is_asked_for else "twice at the same place"
        if is_settled or any(_says_why(failure) for failure in failures):
            return _refused(trial, _quote(first, failures), how)
    elif is_settled or not (same or again):
        return held
    words = f"Worker {first.worker} failed with {_workers(trial.size)}, a size that is new to the script; waiting for the others."
    return SizeVerdict(
        trial.good,
        wait=Wait("Settling", words, until_s),
        undecided=trial.current.number,
        held_until_s=trial.held_until_s,
    )


def _quote(first: Failure, failures: Sequence[Failure]) -> str:
    """Return the line in which the first failure says why, for a sentence, and one of another member if it does not say why.

    Ranks may refuse a size at different places. DeepSpeed's ZeRO 3 has a plain `assert` on a rank that is new.
    """
    if not first.last_line:
        return ""
    quoted = shorten(first.last_line, MAX_LINE)
    others = sorted((one for one in failures if _says_why(one)), key=lambda one: one.at)
    if others and not _says_why(first):
        quoted += f"; worker {others[0].worker}: {shorten(others[0].last_line, MAX_LINE)}"
    return f" ({quoted})"


def _says_why(failure: Failure) -> bool:
    """Return whether the last line has the name of an exception and a sentence of its own, on no connection that was lost."""
    return bool(_SENTENCE.match(failure.last_line)) and not _CONSEQUENCE.search(failure.last_line)


def _refused(trial: Trial, line: str, how: str) -> SizeVerdict:
    message = f"The script refuses {_workers(trial.size)}: it failed {how} before it had trained with them{line}."
    refused = RefusedSize(
        workers=trial.size,
        back_to=trial.good,
        wanted=trial.wanted,
        generation=trial.current.number,
        at=trial.clock.timestamp(),
        message=message,
    )
    wait = Wait("Settling", refused_words(refused), trial.clock.now_s + AGAIN_S)
    return SizeVerdict(trial.good, refused, wait, spared=frozenset({trial.current.number}))


def refused_words(refused: RefusedSize) -> str:
    """Return which size the script refused, with how many workers the job trains instead, and what ends that."""
    until = f"{refused.message} Until spec.replicas changes, the job trains with"
    again = f"It tries {_workers(refused.workers)} again after a suspension."
    if refused.size != refused.wanted:
        return f"{until} {_workers(refused.size)}, as it did before. {again}"
    sizes = refused.permitted or [refused.size]
    return f"{until} {' or '.join(map(str, sizes))} workers only. {again}"


def _failure(trial: Trial, worker: Worker) -> Failure | None:
    """Return the first end of a process of this worker in the newest generation; None: none has ended by itself."""
    pod, session = worker.pod, worker.session
    if pod is None or session is None:
        return None
    ended = next((e for e in session.exits if e.generation == trial.current.number), None)
    return None if ended is None else failure_of(pod, ended, trial.clock)


def _is_raised(trial: Trial, failure: Failure) -> bool:
    """Return whether a process ended with an exit code of its own, for which no rule fails the job. A torn file is no matter of the
    size."""
    if is_torn(failure) or failure.hung or failure.reason or not 0 < (failure.exit_code or 0) < 128:
        return False
    index = first_match(trial.rules, failure)
    return index is None or trial.rules[index].action != "Fail"


def _workers(count: int) -> str:
    return f"{count} worker" + ("" if count == 1 else "s")
