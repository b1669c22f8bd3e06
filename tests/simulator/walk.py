"""One walk: a job, a list of faults, and the verdict after each of them. The same seed makes the same walk, everywhere."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from regroup_operator.api import parse_job
from regroup_operator.controller import MAX_REST_S
from regroup_operator.model.records import Settings
from regroup_operator.plan.generation.lateness import LONGEST_START
from regroup_operator.plan.pods.capacity import LAST_S
from regroup_operator.plan.pods.roles import LAST_S as ROLE_LAST_S
from tests.builders.jobs import role
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.bound import NAMED, PULL_S, WAITS, bound_s
from tests.simulator.cluster import REFUSED
from tests.simulator.disk import RESUME_FROM
from tests.simulator.faults import KINDS, LEAVING, MOMENT_S, Fault, draw
from tests.simulator.pace import Pace
from tests.simulator.policies import IGNORES, MISSING, NO_POLICY, RULES, Judge, Policy, is_well, policy_of
from tests.simulator.script import script_group
from tests.simulator.world import FOREVER, World

MAX_REPLICAS = 5
SHORT_STEPS = 200
"""A job of so many steps may train to its end after all is well."""
SHORT_S = 60.0
"""A job trains for so long after all is well if it may have to fail then."""
GROUPS_CHANCE = 0.1
"""So many of the jobs have workers in groups of two."""
OBSERVES_CHANCE = 0.75
"""In so many of the jobs agents observe each other; in the others they are of an earlier release."""
RULES_CHANCE = 0.1
"""So many of the jobs ignore every failure by a rule of spec.recovery.onExit."""
EARLY_CHANCE = 0.06
"""In so many of the walks kubelets refuse all pods at first, or cannot pull their images, or the template is wrong; in more of them
if the job has a deadline for its start."""
HANG_S = 30
"""spec.recovery.hangSeconds."""
FIRST_STEP_S = 30.0
COUNTED_S = 30.0
"""A count that decides nothing is written with the progress, which waits so long where it is reported less often."""
NO_LINK = "cannot reach each other"
"""What condition Training says of members without which too few are left."""
LOOK_S = 5.0
"""The verdict is looked at this often while nothing is committed."""


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
    # Of its own, too: a job of groups is a job of workers with each of them doubled.
    if random.Random(f"{seed}/groups").random() >= GROUPS_CHANCE:
        return setting
    return replace(
        setting, per_group=2, replicas=2 * setting.replicas, minimum=2 * setting.minimum, spares=2 * setting.spares
    )


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


class Failed(Exception):
    """The verdict: what does not hold. `sort` is the class of failures that it belongs to."""

    def __init__(self, sort: str, message: str) -> None:
        super().__init__(message)
        self.sort = sort


@dataclass
class Outcome:
    """What came of a walk."""

    setting: Setting
    faults: list[Fault]
    sort: str = ""
    """Empty: everything held."""
    message: str = ""
    hits: list[str] = field(default_factory=list)
    """Kinds of the faults that found something to hit."""
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    """Kind of a fault, seconds until the next commit."""
    waited: int = 0
    """How often the job waited for something that only the end of a fault could bring."""
    num_commits: int = 0
    end: str = ""
    """Succeeded, or the reason of condition Failed; empty: the job goes on."""
    num_due: int = 0
    """How many ends had to fail the job."""
    where: str = ""

    def __str__(self) -> str:
        lines = [f"seed {self.setting.seed}: {self.sort}: {self.message}", f"  {self.setting}"]
        lines += [f"  {fault}" for fault in self.faults]
        return "\n".join(lines)


class Walk:
    """Runs one."""

    def __init__(self, setting: Setting, faults: list[Fault]) -> None:
        self.setting, self.faults = setting, faults
        self.world = setting.world()
        self.judge = Judge(self.world, setting.policy)
        self.outcome = Outcome(setting, faults)
        self.bound_s = bound_s(
            parse_job(self.world.store.read()), self.world.settings, start_s=70.0 if self._slow else 10.0,
            script=setting.script, hangs=any(fault.kind in HANGS for fault in faults),
        )  # fmt: skip
        self._over_s = self.world.now_s
        """When the last fault is over."""
        self._able_s = self.world.now_s
        """Since when the promise has held the job to commit."""
        self._named_s = self.world.now_s
        """When the status last said what the job lacks, or nobody was there to say it."""
        self._shut_s = -FOREVER
        """When a new pod last had no node on which it could run."""
        self._seen = 0
        """Commits up to the last fault."""
        self._healed = False

    @property
    def _slow(self) -> bool:
        return any(fault.kind == "slow-starts" for fault in self.faults)

    def run(self) -> Outcome:
        """Return what came of it."""
        try:
            self._run()
        except Failed as verdict:
            self.outcome.sort, self.outcome.message = verdict.sort, str(verdict)
        except Exception as error:  # of ours, anywhere: that is what is looked for
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).split("\n")[0][:300]
            self.outcome.sort = "broken" if isinstance(error, AssertionError) else type(error).__name__
            self.outcome.message = f"{text} [{Path(last.filename).name}:{last.lineno}]"
            self.outcome.where = "".join(traceback.format_tb(error.__traceback__)[-4:])
            if self.outcome.sort == "broken":
                self.outcome.sort += " " + " ".join(w for w in text.split()[:6] if w.isalpha())
        self.outcome.num_commits = self.world.ledger.num_commits
        self.outcome.num_due = self.judge.num_due
        if self.world.has_ended:
            failed = self.world.phase == "Failed"
            self.outcome.end = self.world.condition("Failed")["reason"] if failed else self.world.phase
        return self.outcome

    def _run(self) -> None:
        for fault in self.faults:
            if fault.calm:
                self._recover()
            self._pass(fault.after_s)
            if self.world.has_ended:
                break
            self._strike(fault)
        self._recover()
        self._heal()
        self._regain()
        self._finish()
        if self.world.has_ended:
            self._outlive()

    # --- faults ----------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        world = self.world
        if fault.moment:
            world.on_moment = lambda moment, _: moment == fault.moment
            all_s = self.setting.total_steps * self.setting.step_s + self.bound_s
            world.advance(all_s if fault.moment == LEAVING else MOMENT_S, self.setting.step_s)
            world.on_moment = None
        for _ in range(fault.turns):
            world._turn()
        if world.has_ended:
            return  # while the fault waited for its moment
        # A pod of a role ends with each fault: it changes nothing for the workers.
        self._end_a_role(fault.at, fails=not self.setting.required or fault.other > 0, alone=fault.turns == 5)
        world.ledger.calm = self._is_calm()
        hits = KINDS[fault.kind].strike(world, fault)
        world.ledger.calm = False
        if hits:
            self.outcome.hits.append(fault.kind)
            if fault.kind in HANGS and LONGEST_START not in world.status:
                self.bound_s += world.settings.start_timeout_s  # no start has been seen that tells how long one takes
        lasts_s = fault.for_s if fault.for_s < FOREVER else 0.0
        self._over_s = max(self._over_s, world.now_s + min(lasts_s, 60.0) + _slow_end_s(fault))
        self._seen = world.ledger.num_commits
        self._struck_s, self._kind = world.now_s, fault.kind
        self._healed = False

    def _end_a_role(self, at: int, *, fails: bool, alone: bool = False) -> None:
        """Have a pod of a role end. `alone`: one that is never restarted fails by its own exit code, else from outside."""
        world = self.world
        running = (p for p in world.pods.of_roles.values() if p.phase == "Running" and not p.terminating)
        of_roles = sorted(p.name for p in running if world.pods.has_power(p))
        name = of_roles[at % len(of_roles)] if of_roles else ""
        if of_roles and fails and self.setting.policy.never and not alone:
            world.pods.end_role(name, status_reason=REFUSED if at % 2 else "Evicted")
        elif of_roles and fails:
            world.pods.end_role(name, last_exit_code=1)
            self.judge.role_failed()
        elif of_roles:
            world.pods.end_role(name, phase="Succeeded")

    # --- what must hold --------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        end_s = self.world.now_s + seconds
        while self.world.now_s < end_s:
            self.world.advance(min(LOOK_S, end_s - self.world.now_s), self.setting.step_s)
            self._judge()
        self.world.settle()

    def _recover(self) -> None:
        """Let time pass until the job has committed after the last fault, or has ended."""
        world = self.world
        while world.ledger.num_commits <= self._seen and not world.is_over:
            world.advance(
                LOOK_S, self.setting.step_s, done=lambda: world.ledger.num_commits > self._seen or world.is_over
            )
            self._judge()
        if self._seen and world.ledger.num_commits > self._seen:
            self.outcome.recoveries.append((self._kind, world.ledger.last_commit_s - self._struck_s))

    def _heal(self) -> None:
        self._healed = True
        self._over_s = self.world.now_s
        self.world.heal()
        self.world.settle()

    def _regain(self) -> None:
        """After all is well again the job ends, or trains with all the workers that are wanted."""
        world = self.world
        self._seen = world.ledger.num_commits
        self._struck_s, self._kind = world.now_s, "healed"
        self._recover()
        end_s = world.now_s + self.bound_s + 60.0
        if self.setting.pending_s:
            end_s += LAST_S  # a worker that was given back often is tried again so late
        if self.setting.roles:
            end_s += ROLE_LAST_S
        end_s += self._late_s + 4 * self.setting.end_s
        while not world.has_ended and not self._is_whole():
            if world.now_s > end_s:
                raise Failed("not whole", f"all is well and the job stays as it is: {self._words()}")
            if world.has_trained:
                self._end_a_role(0, fails=False)
            world.advance(LOOK_S, self.setting.step_s, done=self._is_whole)
            self._judge()
        if world.has_ended:
            self._judge_end()
        else:
            self._judge_exits()

    def _is_whole(self) -> bool:
        world = self.world
        if world.is_over:
            return False  # it has to end
        (said,) = world.status.get("roles") or [{}]
        ran = sum(p.phase == "Running" for p in world.pods.of_roles.values()) + len(said.get("succeeded", ()))
        if ran != self.setting.roles:
            return False
        if world.script == "plain":
            return len(script_group(world)) == world.replicas * world.processes
        return world.training().count(",") + 1 == world.replicas and world.training() != ""

    def _judge(self) -> None:
        world = self.world
        self.judge.look(led=self._is_led())
        if not any(node.is_open and node.has_images and not node.refuses for node in world.pods.nodes.values()):
            self._shut_s = world.now_s
        self._find_wrong()
        if self.setting.ignores:
            self._judge_counts()
        if world.has_ended:
            self._judge_end()
            return
        if world.is_over:
            self._judge_waiting()
            return
        if world.ledger.num_commits > self._seen and world.now_s - world.ledger.last_commit_s < self.bound_s:
            return
        since_s = max(self._over_s, world.ledger.last_commit_s)
        is_severed = self._is_severed()
        is_able = self._is_able() and not is_severed
        if not is_able:
            self._able_s = world.now_s
        waited_s = world.now_s - since_s
        training = _training(world.status)
        # Between two attempts it names the link, or what else is missing.
        newest = [_training(status) for status in islice((world.status, *reversed(world.store.history)), 4)]
        names_link = is_severed and any(NO_LINK in said.get("message", "") for said in newest)
        if training.get("reason") in WAITS or names_link or not self._is_led():
            self._named_s = world.now_s
        if world.now_s - max(since_s, self._named_s) > self.bound_s and not is_able:
            reason = training.get("reason", "none")
            raise Failed("unnamed", f"waits for {waited_s:.0f} s, reason {reason}, for nothing named: {self._words()}")
        if world.now_s - max(since_s, self._able_s) <= self.bound_s and waited_s <= self.bound_s + 60.0 + (
            self._late_s if self._healed else 0.0
        ):
            return
        if training.get("status") == "True":
            raise Failed("untrue", f"nobody has committed for {waited_s:.0f} s: {self._words()}")
        able = world.now_s - max(since_s, self._able_s) > self.bound_s
        named = any(said.get("reason") in NAMED for said in newest) and self._lacks_a_holder()
        # Sets of workers are tried, and none that could form a group had the newest state: nobody alive has it, but an agent that
        # hangs has not said so.
        named |= training.get("reason") == "BackingOff" and self._lacks_a_holder() and not self._has_newest_state()
        if (able and not named) or self._healed:
            raise Failed("stuck", f"no commit for {waited_s:.0f} s (bound {self.bound_s:.0f} s): {self._words()}")
        self.outcome.waited += 1
        self._heal()

    def _judge_counts(self) -> None:
        """Nothing counts that a rule ignores. Of what the operator had killed because it hung the rules say nothing."""
        restarts = self.world.status.get("restarts") or {}
        if restarts.get("recent") and not self.world.has_hung:
            raise Failed(
                "counted", f"{len(restarts['recent'])} failures count although all are ignored: {self._words()}"
            )

    def _judge_exits(self) -> None:
        """Each exit that an agent has reported counts once, whatever operators have died or been away since."""
        world, setting = self.world, self.setting
        if not setting.known or setting.ignores or setting.policy.rules or world.ledger.unwritten:
            return  # in the tier Script, or by rules, not all of them count; a status was restored from a backup
        end_s = world.now_s + COUNTED_S
        while True:
            world.advance(LOOK_S, setting.step_s)  # what was reported last is on its way
            if world.has_ended:
                return
            counted = (world.status.get("restarts") or {}).get("processes", 0)
            least = sum(agent.num_exits for agent in world.agents.values() if agent.connected)
            most = sum(not end.is_disruption for end in world.ledger.ends)
            if least <= counted <= most:
                return
            if world.now_s > end_s:
                raise Failed("miscounted", f"{counted} failures count, of {least} to {most}: {self._words()}")

    def _judge_waiting(self) -> None:
        """All steps are committed. Scripts run on, or the job waits for its roles."""
        world, finished = self.world, self.world.finished
        if finished is not None and finished.open and world.phase not in ("Finishing", "Suspending", "Suspended"):
            raise Failed("untrue", f"scripts still run ({finished.to_status()}), and it says {world.phase}")
        if not world.has_trained:
            return
        if world.phase not in ("Completing", "Suspending", "Suspended"):
            raise Failed("untrue", f"the workers have finished, and it says {world.phase}")
        if not world.status["roles"][0].get("awaited"):
            raise Failed("untrue", f"it waits for nothing: {world.status['roles']}")

    def _judge_end(self) -> None:
        world = self.world
        if world.phase == "Failed":
            return  # the judge knows why it may
        resumes = self.setting.policy.resumes
        if resumes == MISSING or (resumes and self.setting.script):
            raise Failed(
                "untrue", f"Succeeded, and begins with a checkpoint that nobody can have read: {self._words()}"
            )
        if self.setting.required and len(world.status["roles"][0].get("succeeded", ())) != self.setting.roles:
            raise Failed("untrue", f"Succeeded, and its roles have not: {world.status['roles']}")
        committed = world.ledger.committed
        done = committed[-1][1] if committed else 0
        if done != self.setting.total_steps:
            raise Failed("untrue", f"Succeeded at step {done} of {self.setting.total_steps}")
        finished = world.finished
        if finished is None or not world.ledger.has_returned(finished.generation, finished.members):
            raise Failed("untrue", f"Succeeded, and not all scripts have returned 0: {world.status.get('finished')}")

    def _finish(self) -> None:
        """Let a job end that has to soon, or that is short and whose policy says what is left of it then."""
        world, policy = self.world, self.setting.policy
        end_s = world.now_s + SHORT_S
        while not world.has_ended and world.now_s < end_s and (policy.active_s or self.judge.is_waiting):
            world.advance(LOOK_S, self.setting.step_s)
            self._judge()
        if (policy.ttl_s is None and policy.cleans == "None") or self.setting.total_steps > SHORT_STEPS:
            return
        end_s = world.now_s + 2 * self.setting.total_steps * self.setting.step_s + self.bound_s + ROLE_LAST_S
        end_s += 4 * self.setting.end_s
        while not world.has_ended:
            if world.now_s > end_s:
                raise Failed("not ended", f"all is well and the job does not end: {self._words()}")
            if world.has_trained:
                self._end_a_role(0, fails=False)
            world.advance(LOOK_S, self.setting.step_s, done=lambda: world.has_ended)
            self._judge()

    def _find_wrong(self) -> None:
        if self.judge.wrong:
            raise Failed(*self.judge.wrong[0])

    def _outlive(self) -> None:
        """What is left of a job that has ended is what its policy says."""
        self.judge.outlive(self.world.advance)
        self._find_wrong()

    @property
    def _late_s(self) -> float:
        """How much later than promised a worker may come once all is well again."""
        return PULL_S if any(kind in EARLY for kind in self.outcome.hits) else 0.0

    def _is_calm(self) -> bool:
        """Return whether the job trains, and everything is well."""
        world = self.world
        return (
            self._is_led()
            and world.now_s >= self._over_s
            and world.phase == "Running"
            and world.status.get("tier") == "Session"
            and world.training() != ""
            and is_well(world)
        )

    def _is_led(self) -> bool:
        """Return whether a leader can write the status."""
        leader = self.world.operator
        return leader is not None and not leader.paused and not self.world.store.is_down

    def _is_able(self) -> bool:
        """Return whether a leader is there and as many agents as must be would answer a ping."""
        return self._is_led() and self._num_whole(self._answering()) >= self._minimum

    @property
    def _minimum(self) -> int:
        policy = self.world.store.view["spec"].get("elasticPolicy")
        return int(policy["minReplicas"] if policy else self.world.replicas)

    def _is_severed(self) -> bool:
        """Return whether members that are needed cannot reach each other, and no new pod can take the place of one: because no node
        would run it, or did not until a moment ago, so that the next one is made later."""
        late_s = LAST_S if self.setting.pending_s else PULL_S
        if not self.world.network.is_cut or self.world.now_s > self._shut_s + late_s:
            return False
        answer, least = self._answering(), self._minimum
        return self._num_whole(answer) >= least and all(self._num_whole(s) < least for s in self._reachable(answer))

    def _answering(self) -> frozenset[str]:
        """Return the pods whose agents would answer a ping."""
        world = self.world
        answer = [
            a for uid, a in world.agents.items()
            if a.alive and not a.stopped and uid not in world.unreachable and world.pods.by_uid[uid].usable
        ]  # fmt: skip
        return frozenset(a.uid for a in answer)

    def _num_whole(self, uids: frozenset[str]) -> int:
        """Return how many workers in whole groups these pods make."""
        size = self.setting.per_group
        places = [self.world.pods.by_uid[uid].slot % size for uid in uids]
        return size * min(places.count(position) for position in range(size))

    def _reachable(self, uids: frozenset[str]) -> Iterator[frozenset[str]]:
        """Yield the sets of these pods in which everybody can reach everybody: of each pair that cannot, one goes."""
        cut = next((pair for pair in combinations(sorted(uids), 2) if self.world.network.who_misses(*pair)), None)
        if cut is None:
            yield uids
            return
        for uid in cut:
            yield from self._reachable(uids - {uid})

    def _lacks_a_holder(self) -> bool:
        """Return whether some worker that cannot be reached may hold the newest state, or no checkpoint can be read."""
        world = self.world
        dark = [uid for uid, a in world.agents.items() if a.stopped or not a.alive or uid in world.unreachable]
        return bool(dark) or world.disk.is_hidden or bool(world.disk.blind) or world.disk.is_damaged

    def _has_newest_state(self) -> bool:
        """Return whether a process that lives, or the memory snapshot of a pod, has the state after the last committed step."""
        alive = [a for a in self.world.agents.values() if a.alive]
        states = [t.state for a in alive for t in a.trainers.values() if t.alive] + [
            a.memory and a.memory.state for a in alive
        ]
        newest = max(((state.generation, state.step) for state in states if state), default=(0, 0))
        return newest >= max(self.world.ledger.committed, default=(0, 0))

    def _words(self) -> str:
        world = self.world
        membership = world.status.get("membership", {})
        older = [(o["generation"], o["members"]) for o in membership.get("older", ())]
        people = []
        for agent in sorted(world.agents.values(), key=lambda a: a.name):
            state = "stopped" if agent.stopped else "" if agent.connected else "away" if agent.alive else "dead"
            processes = ",".join(
                ("stopped " if t.stopped else "")
                + (
                    "dead"
                    if not t.alive
                    else f"in g{t.group.number}"
                    if t.group
                    else "waits"
                    if t.attached
                    else "starts"
                )
                + (f" holds {t.state.generation}/{t.state.step}" if t.state else "")
                for _, t in sorted(agent.trainers.items())
            )
            people.append(f"{agent.name.removeprefix('digits-worker-')}[{' '.join(filter(None, [state, processes]))}]")
        return f"{world.summary()} replicas {world.replicas} older {older} | {' '.join(people)}"


def _training(status: dict[str, Any]) -> dict[str, str]:
    """Return condition Training; empty: there is none yet."""
    return next((c for c in status.get("conditions", ()) if c["type"] == "Training"), {})


def _slow_end_s(fault: Fault) -> float:
    return 60.0 if fault.kind == "slow-starts" else 0.0


def run(setting: Setting, faults: list[Fault]) -> Outcome:
    """Return what comes of a walk."""
    return Walk(setting, faults).run()


def shrink(outcome: Outcome, tries: int = 120) -> Outcome:
    """Return the failing walk with as few and as plain faults as fail in the same way."""
    best = outcome
    changed = True
    while changed and tries > 0:
        changed = False
        shorter = [best.faults[:i] + best.faults[i + 1 :] for i in range(len(best.faults) - 1, -1, -1)]
        plainer = [
            [*best.faults[:i], plain, *best.faults[i + 1 :]]
            for i, fault in enumerate(best.faults)
            for plain in _plainer(fault)
        ]
        for faults in [*shorter, *plainer]:
            tries -= 1
            found = run(best.setting, faults)
            if found.sort == outcome.sort:
                best, changed = found, True
                break
            if tries <= 0:
                break
    return best


def _plainer(fault: Fault) -> list[Fault]:
    """Return the fault with one of its fields as usual."""
    usual = Fault(fault.kind, for_s=fault.for_s, size=fault.size)
    names = ("moment", "turns", "after_s", "calm", "other", "at")
    return [
        replace(fault, **{name: getattr(usual, name)}) for name in names if getattr(fault, name) != getattr(usual, name)
    ]
