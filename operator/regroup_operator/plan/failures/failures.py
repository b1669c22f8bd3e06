"""The stage of failures: processes, containers and pods that ended, hangs, and generations that commit nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from regroup_operator.model.plan import Memory, Verdict, timestamp
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.facts import Facts, members_of
from regroup_operator.plan.failures.crashes import crash_sentence, is_hopeless, note_crashes, repeats
from regroup_operator.plan.failures.exits import excused_generations, see_failures
from regroup_operator.plan.failures.hangs import HUNG, Hang, find_hang, hangs_in_a_row
from regroup_operator.plan.failures.no_commit import NO_COMMIT, broke_without_commit, no_commit_failure
from regroup_operator.plan.failures.restarts import exit_words, judge_restarts, log_words


@dataclass(frozen=True)
class Failures:
    """`memory`: in which they are counted."""

    memory: Memory
    workers: tuple[Worker, ...]
    """As before, but whose processes hang stands as hung."""
    hang: Hang
    num_processes: int = 0
    """Processes and containers that have ended since the last plan, and count."""
    recent: tuple[str, ...] | None = None
    """status.restarts.recent; None: as it was."""
    crash: str = ""
    """What is said of a crash that repeats; empty: none does."""
    num_without_commit: int = 0
    """Generations in a row that broke before a step was committed, the newest included; 0: the newest did not."""
    verdict: Verdict | None = None
    """Why the job has to fail."""

    @property
    def members(self) -> tuple[Worker, ...]:
        """The newest generation's."""
        return members_of(self.workers)


def judge_failures(facts: Facts) -> Failures:
    """Count what has failed since the last plan, and judge whether it was too much."""
    inputs, obs = facts.inputs, facts.inputs.obs
    seen = see_failures(obs, facts.memory, inputs.clock, tier=facts.tier, current=facts.current)
    sessions = obs.sessions.values()
    committed_s = [s.progress_at_s for s in sessions if s.progress_at_s is not None]
    crash = note_crashes(
        seen.memory.crash,
        seen.failures,
        committed_at=max(map(inputs.clock.wall_at, committed_s), default=None),
        script=facts.tier == "Script",
        excused=excused_generations(sessions, seen.memory, facts.tier),
    )
    memory = replace(seen.memory, crash=crash)
    words = ""
    if crash is not None and repeats(crash):
        words = crash_sentence(crash, exit_words(crash.last), log_words(crash.last, inputs.logs))
    verdict, recent = None, None
    if seen.failures:
        recovery = inputs.job.spec.recovery
        known = (facts.status.get("restarts") or {}).get("recent", ())
        judged = judge_restarts(
            recent=[datetime.fromisoformat(at).timestamp() for at in known],
            new=seen.failures,
            max_restarts=recovery.max_restarts,
            window_s=recovery.window_seconds,
            now=inputs.clock.wall,
            logs=inputs.logs,
        )
        recent = tuple(timestamp(at) for at in judged.recent)
        if is_hopeless(crash):
            verdict = Verdict("RepeatedCrash", words)
        elif judged.message is not None:
            verdict = Verdict("TooManyRestarts", judged.message)
    hang, workers = _hang(facts)
    if verdict is None and hang.failure is not None:
        verdict = Verdict(HUNG, hang.failure)
    num_without_commit = _num_without_commit(facts, workers)
    if verdict is None and num_without_commit:
        no_commit = no_commit_failure(num_without_commit, members_of(workers))
        verdict = None if no_commit is None else Verdict(NO_COMMIT, no_commit)
    return Failures(memory, workers, hang, len(seen.failures), recent, words, num_without_commit, verdict)


def _hang(facts: Facts) -> tuple[Hang, tuple[Worker, ...]]:
    """Find out whether the newest generation hangs; whose processes do stands as hung from here on."""
    if facts.tier != "Session":
        return Hang(), facts.workers
    inputs = facts.inputs
    hang = find_hang(
        current=facts.current,
        workers=facts.workers,
        processes=facts.processes,
        hang_seconds=inputs.job.spec.recovery.hang_seconds,
        in_a_row=hangs_in_a_row(facts.known, facts.newest_step),
        now_s=inputs.clock.now_s,
        settings=inputs.settings,
        per_group=facts.per_group,
    )
    if not hang.culprits:
        return hang, facts.workers
    return hang, tuple(
        replace(w, standing=Standing.HUNG, available=False, since_s=hang.found_s, why=HUNG)
        if w.id in hang.culprits
        else w
        for w in facts.workers
    )


def _num_without_commit(facts: Facts, workers: tuple[Worker, ...]) -> int:
    broke = facts.tier == "Session" and broke_without_commit(
        facts.current, members_of(workers), start_step=facts.start_step, newest_step=facts.newest_step
    )
    return facts.memory.without_commit + 1 if broke else 0
