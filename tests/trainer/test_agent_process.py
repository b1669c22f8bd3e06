"""A real agent process, real trainer processes, a real TLS connection; only the operator's decisions are the test's."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from _regroup_agent.statefile import UNKNOWN
from harness.polling import TimedOutError, until
from harness.processes import alive, children, state_of
from regroup.protocol import wire
from regroup.protocol.state import Phase, StatePair
from tests.trainer.agent_edge import RAW_TRAINER, Heard, OperatorEdge, Worker, generation
from tests.unit.agent.python39 import oldest_python

AT_ONCE_S = 1.0
"""For what takes 1 to 4 ms on two cores that do nothing else."""


def welcome(operator: OperatorEdge, tier: str = "Session") -> int:
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


def test_lines_of_several_processes_have_their_rank(operator: OperatorEdge, pair: Worker) -> None:
    """Through the zygote, and in both streams; a lone process's lines are its own (test_zygote.py)."""
    script = pair.directory / "train.py"
    script.write_text(
        "import os, sys\nrank = os.environ['RANK']\nfor i in range(500):\n"
        "    print('out', rank, i)\n    print('err', rank, i, file=sys.stderr)\nsys.stdout.write('last')"
    )
    pair.start(sys.executable, str(script))
    port = welcome(operator, "Unknown")
    operator.tell(generation(1, port, 2, rank_offset=4, world_size=6)[0])
    operator.wait_body(wire.Finished)
    for path, word in ((pair.stdout, "out"), (pair.stderr, "err")):
        want = {f"[rank {rank}] {word} {rank} {i}" for rank in (4, 5) for i in range(500)}
        if word == "out":
            want |= {"[rank 4] last", "[rank 5] last"}

        def all_there(path: Path = path, want: set[str] = want) -> bool:
            return want <= set(path.read_text().splitlines())

        until(all_there, "all lines", details=path.read_text)
        assert [line for line in path.read_text().splitlines() if word in line and line not in want] == []


