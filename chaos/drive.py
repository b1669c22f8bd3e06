"""Injects one fault after the other into a running job, at the planned moments, and waits for the next commit after each.

A wait ends with a commit, the job's end, or the bound of the last fault. At the bound the job counts as stuck, and is
over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from chaos import plan, verdict
from chaos.job import Job, JobError, NothingToHitError
from chaos.kinds import END_S, IMPORTS_S, KINDS, SCRIPT, START_S, WHOLE_S
from chaos.plan import Fault
from chaos.verdict import Expected, Injected, Verdict
from harness.polling import within

POLL_S = 0.004
LOOK_S = 0.02
CHANGE_S = 3.0
"""Longest wait of a fault for its moment, which may be over already or never come. Then the fault is injected all the same."""
RESIZE_S = 8.0
"""The same wait after a resize. Its new workers import torch first, which takes 4 s on an idle machine."""
SECONDS_PER_FAULT = 1.6
"""Seconds of training for each fault. The steps are paced so that they last as long as the faults."""
LAST_STEPS = 30
"""Number of last steps that take 0.1 s each, so that a fault can be aimed at one."""


class _OverError(Exception):
    """The job has ended, or is stuck."""


class Drive:
    """One job from its start to its verdict."""

    def __init__(self, job: Job, faults: Sequence[Fault], say: Callable[[str], None]) -> None:
        """Drive `job` through `faults`. `say` gets a line for each fault and its outcome."""
        self._job, self._faults, self._say = job, list(faults), say
        self.injected: list[Injected] = []
        self.skipped: list[str] = []
        self.verdict = Verdict()
        self.diagnosis = ""
        self._first_commit: list[int] = []  # per injected fault: index of the first commit that can be after it
        self._seen = 0
        self._looked_s = 0.0
        self._resizing = False
        """True from a resize until its workers are those of the newest generation."""

    def run(self, expected: Callable[[], Expected]) -> Verdict:
        """Run the job through all faults and return the verdict. `expected` is called once the job has ended. Raises JobError."""
        try:
            self._job.pace(0.3, 1 << 30, 0.0)  # few steps are made before all workers are there
            self._job.start()
            self._wait(lambda: bool(self._job.reader.trace.commits), START_S, "its first commit")
            self._wait(self._job.is_whole, WHOLE_S, "all of its workers")
            for index, fault in enumerate(self._faults):
                self._pace(index)
                self._inject(fault, self._await(fault))
            self._job.pace(0.0, 0, 0.0)
            self._until(lambda: False)
        except _OverError:
            left = self._faults[len(self.injected) + len(self.skipped) :]
            self.skipped += [f"{fault}: the job was over" for fault in left]
        if self.verdict.outcome == "Succeeded":
            self._judge(expected())
        trace = self._job.reader.trace
        self.verdict.generations = int((self._job.status().get("membership") or {}).get("generation", 0))
        self.verdict.redone = verdict.redone_steps(trace)
        found = (
            verdict.script_roll_backs(trace)
            if self._job.scenario.tier == SCRIPT
            else verdict.roll_backs(trace, self._job.alive_until_s, self._job.scenario.group_size)
        )
        self.verdict.rolled_back = [str(r) for r in found]
        if not self.verdict.passed:
            self.diagnosis = self.diagnosis or self._job.diagnosis()
        return self.verdict

    def _judge(self, expected: Expected) -> None:
        session = self._job.scenario.tier != SCRIPT
        samples = (self._job.status().get("samples") or {}).get("digest", "") if session else None
        trace = self._job.reader.trace
        self.verdict.unequal = verdict.differences(trace.done, expected, samples)
        self.verdict.unequal += verdict.split_differences(trace, expected)

    # --- moments -----------------------------------------------------------------------------------------------------

    def _pace(self, index: int) -> None:
        """Pace the steps that are left so that they last as long as the faults that are left."""
        ordinary = sum(f.moment not in (plan.END, plan.FINISHING) for f in self._faults[index:])
        last = self._job.steps - LAST_STEPS
        if not ordinary:
            self._job.pace(0.0, last, 0.1)
            return
        left = max(last - self._job.reader.trace.step, 1)
        seconds = ordinary * SECONDS_PER_FAULT * (4 if self._job.scenario.tier == SCRIPT else 1)
        self._job.pace(min(max(seconds / left, 0.005), 0.5), last, 0.5)

    def _await(self, fault: Fault) -> str:
        """Wait for a fault's moment and return it. If it does not come, return the moment that is seen instead."""
        job, trace = self._job, self._job.reader.trace
        match fault.moment:
            case plan.FORMING | plan.ADOPTING:
                timeout_s = RESIZE_S if self._resizing else CHANGE_S
                met = self._until(lambda: job.changing() == fault.moment, timeout_s, unless=self._is_quiet)
            case plan.SCALING:
                # A resize to fewer workers is soon over: it is met while its generation forms, at the latest.
                self._until(lambda: not self._resizing or bool(job.changing()), fault.delay_s)
                met = self._resizing
            case plan.CHECKPOINT:
                met = self._until(job.writes_checkpoint, CHANGE_S)
            case plan.END:
                self._until(lambda: trace.step >= job.steps - 1 - int(fault.delay_s))
                met = trace.step < job.steps - 1
            case plan.FINISHING:
                met = self._until(lambda: trace.step >= job.steps - 1)
                self._until(lambda: False, fault.delay_s)
            case _:
                self._until(lambda: not self._open)
                if fault.whole_first:
                    self._whole()
                self._until(lambda: False, fault.delay_s)
                met = False  # whatever is seen by then
        return fault.moment if met else self._moment()

    def _moment(self) -> str:
        """Return the moment that is seen now."""
        step, last = self._job.reader.trace.step, self._job.steps - 1
        if step >= last:
            return plan.FINISHING
        if changing := self._job.changing():
            return changing
        if self._job.writes_checkpoint():
            return plan.CHECKPOINT
        if self._resizing:
            return plan.SCALING
        if step >= last - plan.END_STEPS:
            return plan.END
        return plan.RECOVERING if self._open else plan.SETTLED

    def _is_quiet(self) -> bool:
        """Return whether all faults so far are recovered from, and no change of members is left to come."""
        return not self._open and self._job.is_whole()

    def _whole(self) -> None:
        """Wait until all wanted workers are members again. A fault that is still to be undone extends the bound."""
        self._job.pace(0.5, 1 << 30, 0.0)  # or the job would end while its workers import
        while self._job.undo.pending():
            self._until(lambda: not self._job.undo.pending(), 1.0)
        self._wait(self._job.is_whole, WHOLE_S, f"all of its {self._job.wanted} workers")

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for a condition. The job is stuck if it does not hold within `timeout_s`."""
        began_s = time.time()
        if not self._until(condition, timeout_s):
            self._stuck(f"The job did not get {what} within {timeout_s:.0f} s.", began_s)

    def _until(
        self, condition: Callable[[], bool], timeout_s: float = float("inf"), unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Watch the job until `condition` or `unless` holds. Return whether `condition` did.

        Raises _OverError when the job has ended.
        """
        met = False

        def is_over() -> bool:
            nonlocal met
            self._tick()
            met = condition()
            return met or unless()

        within(is_over, timeout_s, every_s=POLL_S)
        return met

    # --- one fault ---------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, moment: str) -> None:
        trace, kind, scenario = self._job.reader.poll(), KINDS[fault.kind], self._job.scenario
        limit_s = kind.limit_s(
            replaced=self._importing(kind.imports), script=scenario.tier == SCRIPT, lasts_s=fault.lasts_s
        )
        limit_s += verdict.leaderless_s(self.injected, time.time())
        injected = Injected(
            fault.kind, moment, "", time.time(), limit_s, trace.step, trace.generation, planned=fault.moment
        )
        first = len(trace.commits)
        try:
            injected.hit = self._job.inject(fault)
        except NothingToHitError as error:
            self.skipped.append(f"{fault}: {error}")
            return
        self.injected.append(injected)
        self._first_commit.append(first)
        self._resizing = self._resizing or fault.kind == "scale"
        what = replace(fault, moment=injected.when)
        self._say(
            f"{len(self.injected):3d}  step {injected.step:5d}  generation {injected.generation:3d}  {what}: {injected.hit}"
        )

    def _importing(self, imports: bool) -> bool:
        """Return whether the job may need a worker that has to import torch before it can train on."""
        now_s, scenario = time.time(), self._job.scenario
        least = scenario.min_workers or self._job.wanted
        recent = any(KINDS[f.kind].imports for f in self.injected if now_s - f.at_s < IMPORTS_S)
        return recent or (imports and self._job.wanted <= least)

    @property
    def _open(self) -> list[Injected]:
        return [f for f in self.injected[-20:] if f.recovered_s is None]

    def _tick(self) -> None:
        trace, now_s = self._job.reader.poll(), time.time()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._job.look()
            self._resizing = self._resizing and not self._job.is_whole()
            ended = self._job.ended()
            if ended is not None:
                self._job.reader.poll()
                self._end(ended, now_s)
        if len(trace.commits) > self._seen:
            self._seen = len(trace.commits)
            for fault, since in zip(self.injected[-20:], self._first_commit[-20:], strict=True):
                if fault.recovered_s is None:
                    commit = verdict.next_commit(trace, fault, since)
                    if commit is not None:
                        fault.recovered_s = commit.t_s - fault.at_s
        self._check_stuck(now_s)

    def _check_stuck(self, now_s: float) -> None:
        """Raise _OverError if there has been no commit for longer than the last fault explains."""
        trace = self._job.reader.trace
        least_s = END_S if trace.step >= self._job.steps - 1 else 0.0
        quiet_s = verdict.overdue_s(self.injected, trace.commits[-1].t_s if trace.commits else 0.0, now_s, least_s)
        if quiet_s is not None:
            last = self.injected[-1]
            for fault in (*self._open, last):
                fault.stuck = True
            self._stuck(
                f"No commit for {quiet_s:.0f} s after {last.kind} ({last.when}) of {last.hit}, which may take "
                f"{max(last.bound_s, least_s):.0f} s. Step {trace.step} of {self._job.steps}, generation {trace.generation}.",
                now_s,
            )

    def _end(self, outcome: str, now_s: float) -> None:
        self.verdict.outcome = outcome
        for fault in self._open:
            if outcome == "Succeeded":
                fault.recovered_s = now_s - fault.at_s
            else:
                fault.stuck = True
        if outcome != "Succeeded":
            self.diagnosis = self._job.diagnosis()
        raise _OverError

    def _stuck(self, sentence: str, began_s: float) -> None:
        self.verdict.outcome = "Stuck"
        self.verdict.stuck.append(sentence)
        self.diagnosis = self._job.diagnosis()
        if self.injected and not self._open:
            self.injected[-1].stuck = self.injected[-1].at_s <= began_s
        raise _OverError


__all__ = ["Drive", "JobError"]
