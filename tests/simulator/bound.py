"""The promise that a walk is judged by: how long a job may go without a commit, and for what it may wait without end.

An Active job with at least minReplicas agents that answer commits, or ends Failed with a sentence, within `bound_s`.
"""

from __future__ import annotations

from regroup_operator.api import Job
from regroup_operator.model.records import Settings
from regroup_operator.model.waits import UntilEvent
from regroup_operator.plan.failures.hangs import ALONE, ANSWER_S
from regroup_operator.plan.generation.trouble import KILL_S

LEASE_S = 15.0
"""An operator that died without a word is followed by another one after its lease (OperatorSettings.lease_duration_s)."""
BACK_OFF_S = 30.0
"""The longest pause before a process, a pod or a generation is tried again."""
PULL_S = 300.0
"""The longest pause of a kubelet before it pulls an image again, and of the operator before it makes another pod for a slot whose
last ones were refused (plan/pods/early.py)."""
NAMED = {
    "NoWitness": "the newest state is held by a worker that cannot be reached",
    "CheckpointUnreadable": "the checkpoint that must be read cannot be",
}
"""Reasons of condition Training=False for which a job may wait without end, where that is so."""
WAITS = {
    *NAMED,
    "Suspending",  # for the pods of nodes that are off: condition Suspended names them
    *(
        w.value.reads[2]
        for w in UntilEvent
        if w.value.lacks != "nothing" and w.value.reads[:2] == ("Training", "False")
    ),
}
"""Reasons of condition Training=False that say what the job lacks, where it may wait without end."""


def bound_s(job: Job, settings: Settings, *, start_s: float, script: bool, hangs: bool = False) -> float:
    """Return the seconds from the last fault to the next commit, at most.

    `start_s` is what a container and the imports of its processes take; `script`: tier Script; `hangs`: a process may hang
    for ever with its agent answering.
    """
    addends = {
        "a leader is there": LEASE_S,
        "and waits for agents that have not called yet": settings.term_grace_s,
        "who is silent is lost": job.spec.recovery.disconnect_seconds + settings.probe_s,
        "a planned generation that is under way is dropped": settings.planned_timeout_s,
        "a member that never gets into its generation is given up, and so is one that took its place": 2
        * settings.form_timeout_s,
        "a process or pod that has failed before waits for its turn": BACK_OFF_S,
        "new pods and processes start": start_s,
        "and, where some do not come, a first generation starts without": settings.first_wait_s,
        "two generations more that meet a cut link, with their pauses": 2 * 5.0,
    }
    if script:
        addends["whether a script uses the library shows after"] = 30.0
        addends["old processes have a grace"] = 10.0
    hang_s = job.spec.recovery.hang_seconds
    if hangs and hang_s is not None:
        addends["a step is overdue, and longer where nobody else would be left with the state"] = ALONE * hang_s
        addends["agents say where their processes are, twice"] = 2 * ANSWER_S
        addends["a process that hangs is killed"] = KILL_S
        addends["who hangs before it trains is restarted"] = settings.late_timeout_s
    return sum(addends.values())
