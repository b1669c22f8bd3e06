"""What is made beside the plan: only what the newest plan wants, a few at a time, and never blindly again."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from harness.polling import until_async
from regroup_operator.api import ConflictError, Job, JobStatus, RegroupError, UnavailableError, parse_job
from regroup_operator.background import MAX_TOGETHER, MAX_TURNS, LoopBackground, Turns
from regroup_operator.maker import UNSEEN_S, Maker
from regroup_operator.model.plan import CreateWorker, JobMemory, JobPlan, Urgency
from regroup_operator.model.ports import AlreadyExists, EventNote
from regroup_operator.model.records import Pod
from tests.builders.jobs import stored_job
from tests.builders.plan import make_pod

JOB = parse_job(stored_job())


class Api:
    """The ports that a maker uses. A call waits for `gate`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.at_once = self.most_at_once = 0
        self.gate: asyncio.Event | None = None
        self.answers: dict[tuple[int, int], bool | RegroupError] = {}
        self.confirms: list[RegroupError | None] = []
        self.notes: list[str] = []

    async def create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> bool:  # noqa: ARG002
        return await self._call("create", slot, attempt)

    async def create_role(self, job: Job, role: str, index: int, attempt: int) -> bool:  # noqa: ARG002
        return await self._call(f"create {role}", index, attempt)

    async def delete(self, pod: Pod) -> None:
        await self._call("delete", pod.slot, pod.attempt)

    async def _call(self, verb: str, slot: int, attempt: int) -> bool:
        self.calls.append((verb, slot, attempt))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        self.at_once -= 1
        answer = self.answers.get((slot, attempt), True)
        if isinstance(answer, RegroupError):
            raise answer
        return answer

    async def confirm(self, job: Job, within_s: float) -> None:  # noqa: ARG002
        error = self.confirms.pop(0)
        if error is not None:
            raise error

    def record(self, job: Job, note: EventNote) -> None:  # noqa: ARG002
        self.notes.append(note.note)


class Setting:
    def __init__(self) -> None:
        self.api, self.background, self.now_s = Api(), LoopBackground(), 0.0
        self.looks: list[float] = []
        api: Any = self.api
        self.maker = Maker(
            api, api, api, self.background, lambda: self.now_s, lambda _, wait_s: self.looks.append(wait_s)
        )

    def want(self, *slots: int, attempt: int = 0, delete: tuple[Pod, ...] = (), pods: tuple[Pod, ...] = (),
             confirmed: bool = True) -> float | None:  # fmt: skip
        create = tuple(CreateWorker(slot, attempt) for slot in slots)
        plan = JobPlan(status=JobStatus(), urgency=Urgency.LATER, memory=JobMemory(), create=create, delete=delete)
        return self.maker.want(JOB, plan, pods, confirmed=confirmed)

    async def idle(self) -> None:
        while self.background._tasks:
            await asyncio.sleep(0)

    def created(self) -> list[int]:
        return [slot for verb, slot, _ in self.api.calls if verb == "create"]


def run(scenario: Callable[[Setting], Coroutine[Any, Any, None]]) -> None:
    async def go() -> None:
        setting = Setting()
        await asyncio.wait_for(scenario(setting), 20)
        await setting.background.stop()

    asyncio.run(go())


def test_plan_waits_for_no_creation() -> None:
    async def scenario(setting: Setting) -> None:
        setting.api.gate = asyncio.Event()
        assert setting.want(0, 1, 2) is None
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert setting.created() == [0], "the first alone"
        assert setting.want(0, 1, 2) is None, "the plan goes on"
        setting.api.gate.set()
        await setting.idle()
        assert setting.created() == [0, 1, 2]

    run(scenario)


def test_pods_are_made_more_and_more_at_once() -> None:
    async def scenario(setting: Setting) -> None:
        setting.want(*range(100))
        await setting.idle()
        assert setting.created() == list(range(100))
        assert setting.api.most_at_once == 32  # 1, 2, 4, 8, 16, 32, 32, 5

    run(scenario)


def test_only_the_newest_plan_counts() -> None:
    """A job that shrinks while its pods are made, and one that is deleted."""

    async def scenario(setting: Setting) -> None:
        setting.api.gate = asyncio.Event()
        setting.want(*range(50))
        await asyncio.sleep(0)
        setting.want(0, 1)
        setting.api.gate.set()
        await setting.idle()
        assert setting.created() == [0, 1]
        setting.now_s, setting.api.gate = 100.0, asyncio.Event()
        setting.want(5, 6, 7)
        setting.maker.stop()
        setting.api.gate.set()
        await setting.idle()
        assert setting.created() == [0, 1]

    run(scenario)


