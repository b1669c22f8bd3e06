"""The kinds of fault: what each does, how often it is drawn, and within how long the job must commit after it.

A bound counts from the fault's own moment. If a later fault comes before the next commit, only the later one's bound
counts. Bounds are for a machine with two busy cores. A recovery is usually far below them: the table shows p50 and p99.
"""

from __future__ import annotations

from dataclasses import dataclass

FORM_S = 20.0
"""Time to form again. A kill is known at once. But a generation that was being formed may have to be given up first.
That takes as long as the operator waits for a member that has entered (Settings.form_timeout_s)."""
IMPORTS_S = 30.0
"""A new agent starts, imports torch in its zygote, forks, and the script builds its model: 4 s alone, more if several do."""
DISCONNECT_S = 5.0
"""recovery.disconnectSeconds of the jobs, and slack. An agent that is silent for longer counts as lost."""
NODE_S = 30.0
"""Time until a silent node counts as lost: 10 s until Kubernetes calls it NotReady, then disconnectSeconds. If the
operator was on it, the next leader also waits for the lease (15 s)."""
LEADER_S = 40.0
"""Time without a leader, in which nothing is decided: lease (15 s), the new leader's first plan, the grace of its term (20 s)."""

SESSION, SCRIPT = "Session", "Script"


@dataclass(frozen=True)
class Kind:
    """One kind of fault. `bound_s` excludes the time that the fault itself lasts, which is added."""

    name: str
    what: str
    weight: int
    bound_s: float
    why: str
    lasts: bool = False
    """The fault is undone after a time that the plan draws (0.2 to 10 s)."""
    tiers: tuple[str, ...] = (SESSION, SCRIPT)
    elastic_only: bool = False
    cluster: bool = True
    local: bool = True
    imports: bool = False
    """A worker imports torch again after the fault. Until then the agent cannot fork a successor of a process
    that dies."""
    leaderless: bool = False
    """The operator may decide nothing for a time after the fault, even if training goes on. The recovery from a
    later fault has to wait for that."""

    def limit_s(self, *, replaced: bool, script: bool, lasts_s: float) -> float:
        """Return the seconds within which the job must commit after this fault.

        `replaced`: the job cannot train without the worker that this fault, or one just before, has hit. So it waits
        for a new one.
        """
        # Every process of a script starts again: it waits for the old ones' end (10 s at most) and for the imports.
        return self.bound_s + lasts_s + (IMPORTS_S if replaced else 0.0) + (IMPORTS_S if script else 0.0)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kill-trainer", "SIGKILL of one trainer process", 6, FORM_S,
             "its agent says so at once; it is forked anew from the zygote"),
        Kind("kill-two", "SIGKILL of two trainer processes at once", 3, FORM_S, "the same"),
        Kind("kill-all", "SIGKILL of every trainer process at once", 3, FORM_S,
             "the agents and their zygotes live: processes are forked anew, state comes from the newest checkpoint"),
        Kind("kill-store-host", "SIGKILL of the process that hosts the generation's store", 5, FORM_S, "the same as any process"),
        Kind("kill-agent", "SIGKILL of an agent (in the cluster: of the container's process 1)", 1, FORM_S,
             "its stream closes and its trainers die with it: the others form at once", imports=True),
        Kind("kill-store-agent", "SIGKILL of the agent of the store's host", 1, FORM_S, "the same", imports=True),
        Kind("kill-zygote", "SIGKILL of a zygote", 1, FORM_S, "no trainer needs it until the next restart; a restart that waits "
             "for a new one needs its imports", imports=True),
        Kind("stop-trainer", "SIGSTOP of a trainer process, SIGCONT later", 3, FORM_S,
             "the group stands as long as it is stopped; then it goes on, or forms without it", lasts=True),
        Kind("stop-agent", "SIGSTOP of an agent, SIGCONT later", 2, FORM_S + DISCONNECT_S,
             "training goes on; a change of members waits for it until it is lost", lasts=True),
        Kind("term-trainer", "SIGTERM to a trainer process", 2, FORM_S, "it ends, which is a crash like any other"),
        Kind("term-agent", "SIGTERM to an agent, as for a pod that is deleted with grace", 1, FORM_S,
             "a drain: it trains on until the others have its state", imports=True),
        Kind("scale", "regroup scale or kubectl scale to another size from 1 up", 4, FORM_S,
             "nobody waits for newcomers that still import", elastic_only=True),
        Kind("damage-checkpoint", "the newest checkpoint loses a byte or is removed, then every trainer process is killed", 2,
             FORM_S, "an older checkpoint is read", tiers=(SESSION,)),
        Kind("disk-full", "the checkpoint volume (a small tmpfs) is full for a time", 1, FORM_S,
             "training does not wait for checkpoints", lasts=True, tiers=(SESSION,), cluster=False),
        Kind("stall-log", "nobody reads the pipe that all processes write their log to, for a time", 1, FORM_S,
             "a process that prints stands as long", lasts=True, cluster=False),
        Kind("slow-rank", "one process takes 0.2 s longer for each step, for a time", 1, FORM_S, "the others wait for it",
             lasts=True),
        Kind("delete-pod", "kubectl delete pod, with or without grace", 4, FORM_S,
             "the others form at once", local=False, imports=True),
        Kind("power-off", "a node's power is cut; it comes back later", 2, FORM_S + NODE_S,
             "its silence is proof after disconnectSeconds", local=False, lasts=True, imports=True, leaderless=True),
        Kind("flap-node", "a node's power is cut and back at once, twice", 1, FORM_S + NODE_S + IMPORTS_S,
             "its containers are started again by its kubelet", local=False, imports=True, leaderless=True),
        Kind("kill-operator", "SIGKILL of the leading operator", 2, FORM_S + LEADER_S,
             "training goes on; a failure meanwhile waits for the next leader", local=False, leaderless=True),
        Kind("stop-api", "API server and etcd are stopped for 20 s", 1, FORM_S + LEADER_S,
             "training goes on; a failure meanwhile waits for the API server, and for a new lease", local=False, lasts=True,
             leaderless=True),
        Kind("cut-link", "packets from one worker's node to another's are dropped, in this direction only, for a time", 1,
             FORM_S * 2 + DISCONNECT_S, "a collective between them breaks or stands until it is back; the set that failed to form "
             "is not announced again", local=False, lasts=True),
    )
}  # fmt: skip

WHOLE_S = 90.0
"""Time after the last fault within which all wanted workers must be in the job's generation again. It covers a pod's
start, imports, and the longest back-off of a restart (30 s). The plan chooses the faults before which this is checked.
"""
START_S = 150.0
END_S = 90.0
"""Time from the last step's commit to Succeeded. It covers the last checkpoint and every rank's report. It also covers
one more forming if a rank was killed before that, and the restart of a script that was killed after it."""
