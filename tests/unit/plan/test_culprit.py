"""Whom an incident names, and with which words."""

from __future__ import annotations

import pytest

from regroup.protocol.state import Phase
from regroup_operator.model.records import ProcessExit
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.generation.culprit import name_culprit
from tests.builders.plan import make_current, make_fault, make_pod, make_session, make_worker, uid_of

A, C = make_worker(0), make_worker(2)
CURRENT = make_current(number=2)


def broken(slot: int, peer: int | None = None, generation: int = 2, said: str = "") -> Worker:
    fault = make_fault(peer=uid_of(peer) if peer is not None else None, message=said)
    session = make_session(slot, Phase.BROKEN, 2, fault=fault, fault_generation=generation)
    return make_worker(slot, Standing.BROKEN, session=session, why="CollectiveFailed")


def silent(slot: int) -> Worker:
    return make_worker(slot, Standing.SILENT, session=make_session(slot, Phase.TRAINING, 2, connected=False))


@pytest.mark.parametrize(
    ("members", "names", "text"),
    [
        pytest.param([broken(0, 2), broken(1), C], "2", "worker 2 on node node-2 cannot be reached by worker 0",
                     id="a cut node: its survivors name it"),
        pytest.param([broken(0, 1), broken(1, 2), C], "2", "worker 2 on node node-2 cannot be reached by worker 1",
                     id="a survivor that closed its group is accused, too"),
        pytest.param([broken(0), broken(1), silent(2)], "2", "worker 2 on node node-2 cannot be reached",
                     id="nobody knows whom it lost, and one is silent"),
        pytest.param([broken(0), broken(1), C], "0", "worker 0 reported a failed collective", id="nobody knows"),
        pytest.param([broken(0, 1), broken(1, 0), C], "0", "worker 0 reported a failed collective",
                     id="a cut link between two that live"),
        pytest.param([broken(0, said="Forming generation 2 ended: address already in use."), broken(1), C], "0",
                     "worker 0 reported a failed collective (Forming generation 2 ended: address already in use)",
                     id="what it said of it"),
        pytest.param([broken(0, said="Forming generation 2 ended: " + "ncclInvalidUsage " * 20), broken(1), C], "0",
                     "worker 0 reported a failed collective (Forming generation 2 ended: " + ("ncclInvalidUsage " * 10)[:-1]
                     + "...)",
                     id="a long text ends at a word"),
        pytest.param([broken(0, 2, generation=1), broken(1), C], "0", "worker 0 reported a failed collective",
                     id="whom it lost in the generation before is no news"),
    ],
)  # fmt: skip
def test_broken_group_names_who_was_lost(members: list[Worker], names: str, text: str) -> None:
    got = name_culprit(CURRENT, members, members[0])
    assert (got.id, got.cause, got.text) == (names, "CollectiveFailed", text)


def test_worker_of_which_one_process_of_several_hung_has_reported_no_collective() -> None:
    fault = make_fault(cause="hung", message="The script's progress has not changed for 70 s: rank 0 is sleeping.")
    session = make_session(0, Phase.BROKEN, 2, fault=fault, fault_generation=2)
    worker = make_worker(0, Standing.BROKEN, session=session, why="CollectiveFailed")
    text = name_culprit(CURRENT, [worker, C], worker).text
    assert text == (
        "worker 0 lost a process that hung (The script's progress has not changed for 70 s: rank 0 is sleeping)"
    )


@pytest.mark.parametrize("first", [0, 1], ids=["it is seen first", "a survivor is seen first"])
@pytest.mark.parametrize("standing", [Standing.BROKEN, Standing.DIED])
def test_worker_of_which_a_process_hung_is_the_cause(first: int, standing: str) -> None:
    """The processes of the others fail once the operator has killed the one that hung."""
    message = "The script's progress has not changed for 70 s: rank 1 (worker 0, process 1) is stopped"
    ended = ProcessExit(90.0, 1, 1, -9, generation=2, hung=message)
    session = make_session(0, Phase.BROKEN, 2, exits=(ended,), num_exits=1)
    members = [make_worker(0, standing, session=session, why="Hung"), broken(1, 0), broken(2, 1)]
    got = name_culprit(CURRENT, members, members[first])
    assert (got.id, got.cause, got.text) == ("0", "Hung", f"worker 0 lost a process that hung ({message})")


@pytest.mark.parametrize(
    ("standing", "why", "text"),
    [
        pytest.param(Standing.DIED, "NodeRestarted",
                     "worker 1 on node node-1 was restarted, because the node had stopped its containers", id="a quick reboot"),
        pytest.param(Standing.DIED, "ContainerRestarted", "worker 1 on node node-1 was restarted with its container",
                     id="not known why yet"),
        pytest.param(Standing.LOST, "Disconnected", "worker 1 on node node-1 cannot be reached", id="a power cut"),
        pytest.param(
            Standing.LOST, "Unheard", "worker 1 on node node-1 cannot be reached from other nodes", id="seen by observers"
        ),
        pytest.param(Standing.LOST, "Drained", "worker 1 on node node-1 left at the end of its grace period", id="a drain"),
        pytest.param(Standing.LOST, "PodDeleted", "worker 1 was lost with its pod", id="a pod that is deleted"),
        pytest.param(Standing.DIED, "OOMKilled", "worker 1 was killed for lack of memory (OOMKilled)", id="memory"),
    ],
)  # fmt: skip
def test_words(standing: str, why: str, text: str) -> None:
    assert name_culprit(CURRENT, [A, C], make_worker(1, standing, why=why)).text == text