def test_full_quota_answers_one_request_not_thousands() -> None:
    async def scenario(setting: Setting) -> None:
        for slot in range(3, 5000):
            setting.api.answers[slot, 0] = RegroupError(f"pods digits-worker-{slot}-0 is forbidden: exceeded quota")
        setting.want(*range(5000))
        await setting.idle()
        pods = tuple(make_pod(slot) for slot in range(3))
        for _ in range(9):  # as often as it asks to be looked at
            setting.now_s += setting.looks[-1]
            setting.want(*range(3, 5000), pods=pods)
            await setting.idle()
        refused = [slot for slot in setting.created() if slot >= 3]
        assert 10 <= len(refused) <= 13
        assert len(set(refused)) == len(refused), "each time another one"
        assert setting.now_s > 100, "less and less often"
        assert setting.api.notes == ["pods digits-worker-3-0 is forbidden: exceeded quota"]

    run(scenario)


def test_without_an_answer_everything_waits_a_second() -> None:
    async def scenario(setting: Setting) -> None:
        setting.api.answers[0, 0] = UnavailableError("no answer")
        setting.want(0, 1, 2)
        await setting.idle()
        assert (setting.created(), setting.looks) == ([0], [1.0])
        assert setting.want(0, 1, 2) == 1.0
        assert setting.created() == [0]

    run(scenario)


def test_nothing_is_tried_before_the_api_server_wants_to_be_asked_again() -> None:
    async def scenario(setting: Setting) -> None:
        setting.api.answers[0, 0] = full = UnavailableError("too many requests")
        full.retry_after_s = 7.0
        setting.want(0, 1, 2)
        await setting.idle()
        assert setting.looks == [7.0]
        setting.now_s = 6.9
        setting.want(0, 1, 2)
        assert setting.created() == [0]
        setting.now_s = 7.0
        setting.want(0, 1, 2)
        await setting.idle()
        assert len(setting.created()) > 1

    run(scenario)


def test_deletions_come_first() -> None:
    async def scenario(setting: Setting) -> None:
        pods = (make_pod(3), make_pod(4))
        setting.want(0, delete=pods, pods=pods)
        await setting.idle()
        assert setting.api.calls == [("delete", 3, 0), ("delete", 4, 0), ("create", 0, 0)]

    run(scenario)


def test_pod_of_ours_that_does_not_show_counts_as_taken() -> None:
    """It exists by the API server's word, but the informer has not shown it: its labels were changed, for example."""

    async def scenario(setting: Setting) -> None:
        setting.want(0)
        await setting.idle()
        setting.api.answers[0, 0] = False
        setting.now_s = 2.0
        setting.want(0)
        await setting.idle()
        assert setting.api.calls == [("create", 0, 0), ("create", 0, 0)], "the informer may be late"
        setting.now_s = UNSEEN_S
        setting.want(0)
        await setting.idle()
        assert setting.api.calls[2:] == [("create", 0, 0), ("create", 0, 1)]

    run(scenario)


def test_pod_that_was_there_already_is_waited_for() -> None:
    """An operator that was just killed has made it."""

    async def scenario(setting: Setting) -> None:
        setting.now_s = 1000.0
        setting.api.answers[0, 0] = False
        setting.want(0)
        await setting.idle()
        assert setting.api.calls == [("create", 0, 0)]

    run(scenario)


def test_name_of_another_is_passed_over() -> None:
    async def scenario(setting: Setting) -> None:
        setting.api.answers[0, 0] = AlreadyExists("taken")
        setting.want(0)
        await setting.idle()
        assert setting.api.calls == [("create", 0, 0), ("create", 0, 1)]

    run(scenario)


def test_nothing_is_made_by_a_plan_that_wrote_nothing_before_the_job_is_confirmed() -> None:
    async def scenario(setting: Setting) -> None:
        setting.api.confirms = [ConflictError("gone")]
        setting.want(0, confirmed=False)
        await setting.idle()
        assert (setting.created(), setting.looks) == ([], [0.0]), "it is planned again at once"
        setting.api.confirms = [UnavailableError("no answer")]
        setting.want(0, confirmed=False)
        await setting.idle()
        assert (setting.created(), setting.looks) == ([], [0.0, 1.0])
        setting.now_s, setting.api.confirms = 2.0, [None]
        setting.want(0, 1, 2, confirmed=False)
        await setting.idle()
        assert (setting.created(), setting.api.confirms) == ([0, 1, 2], [])

    run(scenario)


