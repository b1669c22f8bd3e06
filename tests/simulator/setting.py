"""What the seed of a walk stands for: the job, and the faults that come to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from regroup_operator.controller import MAX_REST_S
from regroup_operator.model.records import Settings
from tests.builders.jobs import role
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.disk import RESUME_FROM
from tests.simulator.faults import KINDS, LEAVING, Fault, draw
from tests.simulator.pace import Pace
from tests.simulator.policies import IGNORES, NO_POLICY, RULES, Policy, policy_of
from tests.simulator.world import World

MAX_REPLICAS = 5
SHORT_STEPS = 200
"""A job of so many steps may train to its end after all is well."""
GROUPS_CHANCE = 0.1
"""So many of the jobs have workers in groups of two."""
SIZES_CHANCE = 0.15
"""So many of the elastic jobs train with even numbers of workers, or of groups, only."""
OBSERVES_CHANCE = 0.75
"""In so many of the jobs agents observe each other; in the others the operator alone hears of them."""
RULES_CHANCE = 0.1
"""So many of the jobs ignore every failure by a rule of spec.recovery.onExit."""
EARLY_CHANCE = 0.06
"""In so many of the walks kubelets refuse all pods at first, or cannot pull their images, or the template is wrong; in more of them
if the job has a deadline for its start."""
HANG_S = 30
"""spec.recovery.hangSeconds."""
FIRST_STEP_S = 30.0


@dataclass(frozen=True)
class Setting:
    """The job of a walk."""

    seed: int
    replicas: int
    minimum: int
    fixed: bool
    processes: int
    script: bool
    known: bool
    """The agents know from the start that the script uses the library."""
    total_steps: int
    step_s: float
    checkpoint_every: int
    term_grace_s: float
    quick: bool
    """Nothing takes any time."""
    snapshot_every: int = 0
    """Each worker has a snapshot in memory after so many steps."""
    per_group: int = 1
    """Workers of a group. All sizes are multiples of it."""
    ignores: bool = False
    """A rule ignores every failure: whatever else happens, none may count."""
    spares: int = 0
    cooldown_s: int = 0
    """spec.elasticPolicy.growthCooldownSeconds."""
    pending_s: int = 0
    """spec.elasticPolicy.pendingTimeoutSeconds; 0: absent."""
    multiple: int = 1
    """spec.elasticPolicy.sizeMultipleOf; 1: absent."""
    roles: int = 0
    """Pods of a role beside the workers."""
    required: bool = False
    """The job is complete only once they have succeeded."""
    observes: bool = False
    """Agents observe each other from other nodes."""
    policy: Policy = NO_POLICY
    """What the spec says of the job's end."""
    rest_s: float = 0.0
    """Operators rest for so long after each plan."""
    end_s: float = 0.0
    """A script takes so long at most from its last step to its end."""
    progress_factors: tuple[float, ...] = (1.0,)
    """Operators serve many other jobs, and agents report so many times less often: one operator after the other."""

    def __str__(self) -> str:
        size = f"fixed at {self.replicas}" if self.fixed else f"{self.replicas} workers, at least {self.minimum}"
        size += f" in groups of {self.per_group}" if self.per_group > 1 else ""
        tier = "script" if self.script else "session"
        return (
            f"{tier}, {size}, {self.processes} process(es) each, {self.total_steps} steps of {self.step_s:g} s, "
            f"checkpoint every {self.checkpoint_every or 'no'} steps, snapshot every {self.snapshot_every or 'no'} steps"
            + (", failures are ignored" if self.ignores else "")
            + (f", {self.spares} spares" if self.spares else "")
            + (f", {self.roles} pods of a role" if self.roles else "")
            + (" that it waits for" if self.required else "")
            + (", agents observe each other" if self.observes else "")
            + (f", scripts end within {self.end_s:g} s" if self.end_s else "")
            + (f", operators rest for {self.rest_s:g} s after each plan" if self.rest_s else "")
            + (
                f", progress is reported {self.progress_factors} times less often"
                if max(self.progress_factors) > 1.0
                else ""
            )
            + (f", grows every {self.cooldown_s} s at most" if self.cooldown_s else "")
            + (f", in multiples of {self.multiple}" if self.multiple > 1 else "")
            + (f", pods are pending for {self.pending_s} s at most" if self.pending_s else "")
            + str(self.policy)
        )

    def job(self) -> JobBuilder:
        """Return the job's builder."""
        rules = [IGNORES] if self.ignores else RULES[self.policy.rules]
        recovery = {"maxRestarts": 1_000_000, "hangSeconds": HANG_S, "onExit": rules, "spares": self.spares}
        job = make_job().with_replicas(self.replicas).with_recovery(**recovery)
        job = job.fixed() if self.fixed else job
        if not self.fixed:
            policy = {"minReplicas": self.minimum, "maxReplicas": MAX_REPLICAS * self.per_group}
            policy |= {"growthCooldownSeconds": self.cooldown_s}
            policy |= {"pendingTimeoutSeconds": self.pending_s} if self.pending_s else {}
            policy |= {"sizeMultipleOf": self.multiple} if self.multiple > 1 else {}
            job = job.with_spec(elasticPolicy=policy)
        job = job.with_spec(runPolicy=self.policy.run_policy())
        beside = role(**{"restartPolicy": "Never"} if self.policy.never else {})
        beside |= {"replicas": self.roles, "requiredForCompletion": self.required}
        job = job.with_spec(roles=[beside]) if self.roles else job
        job = job.with_spec(workersPerGroup=self.per_group) if self.per_group > 1 else job
        # What is durable lies on a claim, so that the operator asks for checkpoints and names them.
        if self.snapshot_every:
            job = job.with_spec(memorySnapshot={"sizeLimit": "1Gi"})
        if not self.checkpoint_every and not self.policy.resumes:
            return job
        begins = {"resumeFrom": RESUME_FROM} if self.policy.resumes else {}
        return job.with_spec(checkpoint={"volumeClaim": "digits", **begins})

    def settings(self) -> Settings:
        """Return the operator's times; a first step compiles nothing here."""
        return Settings(term_grace_s=self.term_grace_s, first_step_s=FIRST_STEP_S)

    def world(self) -> World:
        """Return a world with this job, a moment before its start."""
        rng = random.Random(f"{self.seed}/pace")
        pace = Pace(rng) if self.quick else Pace(
            rng, start_s=(0.05, 3.0), form_s=(0.01, 0.3), adopt_s=(0.01, 1.0), checkpoint_s=(0.1, 2.0),
            container_s=(0.5, 3.0), reconnect_s=(0.02, 1.0), watch_s=(0.0, 0.5), probe_late_s=(0.0, 3.0),
            in_part=True, shuffles=True, rest_s=self.rest_s,
        )  # fmt: skip
        return World(
            None, self.job(), processes=self.processes, script="plain" if self.script else "session",
            known_session=self.known, total_steps=self.total_steps, settings=self.settings(),
            pace=pace, num_nodes=4, checkpoint_every=self.checkpoint_every, by_json=self.seed % 8 == 0, backs_off=True,
            snapshot_every=self.snapshot_every, observes=self.observes, progress_factors=self.progress_factors,
            end_s=self.end_s,
            resumes=self.policy.resumes,
        )  # fmt: skip


