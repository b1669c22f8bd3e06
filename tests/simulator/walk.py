"""One walk: a job, a list of faults, and the verdict after each of them. The same seed makes the same walk, everywhere."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from regroup_operator.api import parse_job
from regroup_operator.model.pod_row import REPLACED, TRIED_AGAIN
from tests.simulator.bound import NAMED, PULL_S, WAITS, bound_s
from tests.simulator.cluster import REFUSED
from tests.simulator.faults import KINDS, LEAVING, MOMENT_S, Fault
from tests.simulator.policies import MISSING, Judge, is_well
from tests.simulator.script import script_group
from tests.simulator.setting import EARLY, HANGS, SHORT_STEPS, Setting
from tests.simulator.world import FOREVER

SHORT_S = 60.0
"""A job trains for so long after all is well if it may have to fail then."""
COUNTED_S = 30.0
"""A count that decides nothing is written with the progress, which waits so long where it is reported less often."""
NO_LINK = "cannot reach each other"
"""What condition Training says of members without which too few are left."""
LOOK_S = 5.0
"""The verdict is looked at this often while nothing is committed."""


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
            if fault.kind in HANGS and "longestStartSeconds" not in world.status:
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
            end_s += TRIED_AGAIN.last_s  # a worker that was given back often is tried again so late
        if self.setting.roles:
            end_s += REPLACED.last_s
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
            return len(script_group(world)) == world.wanted * world.processes
        return world.training().count(",") + 1 == world.wanted and world.training() != ""

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
        end_s = world.now_s + 2 * self.setting.total_steps * self.setting.step_s + self.bound_s + REPLACED.last_s
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
        refused = self.world.refused
        if refused is not None and refused.permitted is not None:
            return refused.permitted[0]
        return int(policy["minReplicas"] if policy else self.world.replicas)

    def _is_severed(self) -> bool:
        """Return whether members that are needed cannot reach each other, and no new pod can take the place of one: because no node
        would run it, or did not until a moment ago, so that the next one is made later."""
        late_s = TRIED_AGAIN.last_s if self.setting.pending_s else PULL_S
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