def _asked_to_wait(seconds: float) -> UnavailableError:
    error = UnavailableError("GET of the job failed (429).")
    error.retry_after_s = seconds
    return error


@pytest.mark.parametrize(
    ("error", "num_told"),
    [
        pytest.param(RegroupError("GET of the job was refused (403)."), 1, id="403"),
        pytest.param(ConflictError("It has changed."), 1, id="it has changed, again and again"),
        pytest.param(UnavailableError("GET of the job failed (500)."), 1, id="500"),
        pytest.param(_asked_to_wait(5.0), 1, id="429"),
    ],
)
def test_job_that_cannot_be_confirmed_is_asked_for_with_a_back_off(error: RegroupError, num_told: int) -> None:
    """Plans come with each report of an agent, 20 a second here; the question goes out some 10 times in two minutes."""

    async def scenario(setting: Setting) -> None:
        setting.api.confirms = [error] * 100
        while setting.now_s < 120.0:
            setting.want(0, confirmed=False)
            await setting.idle()
            setting.now_s += 0.05
        assert 5 <= 100 - len(setting.api.confirms) <= 10
        assert all(wait_s > 0 for wait_s in setting.looks[1:])
        assert len(setting.api.notes) == num_told
        setting.now_s += 30.0
        setting.api.confirms = [None]
        setting.want(0, confirmed=False)
        await setting.idle()
        assert setting.created() == [0], "it goes on as soon as there is an answer"

    run(scenario)


def test_pods_of_roles_are_made_too_each_with_a_back_off_of_its_own() -> None:
    async def scenario(setting: Setting) -> None:
        setting.api.answers[0, 3] = UnavailableError("no answer")
        plan = JobPlan(
            status=JobStatus(),
            urgency=Urgency.LATER,
            memory=JobMemory(),
            create=(CreateWorker(0, 0),),
            create_roles=(("ps", 0, 3), ("ps", 1, 0)),
        )
        setting.maker.want(JOB, plan, (), confirmed=True)
        await setting.idle()
        assert ("create ps", 0, 3) in setting.api.calls
        setting.api.answers.clear()
        setting.now_s = 100.0
        role = make_pod(1, 0, role="ps")
        again = JobPlan(
            status=JobStatus(), urgency=Urgency.LATER, memory=JobMemory(), create_roles=(("ps", 0, 3),), delete=(role,)
        )
        setting.maker.want(JOB, again, (role,), confirmed=True)
        await setting.idle()
        assert setting.api.calls[-2:] == [("delete", 1, 0), ("create ps", 0, 3)]

    run(scenario)


def test_what_is_done_is_not_done_again_however_long_a_round_takes() -> None:
    """Of thousands of workers, or while the API server is slow, the rest of a round takes longer than any back-off."""

    async def scenario(setting: Setting) -> None:
        call = setting.api._call

        async def slow(verb: str, slot: int, attempt: int) -> bool:
            setting.now_s += 10.0
            return await call(verb, slot, attempt)

        setting.api._call = slow  # type: ignore[method-assign]
        setting.want(*range(9), delete=(make_pod(9),))
        await setting.idle()
        assert setting.api.calls == [("delete", 9, 0), *(("create", slot, 0) for slot in range(9))]

    run(scenario)


def test_pod_that_was_made_while_the_plan_was_written_is_not_made_again() -> None:
    async def scenario(setting: Setting) -> None:
        setting.want(0, 1, 2, pods=(make_pod(0), make_pod(2)))
        await setting.idle()
        assert setting.created() == [1]

    run(scenario)


def test_all_jobs_together_make_so_many_pods_at_once() -> None:
    """The connections to the API server are for more than that. What is cancelled before its turn leaves nothing behind."""

    async def scenario() -> None:
        background, gate, begun = LoopBackground(), asyncio.Event(), list[int]()

        async def make(number: int) -> None:
            begun.append(number)
            await gate.wait()

        def start(numbers: range) -> None:
            background.start(background.together(map(make, numbers)), str(numbers))

        for job in range(5):
            start(range(20 * job, 20 * job + 20))
        await until_async(lambda: len(begun) >= MAX_TOGETHER, "the first ones")
        await asyncio.sleep(0)
        assert len(begun) == MAX_TOGETHER
        gate.set()
        await until_async(lambda: len(begun) == 100, "the others")
        gate.clear()
        start(range(100, 200))
        await until_async(lambda: len(begun) == 100 + MAX_TOGETHER, "some of them")
        await background.stop()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(scenario())