def setting_of(seed: int) -> Setting:
    """Return the job that a seed stands for."""
    rng = random.Random(f"{seed}/setting")
    script = rng.random() < 0.2
    minimum = rng.choice([1, 1, 2])
    setting = Setting(
        seed=seed,
        replicas=rng.choice([r for r in (1, 2, 3, 3, 4) if r >= minimum]),
        minimum=minimum,
        fixed=rng.random() < 0.25,
        processes=rng.choice([1, 1, 2]),
        script=script,
        known=not script and rng.random() < 0.7,
        total_steps=rng.choice([60, SHORT_STEPS, 1_000_000, 1_000_000]),
        step_s=rng.choice([0.25, 0.5, 2.0]),
        checkpoint_every=0 if script else rng.choice([0, 0, 7, 20]),
        term_grace_s=rng.choice([0.0, 20.0]),
        quick=rng.random() < 0.25,
        # Of its own, so that the rest of a seed's setting is what it was before there were snapshots.
        snapshot_every=0 if script else random.Random(f"{seed}/snapshot").choice([0, 0, 1, 5, 25]),
        ignores=random.Random(f"{seed}/rules").random() < RULES_CHANCE,
        roles=random.Random(f"{seed}/roles").choice([0, 0, 0, 2]),
        observes=random.Random(f"{seed}/observes").random() < OBSERVES_CHANCE,
        progress_factors=random.Random(f"{seed}/pace of reports").choice(
            [(1.0,), (1.0,), (3.0,), (10.0,), (10.0, 1.0)]
        ),
        rest_s=random.Random(f"{seed}/rest").choice([0.0, 0.0, 0.0, 0.0, MAX_REST_S]),
        spares=random.Random(f"{seed}/spares").choice([0, 0, 0, 1]),
        cooldown_s=random.Random(f"{seed}/cooldown").choice([0, 0, 20]),
        pending_s=random.Random(f"{seed}/pending").choice([0, 0, 10]),
        end_s=random.Random(f"{seed}/end").choice([0.0, 0.0, 3.0, 20.0]),
    )
    if setting.roles and random.Random(f"{seed}/required").random() < 0.6:
        setting = replace(setting, required=True)
    setting = replace(
        setting,
        policy=policy_of(
            seed, rules=not setting.ignores, roles=setting.roles > 0, durable=script or setting.checkpoint_every > 0
        ),
    )
    if not setting.fixed and random.Random(f"{seed}/sizes").random() < SIZES_CHANCE:
        minimum = 2 * minimum
        setting = replace(setting, multiple=2, minimum=minimum, replicas=max(minimum, setting.replicas))
    # Of its own, too: a job of groups is a job of workers with each of them doubled.
    if random.Random(f"{seed}/groups").random() >= GROUPS_CHANCE:
        return setting
    return replace(
        setting, per_group=2, replicas=2 * setting.replicas, minimum=2 * setting.minimum, spares=2 * setting.spares,
        multiple=setting.multiple if setting.multiple == 1 else 2 * setting.multiple,
    )  # fmt: skip


