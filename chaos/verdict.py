"""Judges one job by its traces: stuck, rolled back, equal. Pure.

The operator's own reports are not evidence, except for the digest of the samples, which is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chaos.kinds import FORM_S, KINDS
from chaos.trace import Commit, Done, Trace, Who


@dataclass
class Injected:
    """A fault that was injected, and its outcome. Times are seconds since the epoch."""

    kind: str
    moment: str
    """Moment that the fault met: the one seen right before it was injected."""
    hit: str
    at_s: float
    bound_s: float
    step: int
    """Highest step committed at the injection."""
    generation: int
    """Newest generation that had committed at the injection."""
    recovered_s: float | None = None
    """Seconds to the next commit, or to the job's end if there was nothing left to commit."""
    stuck: bool = False
    planned: str = ""
    """Planned moment. It is empty in journals from before it was recorded, where `moment` is the planned one."""

    @property
    def when(self) -> str:
        """Moment in words, with the planned one if that did not come."""
        return self.moment if self.planned in ("", self.moment) else f"{self.moment} instead of {self.planned}"


@dataclass(frozen=True)
class RollBack:
    """A generation that continued from an older state than a living process held."""

    generation: int
    began_with_step: int
    holder: str
    holders_step: int

    def __str__(self) -> str:
        return (
            f"generation {self.generation} began with step {self.began_with_step} while {self.holder}, alive, "
            f"had committed step {self.holders_step}"
        )


@dataclass(frozen=True)
class Expected:
    """Result of the run without faults."""

    parameters: str
    samples: str
    elements: dict[str, str] = field(default_factory=dict)
    """Only for a split model: the values of `Done.elements`, of the whole model."""
    evaluated: dict[int, float] = field(default_factory=dict)
    """Number of steps before an evaluation -> its result."""


@dataclass
class Verdict:
    """Verdict over a whole job."""

    outcome: str = ""
    stuck: list[str] = field(default_factory=list)
    """One sentence for each wait that was longer than its bound."""
    unequal: list[str] = field(default_factory=list)
    """One sentence for each difference from the end of the run without faults."""
    rolled_back: list[str] = field(default_factory=list)
    generations: int = 0
    redone: int = 0
    """Number of steps that a later generation (Script: a later process) committed again."""

    @property
    def passed(self) -> bool:
        """True if every promise held."""
        return self.outcome == "Succeeded" and not (self.stuck or self.unequal or self.rolled_back)


def proves_progress(commit: Commit, fault: Injected, built_s: Mapping[Who, float]) -> bool:
    """Return whether a commit shows that the group works after a fault.

    The group that the fault met may still complete one step from buffers. It cannot commit the step after that without
    every rank.
    """
    if commit.t_s <= fault.at_s:
        return False
    newer = commit.generation > fault.generation or built_s.get(commit.who, 0.0) > fault.at_s
    return newer or commit.step >= fault.step + 2


def next_commit(trace: Trace, fault: Injected, since: int = 0) -> Commit | None:
    """Return the first commit after a fault that proves progress, among those read from index `since` on."""
    built_s = {b.who: b.t_s for b in trace.built}
    found = [c for c in trace.commits[since:] if proves_progress(c, fault, built_s)]
    return min(found, key=lambda c: c.t_s, default=None)


def overdue_s(injected: Sequence[Injected], last_commit_s: float, now_s: float, least_s: float = 0.0) -> float | None:
    """Return the seconds without a commit if they are more than the faults explain, else None.

    While the job has not recovered from a fault, time counts from the last fault, and the longest bound of the open
    faults applies. Afterwards it counts from the last commit. `least_s` is a bound that applies in any case, as at the
    end of the job.
    """
    if not injected:
        return None
    waiting = [f for f in injected if f.recovered_s is None]
    since_s = injected[-1].at_s if waiting else max(injected[-1].at_s, last_commit_s)
    bound_s = max([least_s, *(f.bound_s for f in waiting or injected[-1:])])
    return now_s - since_s if now_s - since_s > bound_s else None


def leaderless_s(injected: Sequence[Injected], now_s: float) -> float:
    """Return the seconds for which earlier faults may still keep the operator from deciding anything.

    A commit after those faults is no proof of a leader: it only shows that training goes on.
    """
    ends_s = (f.at_s + f.bound_s - FORM_S for f in injected if KINDS[f.kind].leaderless)
    return max(0.0, max(ends_s, default=now_s) - now_s)


