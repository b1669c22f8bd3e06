"""A real agent process, real trainer processes, a real TLS connection; only the operator's decisions are the test's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from _regroup_agent.build import build
from regroup.protocol import wire
from regroup.protocol.state import Phase, StatePair

from tests.trainer.agent_edge import Heard, OperatorEdge, Worker, alive, generation, operator_edge, until


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("agent") / "agent.pyz"
    build(target)
    return target


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorEdge]:
    with operator_edge(tmp_path) as edge:
        yield edge


@pytest.fixture
def worker(tmp_path: Path, operator: OperatorEdge, zipapp: Path) -> Iterator[Worker]:
    one = Worker(tmp_path, operator, zipapp, 1)
    yield one
    one.close()


@pytest.fixture
def pair(tmp_path: Path, operator: OperatorEdge, zipapp: Path) -> Iterator[Worker]:
    one = Worker(tmp_path, operator, zipapp, 2)
    yield one
    one.close()


def welcome(operator: OperatorEdge, worker: Worker, tier: str = "Session") -> int:
    """Greet a new agent; return the port of its fresh store socket."""
    hello = operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome(tier))
    return hello.report.store_port


def ready(operator: OperatorEdge, after: int = 0) -> Heard:
    """Wait until all processes have attached."""
    return operator.wait(lambda h: h.report.condition.phase == Phase.READY and h.report.condition.session, after=after)


def train(operator: OperatorEdge, worker: Worker, number: int = 1, **changed: object) -> int:
    """Announce a generation and wait until it trains; return how many reports there were before."""
    before = len(operator.heard)
    port = operator.heard[-1].report.store_port
    command, document = generation(number, port, worker.processes, **changed)
    operator.tell(command)
    operator.tell(wire.DocumentCommand(document))
    operator.wait(lambda h: isinstance(h.body, wire.Progress) and h.report.condition.generation == number, after=before)
    return before


def test_session_from_hello_to_training_to_stop(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    welcome(operator, worker)
    attached = ready(operator)
    assert attached.report.condition.incarnation == 1
    assert attached.report.seal is not None
    started = worker.noted("started")[0]
    assert started["env"] == {
        "RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None, "GROUP_RANK": None, "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    train(operator, worker)
    said = [type(h.body).__name__ for h in operator.heard]
    assert said.index("Formed") < said.index("Adopted") < said.index("Progress")
    first = operator.wait_body(wire.Progress)
    assert (first.body.step, first.body.first_step_ms, first.report.condition.phase) == (1, 2.5, Phase.TRAINING)
    assert first.report.seal is None
    assignment = worker.noted("assignment")[0]
    assert assignment["document"] == assignment["digest"]
    operator.tell(wire.Stop("Complete"))
    operator.wait_phase(Phase.STOPPED)
    assert worker.agent is not None
    assert worker.agent.wait(10) == 0
    assert worker.noted("stop")[0]["outcome"] == "Complete"


def test_killed_process_is_reported_at_once_and_restarted_with_a_higher_incarnation(
    operator: OperatorEdge, worker: Worker
) -> None:
    worker.start_raw()
    welcome(operator, worker)
    ready(operator)
    train(operator, worker)
    killed = worker.noted("started")[0]
    before = len(operator.heard)
    clock = killed_at(killed["pid"])
    fault = operator.wait_body(wire.Fault, after=before)
    # Measured 1-3 ms on two cores; the margin is for a machine that does other things.
    assert fault.at_s - clock < 0.25
    assert (fault.body.cause, fault.body.exit_code, fault.body.local_rank) == ("exit", -9, 0)
    assert fault.report.condition.incarnation == 1
    assert fault.report.seal is not None
    assert (fault.report.seal.left_up_to, fault.report.seal.state, fault.report.seal.adopted) == (1, None, 1)
    again = ready(operator, before)
    assert again.report.condition.incarnation == 2
    assert again.report.condition.entered == 1
    train(operator, worker, 2)
    assert [n["generation"] for n in worker.noted("entering") if n["ok"]] == [1, 2]


def killed_at(pid: int) -> float:
    import time

    at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at_s


def test_sibling_of_a_killed_process_keeps_its_process_and_state(operator: OperatorEdge, pair: Worker) -> None:
    pair.start_raw()
    welcome(operator, pair)
    ready(operator)
    train(operator, pair)
    zero, one = (next(n for n in pair.noted("started") if n["rank"] == rank) for rank in (0, 1))
    before = len(operator.heard)
    os.kill(one["pid"], signal.SIGKILL)
    fault = operator.wait_body(wire.Fault, after=before)
    assert (fault.body.local_rank, fault.report.condition.phase) == (1, Phase.STARTING)
    assert fault.report.seal is None  # the sibling has not left the group
    pair.wait_noted("started", 3)
    command, _ = generation(2, 0, 2, member=False, hosts_store=False)
    operator.tell(command)
    again = ready(operator, before)
    assert again.report.seal is not None
    assert again.report.seal.state is not None
    assert again.report.seal.state >= StatePair(1, 1)
    train(operator, pair, 3)
    assert alive(zero["pid"])
    entered = [(n["pid"], n["generation"]) for n in pair.noted("entering")]
    assert (zero["pid"], 1) in entered
    assert (zero["pid"], 3) in entered


def test_agent_killed_takes_its_trainers_with_it(operator: OperatorEdge, pair: Worker) -> None:
    pair.start_raw("stuck")
    welcome(operator, pair)
    ready(operator)
    pids = [n["pid"] for n in pair.noted("started")]
    assert pair.agent is not None
    pair.agent.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def test_generation_is_refused_twice_and_below(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw("again")
    welcome(operator, worker)
    ready(operator)
    train(operator, worker, 5)
    second = worker.wait_noted("entering", 2)[1]
    assert (second["ok"], second["generation"]) == (False, 5)
    operator.tell(generation(4, 0, member=False)[0])
    until(lambda: "Refused generation 4: 5 has been heard." in worker.log())