def test_session_from_hello_to_training_to_stop(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    welcome(operator)
    attached = ready(operator)
    assert attached.report.condition.incarnation == 1
    assert attached.report.seal is not None
    started = worker.noted("started")[0]
    assert started["env"] == {
        "RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None, "GROUP_RANK": None, "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    train(operator, worker)
    said = [type(h.body).__name__ for h in operator.heard]
    assert said.index("Adopted") < said.index("Progress")
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


def test_agent_runs_under_the_oldest_python(operator: OperatorEdge, worker: Worker) -> None:
    worker.python = oldest_python()
    worker.start_raw("take")
    welcome(operator)
    ready(operator)
    train(operator, worker)
    assert worker.noted("store")[0]["said"] == "1"
    before = len(operator.heard)
    os.kill(worker.noted("started")[0]["pid"], signal.SIGKILL)
    operator.wait_body(wire.Fault, after=before)
    ready(operator, before)
    operator.tell(wire.Stop("Released"))
    assert worker.agent is not None
    assert worker.agent.wait(10) == 0


def test_killed_process_is_reported_at_once_and_restarted_with_a_higher_incarnation(
    operator: OperatorEdge, worker: Worker
) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    train(operator, worker)
    killed = worker.noted("started")[0]
    before = len(operator.heard)
    clock = killed_at(killed["pid"])
    fault = operator.wait_body(wire.Fault, after=before)
    assert fault.at_s - clock < AT_ONCE_S
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
    at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at_s


def test_sibling_of_a_killed_process_keeps_its_process_and_state(operator: OperatorEdge, pair: Worker) -> None:
    pair.start_raw()
    welcome(operator)
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
    welcome(operator)
    ready(operator)
    pids = [n["pid"] for n in pair.noted("started")]
    assert pair.agent is not None
    pair.agent.kill()
    until(lambda: not any(alive(pid) for pid in pids), "every process has ended")


def test_generation_is_refused_twice_and_below(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw("again")
    welcome(operator)
    ready(operator)
    train(operator, worker, 5)
    second = worker.wait_noted("entering", 2)[1]
    assert (second["ok"], second["generation"]) == (False, 5)
    operator.tell(generation(4, 0, member=False)[0])
    until(
        lambda: "Refused generation 4: 5 has been heard." in worker.log(), "the refusal is logged", details=worker.log
    )


@pytest.mark.parametrize("phase", [Phase.READY, Phase.TRAINING])
def test_ping_is_answered_by_an_agent_that_runs_and_not_by_one_that_is_stopped(
    operator: OperatorEdge, worker: Worker, phase: str
) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    if phase == Phase.TRAINING:
        train(operator, worker)
    asked_s = pinged(operator)
    answer = operator.wait(lambda h: isinstance(h.body, wire.Changed) and h.at_s >= asked_s)
    assert answer.at_s - asked_s < AT_ONCE_S
    assert answer.report.condition.phase == phase

    assert worker.agent is not None
    os.kill(worker.agent.pid, signal.SIGSTOP)
    until(lambda: worker.agent is not None and state_of(worker.agent.pid) == "T", "the agent is stopped")
    asked_s = pinged(operator)
    with pytest.raises(TimedOutError):
        operator.wait(lambda h: isinstance(h.body, wire.Changed) and h.at_s >= asked_s, timeout_s=0.5)
    assert operator.streams == 1, "the kernel keeps the stream of a stopped agent"
    os.kill(worker.agent.pid, signal.SIGCONT)
    answer = operator.wait(lambda h: isinstance(h.body, wire.Changed) and h.at_s >= asked_s)
    assert answer.report.condition.phase == phase
    assert operator.streams == 1


def pinged(operator: OperatorEdge) -> float:
    """Send a ping; return the time before it (the answer may be here before this thread runs again)."""
    asked_s = time.monotonic()
    operator.tell(wire.Ping())
    return asked_s


# --- the store's socket --------------------------------------------------------------------------------------------


def test_store_socket_goes_to_the_trainer_and_a_fresh_one_takes_its_place(
    operator: OperatorEdge, worker: Worker
) -> None:
    worker.start_raw("tcpstore", OMP_NUM_THREADS="1")
    port = welcome(operator)
    ready(operator)
    train(operator, worker)
    assert [(n["said"], n["port"]) for n in worker.noted("store")] == [("1", port)]
    assert worker.noted("served")[0]["value"] == "value"
    fresh = operator.heard[-1].report.store_port
    assert fresh not in (0, port)


def test_store_of_a_port_that_is_not_the_fresh_one_is_bound_by_the_trainer(
    operator: OperatorEdge, worker: Worker
) -> None:
    worker.start_raw("take")
    welcome(operator)
    ready(operator)
    command, document = generation(1, 1)
    operator.tell(command)
    operator.tell(wire.DocumentCommand(document))
    assert [(n["said"], n["port"]) for n in worker.wait_noted("store")] == [("0", 0)]


def test_stores_host_waits_for_the_document_of_its_digest(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    port = welcome(operator)
    ready(operator)
    command, document = generation(1, port)
    operator.tell(command)
    operator.tell(wire.DocumentCommand(replace(document, reason="another text")))
    until(lambda: "Refused the document of generation 1" in worker.log(), "the refusal is logged", details=worker.log)
    assert worker.noted("assignment") == []
    operator.tell(wire.DocumentCommand(document))
    assert worker.wait_noted("assignment")[0]["document"] == document.digest()


# --- script tier ---------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, sys, time
def note(what, **more):
    with open(f"{os.environ['NOTES']}/{os.getpid()}", "a") as file:
        file.write(json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}) + "\\n")
def ended(*_):
    note("term")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
note("started", env={n: os.environ.get(n) for n in names})
while not os.path.exists(os.environ["NOTES"] + "/../exit"):
    time.sleep(0.01)
sys.exit(int(open(os.environ["NOTES"] + "/../exit").read()))
"""


def script(worker: Worker) -> None:
    path = worker.directory / "train.py"
    path.write_text(SCRIPT)
    worker.start(sys.executable, "-u", str(path))


def test_script_starts_with_torchruns_environment_and_restarts_for_each_generation(
    operator: OperatorEdge, pair: Worker
) -> None:
    script(pair)
    port = welcome(operator, "Unknown")
    operator.wait_phase(Phase.READY)
    operator.tell(generation(1, port, 2, rank_offset=2, world_size=4, group_rank=1)[0])
    started = pair.wait_noted("started", 2)
    assert sorted(started, key=lambda n: n["env"]["RANK"])[1]["env"] == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "job-uid",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "10",
    }  # fmt: skip
    # The port is free now: the script's own rank 0 binds it.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    operator.wait(lambda h: h.report.condition.phase == Phase.STARTING and h.report.condition.generation == 1)
    operator.tell(wire.Welcome("Script"))
    adopted = operator.wait_body(wire.Adopted)
    assert (adopted.report.condition.phase, adopted.report.condition.generation) == (Phase.TRAINING, 1)
    assert adopted.report.store_port not in (0, port)
    operator.tell(generation(2, 0, 2, hosts_store=False)[0])
    again = pair.wait_noted("started", 4)[2:]
    assert len(pair.noted("term")) == 2
    assert {n["env"]["RANK"] for n in again} == {"0", "1"}
    assert {n["env"]["TORCHELASTIC_RESTART_COUNT"] for n in again} == {"1"}
    operator.wait(lambda h: isinstance(h.body, wire.Adopted) and h.report.condition.generation == 2)
    assert not any(isinstance(h.body, wire.Fault) for h in operator.heard)
    (pair.directory / "exit.new").write_text("0")
    (pair.directory / "exit.new").rename(pair.directory / "exit")
    done = operator.wait_body(wire.Finished)
    assert (done.report.condition.phase, done.report.condition.generation) == (Phase.DONE, 2)


def test_script_that_fails_is_one_fault_and_waits_for_a_newer_generation(operator: OperatorEdge, pair: Worker) -> None:
    path = pair.directory / "train.py"
    unlucky = """
if os.environ["RANK"] == "1" and len(os.listdir(os.environ["NOTES"])) <= 2:  # in the first generation only
    while len(os.listdir(os.environ["NOTES"])) < 2:
        time.sleep(0.01)
    sys.exit("out of luck")
while not"""
    path.write_text(SCRIPT.replace("\nwhile not", unlucky))
    pair.start(sys.executable, "-u", str(path))
    port = welcome(operator, "Unknown")
    operator.tell(generation(1, port, 2)[0])
    fault = operator.wait_body(wire.Fault)
    assert (fault.body.exit_code, fault.body.local_rank, fault.body.last_line) == (1, 1, "out of luck")
    waiting = operator.wait(lambda h: h.report.condition.phase == Phase.READY and h.report.condition.entered == 1)
    assert waiting.report.condition.cause == "Process 1 ended with exit code 1."
    assert len(pair.noted("term")) == 1
    operator.tell(generation(2, 0, 2, hosts_store=False)[0])
    pair.wait_noted("started", 4)
    assert sum(isinstance(h.body, wire.Fault) for h in operator.heard) <= 2


# --- the end -------------------------------------------------------------------------------------------------------


def test_stop_ends_what_does_not_listen(operator: OperatorEdge, worker: Worker) -> None:
    path = worker.directory / "train.py"
    path.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(600)\n"
    )
    worker.start(sys.executable, str(path))
    port = welcome(operator, "Unknown")
    operator.tell(generation(1, port)[0])
    until(lambda: "up" in worker.stdout.read_text(), "the trainer has printed", details=worker.log)
    operator.tell(wire.Stop("Failed"))
    stopped = operator.wait_phase(Phase.STOPPED)
    assert stopped.report.condition.cause is None
    assert worker.agent is not None
    assert worker.agent.wait(10) == 0


def test_stop_does_not_wait_for_an_import_that_takes_long(operator: OperatorEdge, worker: Worker) -> None:
    """Of a volume that is cold, or that does not answer."""
    (worker.directory / "slow.py").write_text("import time\ntime.sleep(600)\n")
    (worker.directory / "train.py").write_text("import regroup\n")
    worker.start(sys.executable, str(worker.directory / "train.py"), REGROUP_PRELOAD="slow")
    welcome(operator)
    operator.wait_phase(Phase.STARTING)
    operator.tell(wire.Stop("Released"))
    stopped = operator.wait_phase(Phase.STOPPED, 3.0)
    assert stopped.report.condition.cause is None
    assert worker.agent is not None
    assert worker.agent.wait(10) == 0


def test_deleted_pod_says_so_and_trains_on_until_stop(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    before = train(operator, worker)
    assert worker.agent is not None
    worker.agent.terminate()
    draining = operator.wait_body(wire.Draining)
    assert draining.body.deadline_s == pytest.approx(20.0)
    step = draining.report.condition.step
    operator.wait(lambda h: h.report.condition.step > step + 2, after=before)
    operator.tell(wire.Stop("Released"))
    operator.wait_phase(Phase.STOPPED)
    assert worker.agent.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_deleted_pod_trains_on_while_the_operator_is_replaced(
    operator: OperatorEdge, worker: Worker, number: signal.Signals
) -> None:
    """Whichever signal its image has the kubelet send (STOPSIGNAL)."""
    worker.start_raw(REGROUP_GRACE_SECONDS="60")
    welcome(operator)
    ready(operator)
    train(operator, worker)
    assert worker.agent is not None
    worker.agent.send_signal(number)
    operator.wait_body(wire.Draining)
    operator.down()
    worker.wait_disconnected()
    before, step = len(operator.heard), operator.heard[-1].report.condition.step
    operator.up()
    draining = operator.wait_body(wire.Draining, after=before)
    assert (draining.report.condition.phase, len(worker.noted("started"))) == (Phase.TRAINING, 1)
    operator.wait(lambda h: h.report.condition.step > step + 2, after=before)
    operator.tell(wire.Stop("Released"))
    assert worker.agent.wait(10) == 0


def test_interrupted_agent_of_regroup_run_ends_with_it(operator: OperatorEdge, worker: Worker) -> None:
    """Also one that was leaving already."""
    worker.start_raw(REGROUP_GRACE_SECONDS="60", REGROUP_ENDS_ON_SIGINT="1")
    welcome(operator)
    ready(operator)
    train(operator, worker)
    assert worker.agent is not None
    worker.agent.send_signal(signal.SIGTERM)
    operator.wait_body(wire.Draining)
    worker.agent.send_signal(signal.SIGINT)
    operator.down()
    assert worker.agent.wait(10) == 143


def test_deleted_pod_whose_grace_is_over_ends_its_processes(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw(REGROUP_GRACE_SECONDS="2")
    welcome(operator)
    ready(operator)
    train(operator, worker)
    assert worker.agent is not None
    worker.agent.terminate()
    assert operator.wait_body(wire.Draining).body.deadline_s == pytest.approx(1.2)
    assert worker.agent.wait(10) == 143
    assert not alive(worker.noted("started")[0]["pid"])


def test_deleted_pod_without_an_operator_ends_at_once(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    operator.down()
    worker.wait_disconnected()
    assert worker.agent is not None
    worker.agent.terminate()
    assert worker.agent.wait(10) == 143
    operator.up()


def test_look_up_of_a_name_that_hangs_does_not_keep_the_agent(worker: Worker) -> None:
    looked_up = worker.directory / "looked-up"
    agent = worker.directory / "agent.py"
    agent.write_text(
        "import pathlib, socket, sys, threading\n"
        f"sys.path.insert(0, {str(worker.zipapp)!r})\n"
        "def hangs(*_, **__):\n"
        f"    pathlib.Path({str(looked_up)!r}).touch()\n"
        "    threading.Event().wait(60)\n"
        "socket.getaddrinfo = hangs\n"
        "from _regroup_agent.main import main\nmain()\n"
    )
    worker.zipapp = agent
    worker.start("sleep", "600", PATH=os.environ["PATH"])
    until(looked_up.exists, "the look-up", details=worker.log)
    assert worker.agent is not None
    worker.agent.terminate()
    assert worker.agent.wait(5) == 143


# --- the operator goes and comes -----------------------------------------------------------------------------------


def test_training_goes_on_without_the_operator_and_is_said_again(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    train(operator, worker)
    operator.down()
    worker.wait_disconnected()
    operator.token_file.write_text("second-token\n")
    before, step = len(operator.heard), operator.heard[-1].report.condition.step
    operator.up()
    hello = operator.wait_body(wire.Hello, after=before)
    assert (hello.report.condition.phase, hello.report.condition.generation) == (Phase.TRAINING, 1)
    assert hello.report.condition.step > step
    adopted = operator.wait_body(wire.Adopted, after=before)
    assert adopted.body.start_step == 0
    operator.wait_body(wire.Progress, after=before)
    assert operator.tokens[-1] == "Bearer second-token"
    assert len(worker.noted("started")) == 1


def test_fault_while_the_operator_is_away_is_told_when_it_is_back(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    train(operator, worker)
    operator.down()
    worker.wait_disconnected()
    before = len(operator.heard)
    os.kill(worker.noted("started")[0]["pid"], signal.SIGKILL)
    worker.wait_noted("started", 2)
    operator.up()
    fault = operator.wait_body(wire.Fault, after=before)
    assert (fault.body.exit_code, fault.report.condition.incarnation) == (-9, 2)
    assert fault.body.observed_ms > 0
    ready(operator, before)


def test_refusal_is_one_sentence_in_the_log_and_tried_again(operator: OperatorEdge, worker: Worker) -> None:
    operator.refuse = (403, "The token is of another pod.")
    worker.start_raw()
    until(lambda: len(operator.tokens) >= 4, "four requests", details=worker.log)
    assert worker.log().count("The operator answered 403: The token is of another pod.") == 1
    operator.refuse = None
    welcome(operator)
    ready(operator)


def test_commands_that_cannot_be_used_change_nothing(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    port = welcome(operator)
    ready(operator)
    operator.send_raw(b"\n")  # a keep-alive
    operator.send_raw(b"not json\n")
    operator.send_raw(b'{"jobUid": "job-uid"}\n')
    operator.tell(generation(1, port)[0], pod_uid="another-pod")
    operator.tell(wire.Stop("Complete"), job_uid="another-job")
    before = len(operator.heard)
    operator.tell(wire.Ping())
    answer = operator.wait_body(wire.Changed, after=before)
    assert answer.report.condition.heard == 0
    for said in ("it is for job job-uid, pod another-pod", "The message is not JSON"):
        # The agent's log is written by a thread of its own.
        until(lambda said=said: said in worker.log(), said, details=worker.log)  # type: ignore[misc]


# --- starting ------------------------------------------------------------------------------------------------------


def test_unreadable_state_file_counts_as_having_adopted_everything(operator: OperatorEdge, worker: Worker) -> None:
    (worker.state_dir / "agent.json").write_text('{"entered": ')
    worker.start_raw()
    hello = operator.wait_body(wire.Hello)
    assert hello.report.condition.adopted == hello.report.condition.entered == UNKNOWN
    assert hello.report.seal is None
    operator.wait_stream()
    operator.newest = 7
    operator.tell(wire.Welcome("Session"))
    settled = ready(operator)
    assert (settled.report.condition.entered, settled.report.condition.adopted) == (7, 7)
    assert settled.report.condition.incarnation > hello.report.condition.incarnation > 1_000_000_000
    assert settled.report.seal is not None
    assert (settled.report.seal.state, settled.report.seal.left_up_to) == (None, 7)
    assert "cannot be used" in worker.log()
    train(operator, worker, 8)


def test_container_restart_keeps_what_was_entered_and_raises_the_incarnation(
    operator: OperatorEdge, worker: Worker
) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    train(operator, worker, 3)
    worker.close()
    before = len(operator.heard)
    worker.start_raw()
    hello = operator.wait_body(wire.Hello, after=before)
    condition = hello.report.condition
    assert (condition.entered, condition.adopted, condition.heard, condition.incarnation) == (3, 3, 3, 1)
    until(lambda: operator.streams == 2, "a second stream", details=worker.log)
    operator.tell(wire.Welcome("Session"))
    operator.tell(generation(3, 0)[0])
    assert ready(operator, before).report.condition.incarnation == 2
    assert "Refused generation 3: 3 has been heard." in worker.log()


def test_process_that_has_returned_0_does_not_run_again_after_the_end_of_its_container(
    operator: OperatorEdge, pair: Worker
) -> None:
    """One of two has returned after the last step when the agent is killed, and with it the other one."""
    pair.start_raw("finish=3", "slow=1")
    welcome(operator)
    ready(operator)
    train(operator, pair)
    operator.wait_body(wire.Finished)
    finish = wire.Finish(1, 3, 4, 6)
    operator.tell(finish)
    pair.wait_noted("finish", 2)
    state = pair.state_dir / "agent.json"
    until(lambda: json.loads(state.read_text())["done"] == 0b01, "the first is done, on disk", details=pair.log)
    assert pair.agent is not None
    pair.agent.kill()
    pair.agent.wait(10)
    before = len(operator.heard)
    pair.start_raw("finish=3")
    operator.wait_body(wire.Hello, after=before)
    until(lambda: operator.streams == 2, "a second stream", details=pair.log)
    operator.tell(wire.Welcome("Session"))
    operator.tell(finish)
    done = operator.wait(lambda h: h.report.condition.phase == Phase.DONE, after=before)
    assert done.report.condition.generation == 1
    assert [note["rank"] for note in pair.noted("started")[2:]] == [1]
    last = pair.noted("finish")[-1]
    assert (last["rank"], last["step"], last["place"], last["world"]) == (1, 3, 5, 6)
    before = len(operator.heard)
    operator.tell(wire.Stop("Suspended"))
    operator.tell(wire.Ping())
    answer = operator.wait_body(wire.Changed, after=before)
    assert answer.report.condition.phase == Phase.DONE, "who is done has nothing to suspend"
    operator.tell(wire.Stop("Complete"))
    assert pair.agent.wait(10) == 0


def test_command_that_crashes_at_once_waits_longer_each_time(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw("exit=4")
    welcome(operator)

    def fault(incarnation: int) -> Heard:
        return operator.wait(lambda h: isinstance(h.body, wire.Fault) and h.report.condition.incarnation == incarnation)

    faults = [fault(incarnation) for incarnation in (1, 2, 3)]
    assert [f.body.exit_code for f in faults] == [4, 4, 4]
    assert faults[0].body.last_line == "the last words"
    assert faults[2].at_s - faults[1].at_s >= 1.0
    assert "first line\nthe last words\n" in worker.log()


def test_command_without_a_zygote_runs_too(operator: OperatorEdge, worker: Worker) -> None:
    worker.start("/bin/sh", "-c", f"{sys.executable} {RAW_TRAINER} take; exit 5")
    welcome(operator)
    ready(operator)
    train(operator, worker)
    pid = worker.noted("started")[0]["pid"]
    before = len(operator.heard)
    os.kill(pid, signal.SIGKILL)
    assert operator.wait_body(wire.Fault, after=before).body.exit_code == 5
    ready(operator, before)


def test_command_that_does_not_exist_is_a_fault_with_a_sentence(operator: OperatorEdge, worker: Worker) -> None:
    worker.start("/no/such/program")
    welcome(operator)
    fault = operator.wait_body(wire.Fault)
    assert fault.body.exit_code == 127
    assert fault.body.last_line == "/no/such/program: cannot be started: No such file or directory"


def test_preload_that_cannot_be_imported_falls_back_to_exec(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw(REGROUP_PRELOAD="no_such_module")
    welcome(operator)
    ready(operator)
    assert "No zygote: importing no_such_module failed (ModuleNotFoundError" in worker.log()


def test_zygote_that_dies_is_started_again_and_its_trainers_live(operator: OperatorEdge, worker: Worker) -> None:
    worker.start_raw()
    welcome(operator)
    ready(operator)
    trainer = worker.noted("started")[0]["pid"]
    assert worker.agent is not None
    (zygote,) = set(children(worker.agent.pid)) - {trainer}
    os.kill(zygote, signal.SIGKILL)
    until(
        lambda: "The zygote died; it is started again." in worker.log(), "the new zygote is logged", details=worker.log
    )
    assert alive(trainer)
    before = len(operator.heard)
    os.kill(trainer, signal.SIGKILL)
    ready(operator, before)
    agent = worker.agent.pid
    until(lambda: zygote not in children(agent) and len(children(agent)) == 2, "a zygote and a trainer run again")


def test_launcher_in_a_shell_is_refused_with_a_sentence(worker: Worker) -> None:
    worker.start("sh", "-c", "torchrun train.py")
    assert worker.agent is not None
    assert worker.agent.wait(10) == 2
    assert "regroup: The command starts torchrun from a shell (sh)" in worker.log()


def test_member_that_stops_answering_is_reported_until_it_answers_again(operator: OperatorEdge, worker: Worker) -> None:
    """A full queue of connections drops whatever comes, as a machine without power does."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(0)
        worker.start_raw()
        welcome(operator)
        ready(operator)
        observed = wire.Observed("other", *other.getsockname())
        train(operator, worker, observes=(observed,))
        other.settimeout(10)
        other.accept()[0].close()  # it has answered once; the next connections fill the queue
        began = time.monotonic()
        heard = operator.wait(lambda h: any(one.age_s >= wire.SILENT_S for one in h.report.unheard))
        assert time.monotonic() - began >= wire.SILENT_S
        assert [one.pod_uid for one in heard.report.unheard] == ["other"]
        first = next(h for h in operator.heard if h.report.unheard)
        assert wire.SUSPECT_S <= first.report.unheard[0].age_s < wire.SILENT_S
        before = len(operator.heard)
        other.listen(4096)
        operator.wait(lambda h: not h.report.unheard, after=before)
    observed_port = operator.heard[0].report.observed_port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", observed_port), timeout=5)