def test_jobs_that_start_get_their_pods_one_job_after_the_other_and_those_that_run_get_theirs_first() -> None:
    started = stored_job(status={"startTime": "2026-01-01T00:00:00Z"})

    async def scenario() -> None:
        background, made = LoopBackground(), list[str]()

        class Ports:
            async def create(self, job: Job, *_: object) -> bool:
                made.append(job.name)
                for _step in range(10 + len(made) % 7):  # they do not all end at the same moment
                    await asyncio.sleep(0)
                return True

        ports: Any = Ports()

        def want(job: Job, slots: int) -> None:
            maker = Maker(ports, ports, ports, background, lambda: 0.0, lambda *_: None)
            create = tuple(CreateWorker(slot, 0) for slot in range(slots))
            maker.want(
                job,
                JobPlan(status=JobStatus(), urgency=Urgency.LATER, memory=JobMemory(), create=create),
                (),
                confirmed=True,
            )

        jobs = [replace(JOB, name=f"job-{i}") for i in range(100)]
        for job in jobs:
            want(job, 8)
        want(replace(parse_job(started), name="runs"), 1)
        await until_async(lambda: len(made) == 100 * 8 + 1, "all")
        firsts = [made.index(job.name) for job in jobs]
        spans = [len(made) - made[::-1].index(job.name) - first for job, first in zip(jobs, firsts)]
        assert firsts == sorted(firsts)
        assert max(spans) < 10 * MAX_TURNS, spans
        assert made.index("runs") < 10 * MAX_TURNS
        await background.stop()

    asyncio.run(scenario())


def test_one_large_job_does_not_keep_the_others_waiting() -> None:
    """Its pods take a new turn after each MAX_BATCH of them."""

    async def scenario() -> None:
        background, made = LoopBackground(), list[str]()

        class Ports:
            async def create(self, job: Job, *_: object) -> bool:
                made.append(job.name)
                await asyncio.sleep(0)
                return True

        ports: Any = Ports()
        for name, slots in (("large", 2000), ("small", 8)):
            maker = Maker(ports, ports, ports, background, lambda: 0.0, lambda *_: None)
            create = tuple(CreateWorker(slot, 0) for slot in range(slots))
            plan = JobPlan(status=JobStatus(), urgency=Urgency.LATER, memory=JobMemory(), create=create)
            maker.want(replace(JOB, name=name), plan, (), confirmed=True)
        await until_async(lambda: made.count("small") == 8, "the small one")
        assert made.count("large") < 10 * MAX_TOGETHER
        await background.stop()

    asyncio.run(scenario())


def test_turn_that_was_given_to_what_is_cancelled_goes_to_the_next() -> None:
    async def scenario() -> None:
        turns, begun = Turns(1), list[str]()

        async def hold(name: str) -> None:
            async with turns.turn("ns", starts=True):
                begun.append(name)

        async with turns.turn("ns", starts=True):
            first, second, third = (asyncio.create_task(hold(name)) for name in ("first", "second", "third"))
            await asyncio.sleep(0)
            second.cancel()
        first.cancel()
        await asyncio.wait([first, second, third])
        await hold("fourth")
        assert begun == ["third", "fourth"]

    asyncio.run(scenario())


def test_namespaces_take_turns_and_jobs_that_have_started_come_first() -> None:
    async def scenario() -> None:
        turns, order, gate = Turns(2), list[str](), asyncio.Event()

        async def hold(name: str, namespace: str, *, starts: bool = True) -> None:
            async with turns.turn(namespace, starts=starts):
                order.append(name)
                await gate.wait()

        waits = [hold(f"a{i}", "a") for i in range(6)] + [hold(f"b{i}", "b") for i in range(2)]
        waits.append(hold("runs", "a", starts=False))
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
        assert order == ["a0", "a1", "runs", "a2", "b0", "a3", "b1", "a4", "a5"]

        order.clear()
        gate.clear()
        waits = [hold(f"runs{i}", "a", starts=False) for i in range(20)] + [hold("starts", "b")]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
        assert 8 <= order.index("starts") <= 12, order  # it waits, but not for all of them

        for number in range(100):  # what is kept of namespaces does not grow with them
            await hold("later", f"ns-{number}")
        assert len(turns._last) <= 1

    asyncio.run(scenario())