def exited(
    slot: int, code: int, line: str, *, at_s: float = 90.0, generation: int = 2, standing: str = Standing.DIED
) -> Worker:
    ended = ProcessExit(at_s, 1, 0, code, line, generation)
    fault = make_fault("exit", exit_code=code, last_line=line)
    session = make_session(slot, Phase.BROKEN, 2, exits=(ended,), fault=fault, fault_generation=generation)
    why = "ProcessExited" if standing == Standing.DIED else "CollectiveFailed"
    return make_worker(slot, standing, session=session, why=why)


@pytest.mark.parametrize(
    ("code", "line", "text"),
    [
        pytest.param(1, "ValueError: boom", 'exit code 1: "ValueError: boom"', id="an exception"),
        pytest.param(3, "", "exit code 3", id="an exit without a word"),
        pytest.param(0, "", "exit code 0", id="a return before the end"),
        pytest.param(-6, "terminate called", 'signal 6: "terminate called"', id="its own abort"),
        pytest.param(-9, "50%|#####     |", "signal 9", id="a kill has nothing to do with the last line"),
        pytest.param(1, "E: " + "word " * 60, 'exit code 1: "E: ' + ("word " * 39)[:-1] + '..."', id="a long line"),
    ],
)  # fmt: skip
def test_process_that_ended_is_named_with_code_and_last_line(code: int, line: str, text: str) -> None:
    worker = exited(1, code, line)
    assert name_culprit(CURRENT, [A, worker, C], worker).text == f"worker 1 lost a process ({text})"


def test_process_that_ended_before_the_worker_entered_the_generation_has_its_code_and_line() -> None:
    worker = exited(1, 1, "ValueError: boom", generation=1)
    assert (
        name_culprit(CURRENT, [A, worker], worker).text == 'worker 1 lost a process (exit code 1: "ValueError: boom")'
    )


def test_script_whose_siblings_are_still_ending_has_lost_a_process_and_reported_no_collective() -> None:
    """The other workers' processes end a moment later, because the first one's connections are gone."""
    first = exited(1, 1, "ValueError: boom", at_s=90.0, standing=Standing.BROKEN)
    later = exited(0, 1, "Connection closed by peer", at_s=90.1, standing=Standing.BROKEN)
    got = name_culprit(CURRENT, [later, first, C], later)
    says = 'worker 1 lost a process (exit code 1: "ValueError: boom")'
    assert (got.id, got.cause, got.text) == ("1", "ProcessExited", says)


RESET = "RuntimeError: Connection reset by peer"


@pytest.mark.parametrize(
    ("ended", "launches", "names", "cause"),
    [
        pytest.param([exited(0, 1, RESET, standing=Standing.BROKEN), exited(1, 1, RESET, standing=Standing.BROKEN)],
                     True, "2", "CollectiveFailed", id="siblings still end"),
        pytest.param([exited(0, 1, RESET), exited(1, -6, "terminate called")],
                     True, "2", "CollectiveFailed", id="one process for each worker"),
        pytest.param([exited(0, -9, "", standing=Standing.BROKEN), exited(1, 1, RESET, standing=Standing.BROKEN)],
                     True, "0", "ProcessExited", id="a kill follows from no loss"),
        pytest.param([exited(0, -9, ""), A], True, "0", "ProcessExited", id="a kill of a worker's only process"),
        pytest.param([exited(0, 0, ""), A], True, "0", "ProcessExited", id="a return follows from no loss"),
        pytest.param([exited(0, 1, "ValueError: boom"), A], False, "0", "ProcessExited", id="a session outlives a loss"),
    ],
)  # fmt: skip
def test_end_of_a_scripts_process_beside_a_silent_member(
    ended: list[Worker], launches: bool, names: str, cause: str
) -> None:
    current = make_current(number=2, launches=launches)
    got = name_culprit(current, [*ended, silent(2)], ended[0])
    assert (got.id, got.cause) == (names, cause)
    if names == "2":
        says = f'worker 2 on node node-2 cannot be reached, and worker 0 lost a process (exit code 1: "{RESET}")'
        assert got.text == says


def test_exit_in_the_generation_before_says_nothing_of_a_failed_collective() -> None:
    before = exited(1, 1, "ValueError: boom", generation=1, standing=Standing.BROKEN)
    assert name_culprit(CURRENT, [before, C], before).text == "worker 1 reported a failed collective"


def test_memory_is_named_with_its_numbers() -> None:
    killed = ProcessExit(90.0, 1, 0, -9, generation=2, reason="OOMKilled", detail="limit 1 GiB, at most 1 GiB used")
    process = make_worker(1, Standing.DIED, why="OOMKilled", session=make_session(1, exits=(killed,)))
    container = make_worker(1, Standing.DIED, why="OOMKilled", pod=make_pod(1, memory_limit="512Mi"))
    got = [name_culprit(CURRENT, [A, w], w).text for w in (process, container)]
    assert got == [
        "worker 1 lost a process (OOMKilled: limit 1 GiB, at most 1 GiB used)",
        "worker 1 was killed for lack of memory (OOMKilled: limit 512Mi)",
    ]


def test_worker_without_a_pod_has_no_node() -> None:
    gone = make_worker(1, Standing.LOST, pod=None, session=None, why="NeverConnected")
    assert name_culprit(CURRENT, [A, gone], gone).text == "worker 1 has never connected"
    unplaced = make_worker(1, Standing.LOST, pod=make_pod(1, node=""), why="Disconnected")
    assert name_culprit(CURRENT, [A, unplaced], unplaced).text == "worker 1 cannot be reached"
