"""One plan for one job: the stages in a line. Pure. See the package's text for what each of them is for."""

from __future__ import annotations

from regroup_operator.model.plan import JobPlan, Urgency, earliest
from regroup_operator.model.worker import Wait
from regroup_operator.plan.commands import Briefing, commands_due_s, end_of, plan_commands
from regroup_operator.plan.facts.current import named_checkpoint
from regroup_operator.plan.facts.facts import Inputs, gather_facts
from regroup_operator.plan.failures.failures import judge_failures
from regroup_operator.plan.generation.generation import plan_generation
from regroup_operator.plan.lifecycle.lifecycle import (
    Ended,
    decide_lifecycle,
    finished_of,
    stop_word,
)
from regroup_operator.plan.pods.pods import plan_pods
from regroup_operator.plan.remember import remember
from regroup_operator.plan.report.overview import Stages
from regroup_operator.plan.report.report import make_report


def plan_job(inputs: Inputs) -> JobPlan:
    """Return the plan."""
    clock, settings = inputs.clock, inputs.settings
    facts = gather_facts(inputs)
    failures = judge_failures(facts)
    lifecycle = decide_lifecycle(facts, failures)
    generation = plan_generation(facts, failures, lifecycle)
    pods = plan_pods(facts, failures, lifecycle, generation)
    report = make_report(Stages(facts, failures, lifecycle, generation, pods))
    announced_before = (
        generation.kept.issued.document if facts.current is not None and facts.current.has_document else None
    )
    stop, finished = stop_word(lifecycle), finished_of(lifecycle)
    end = None
    if finished is not None and facts.tier != "Script":
        end = end_of(facts, finished, generation.workers, named_checkpoint(report.status))
    briefing = Briefing(
        workers=generation.workers,
        tier=facts.tier,
        document=generation.document or announced_before,
        released=frozenset(report.status.released),
        stop=stop,
        stalled=facts.asks,
        ask=generation.decision.ask if isinstance(generation.decision, Wait) else frozenset(),
        suspected=facts.silences.suspected,
        now_s=clock.now_s,
        end=end,
        lists_members=facts.lists_members,
    )
    dues_s = (
        clock.now_s + settings.resync_s,
        facts.due_s,
        failures.due_s,
        generation.due_s,
        pods.due_s,
        lifecycle.due_s,
        report.due_s,
        # Who is told to stop is not asked whether it is there.
        commands_due_s(facts, generation.members) if stop is None and end is None else None,
    )
    notes = (*facts.adoption.notes, *generation.notes, *pods.notes, *report.notes)
    return JobPlan(
        status=report.status,
        # What is told as an event is written at once, or it would be told at every look until then.
        urgency=Urgency.NOW if notes else report.urgency,
        memory=remember(facts, failures, generation, pods),
        tell=(*generation.tell, *report.tell, *plan_commands(briefing)),
        create=pods.create,
        create_roles=pods.roles.create,
        delete=pods.delete,
        notes=notes,
        due_s=earliest(dues_s, after_s=clock.now_s),
        progress_due=facts.progress_due,
        announced=generation.document is not None,
        expired=isinstance(lifecycle, Ended) and lifecycle.due_s is not None and lifecycle.due_s <= clock.now_s,
    )