def faults_of(seed: int, kinds: list[str], most: int = 8) -> list[Fault]:
    """Return the faults that a seed stands for: some alone, some in the middle of what others have set off."""
    rng = random.Random(f"{seed}/faults")
    setting = setting_of(seed)
    kinds = [k for k in kinds if not (setting.script and KINDS[k].session_only)]
    kinds = [k for k in kinds if setting.checkpoint_every or not KINDS[k].durable]
    faults = [draw(rng, kinds, calm=rng.random() < 0.5) for _ in range(rng.randint(1, most))]
    aimed = random.Random(f"{seed}/aimed")
    if setting.policy.rules and aimed.random() < AIMED_CHANCE:
        at = aimed.randrange(len(faults))
        fault = draw(aimed, [k for k in AIMED[setting.policy.rules] if k in kinds] or kinds, calm=True)
        faults[at] = replace(fault, size=aimed.choice([1, 2, 4]), turns=aimed.choice([0, 1]))
    early = random.Random(f"{seed}/early")
    if early.random() < (0.5 if setting.policy.start_s or setting.policy.rules == "images fail" else EARLY_CHANCE):
        kind = early.choice(EARLY)
        faults[:1] = [Fault(kind, calm=False, for_s=early.choice(KINDS[kind].spans))] if kind in kinds else faults[:1]
    late = random.Random(f"{seed}/late")
    if setting.total_steps <= SHORT_STEPS and late.random() < LATE_CHANCE:
        faults = faults[:2]
        for _ in range(late.randint(1, 4)):
            fault = draw(late, kinds, calm=False)
            faults.append(replace(fault, moment=LEAVING if late.random() < 0.7 else ""))
    return faults


LATE_CHANCE = 0.6
"""In so many of the walks whose job trains to its end, faults come while scripts leave their loops."""
AIMED_CHANCE = 0.6
"""In so many of the walks with rules one fault is of a kind that they concern."""
AIMED = dict.fromkeys(RULES, ("exit-code",)) | {
    "a kill fails": ("kill", "container", "hang-trainer"),
    "evictions fail": ("disrupt-pod",),
    "evictions are ignored, preemptions count": ("disrupt-pod",),
    "images fail": ("lose-images",),
    "memory fails": ("container",),
}
EARLY = ("refuse-pods", "lose-images", "misspell")
"""Kinds that keep a job from starting."""
HANGS = ("hang-trainer", "hang-all")
"""Kinds after which a process hangs for ever with its agent answering."""