def roll_backs(trace: Trace, alive_until_s: Mapping[Who, float], group_size: int = 1) -> list[RollBack]:
    """Return the generations of a session that continued from an older state than a process held that lived on.

    `alive_until_s` maps each process to the last time at which it was alive. A process that was alive after the
    generation's first commit held its state all the while.

    For a split model, `group_size` processes hold one copy. A state of which one part is lost is no state: its holders
    may go back, to a checkpoint. A state is whole as long as each part has a living process that is at most one step
    behind in that generation. A process applies a step only after all others have reduced it, and those others can
    follow with the gradients that they kept.
    """
    commits = sorted(trace.commits, key=lambda c: c.t_s)
    newest: dict[Who, Commit] = {}
    seen, found = 0, []
    for commit in commits:
        if commit.generation > seen:
            seen = commit.generation
            living = {who: c for who, c in newest.items() if alive_until_s.get(who, 0.0) > commit.t_s}
            for who, held in living.items():
                parts = {c.part for c in living.values() if c.generation == held.generation and c.step >= held.step - 1}
                if held.step >= commit.step and len(parts) == group_size:
                    found.append(RollBack(seen, commit.step, f"{who[0]}-{who[1]}", held.step))
        newest[commit.who] = commit
    return found


def script_roll_backs(trace: Trace) -> list[RollBack]:
    """Return the processes of a script that began with an older state than the newest checkpoint from before their start."""
    found = []
    for built in trace.built:
        saved = max((step for t_s, step in trace.saved if t_s < built.started_s), default=0)
        if built.step < saved:
            found.append(RollBack(0, built.step, "the script's checkpoint", saved))
    return found


def redone_steps(trace: Trace) -> int:
    """Return the number of steps that were committed again. They count when a later group begins at or below the highest step."""
    built_s: dict[Who, float] = {b.who: b.started_s for b in trace.built}
    first: dict[tuple[int, Who | None], Commit] = {}
    for commit in sorted(trace.commits, key=lambda c: c.t_s):
        first.setdefault((commit.generation, commit.who if commit.generation == 0 else None), commit)
    count, highest, at = 0, -1, 0
    commits = sorted(trace.commits, key=lambda c: c.t_s)
    begun_s = 0.0
    for begin in sorted(first.values(), key=lambda c: c.t_s):
        while commits[at] is not begin:
            highest, at = max(highest, commits[at].step), at + 1
        started_s = built_s.get(begin.who, 0.0)
        if begin.generation == 0 and started_s <= begun_s:
            continue  # a sibling of processes that were counted
        begun_s = begin.t_s
        count += max(0, highest + 1 - begin.step)
    return count


def differences(done: Sequence[Done], expected: Expected, samples_in_status: str | None) -> list[str]:
    """Return one sentence for each difference between the end of a job and the end of the run without faults."""
    if not done:
        return ["No process wrote its final parameters."]
    last = max(d.generation for d in done)
    final = [d for d in done if d.generation == last]
    out = [
        f"{d.who[0]}-{d.who[1]} ended with parameters {d.parameters[:12]}, without faults they are {expected.parameters[:12]}."
        for d in final
        if d.parameters != expected.parameters
    ]
    digests = {d.samples for d in final} | ({samples_in_status} if samples_in_status is not None else set())
    out += [
        f"The digest of the samples is {s}, without faults it is {expected.samples}."
        for s in digests
        if s != expected.samples
    ]
    return out


def split_differences(trace: Trace, expected: Expected) -> list[str]:
    """Return one sentence for each difference between a split model and the same model in one process, without faults.

    Each process that made the last step writes the values of its part. All elements, and the result of each evaluation,
    have to be those of one process. Its sums are exact, so neither the split nor the number of processes may change a
    bit.
    """
    out = []
    last = max((d.generation for d in trace.done), default=0)
    for done in trace.done:
        wrong = [key for key, value in done.elements.items() if expected.elements.get(key) != value]
        if wrong and done.generation == last:
            out.append(
                f"{done.who[0]}-{done.who[1]} ended with {len(wrong)} of {len(done.elements)} elements of its part other than "
                f"without faults. The first is {wrong[0]}: {done.elements[wrong[0]]}, not {expected.elements.get(wrong[0])}."
            )
    missing = expected.elements.keys() - {key for done in trace.done for key in done.elements}
    if trace.done and missing:
        out.append(f"No process wrote {len(missing)} elements of the final parameters, such as {min(missing)}.")
    out += [
        f"{e.who[0]}-{e.who[1]} evaluated the model after {e.step} steps to {e.value}, without faults it is "
        f"{expected.evaluated.get(e.step)}."
        for e in trace.evaluated
        if expected.evaluated.get(e.step) != e.value
    ]
    return out
