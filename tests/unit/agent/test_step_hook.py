"""How the hook in a script counts optimizer steps, reports them and holds: its real text, with an agent that is a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from _regroup_agent.group_hook_files import source_of
from harness.polling import until


class Optimizer:
    """All that the hook asks of an optimizer: it is an object to which there are weak references."""


class Agent:
    """The listening socket, and the hook's connection to it."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.listener.settimeout(5)
        self.connection: socket.socket | None = None

    def receive(self) -> list[dict[str, Any]]:
        """Return what has come, which is at least one message."""
        if self.connection is None:
            self.connection, _ = self.listener.accept()
            self.connection.settimeout(5)
        return [json.loads(line) for line in self.connection.recv(1 << 16).splitlines()]

    def say(self, kind: str) -> None:
        assert self.connection is not None
        self.connection.sendall(json.dumps({"type": kind}).encode() + b"\n")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.listener.close()


class Hook:
    """The hook's counter, on a clock of its own."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.now_s = 100.0
        namespace["time"] = SimpleNamespace(monotonic=lambda: self.now_s)
        self.steps = namespace["steps"]
        self.steps.begin()

    def step(self, optimizer: Any, times: int = 1, step_s: float = 0.01) -> None:
        for _ in range(times):
            self.now_s += step_s
            self.steps.stepped(optimizer)

    @property
    def count(self) -> int:
        return int(self.steps._steps)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("REGROUP_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("REGROUP_INCARNATION", "7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    agent = Agent(tmp_path / "s")
    yield agent
    agent.close()


@pytest.fixture
def hook(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Hook:  # noqa: ARG001  (found by the environment)
    monkeypatch.delitem(
        sys.modules, "regroup.job", raising=False
    )  # another test's session; the hook counts only without one
    namespace: dict[str, Any] = {"__name__": "hook"}
    exec(source_of("group_hook.py"), namespace)
    return Hook(namespace)


def test_two_optimizers_that_take_turns_count_as_one(hook: Hook) -> None:
    generator, critic = Optimizer(), Optimizer()
    for _ in range(10):
        hook.step(critic, 5)
        hook.step(generator)
    assert hook.count == 50, "the critic made the first step"


def test_optimizer_around_another_one_counts_once(hook: Hook) -> None:
    inner, outer = Optimizer(), Optimizer()
    for _ in range(10):
        hook.step(inner)
        hook.step(outer)
    assert hook.count == 10


def test_new_optimizer_after_the_first_is_gone_counts_on(hook: Hook) -> None:
    for _ in range(3):
        hook.step(Optimizer(), 4)
    assert hook.count == 12


def test_optimizer_that_is_kept_but_used_no_more_loses_its_place(hook: Hook) -> None:
    first, second = Optimizer(), Optimizer()
    hook.step(first, 5)
    hook.step(second, 150)
    assert hook.count == 155


def test_each_of_five_optimizers_that_are_kept_counts_for_its_epoch(hook: Hook) -> None:
    kept = [Optimizer() for _ in range(5)]
    for optimizer in kept:
        hook.step(optimizer, 50)
    assert hook.count == 250


def test_generator_that_makes_the_first_step_counts_beside_its_critic(hook: Hook) -> None:
    generator, critic = Optimizer(), Optimizer()
    for _ in range(20):
        hook.step(generator)
        hook.step(critic, 5)
    assert hook.count == 20


def test_optimizer_of_each_parameter_counts_once_for_each_iteration(hook: Hook) -> None:
    optimizers = [Optimizer() for _ in range(150)]
    for _ in range(20):
        for optimizer in optimizers:
            hook.step(optimizer)
    assert hook.count == 20


def test_report_comes_with_the_first_step_and_then_once_a_second(hook: Hook, agent: Agent) -> None:
    optimizer = Optimizer()
    hook.step(optimizer)
    assert agent.receive() == [{"type": "stepped", "localRank": 1, "incarnation": 7, "steps": 1, "stepS": 0.0}]
    hook.step(optimizer, 250)
    second, third = agent.receive()
    assert (second["steps"], third["steps"]) == (101, 201)
    assert second["stepS"] == third["stepS"] == pytest.approx(0.01)


def test_last_count_is_told_at_the_end_of_the_interpreter(hook: Hook, agent: Agent) -> None:
    optimizer = Optimizer()
    hook.step(optimizer, 20)
    assert [one["steps"] for one in agent.receive()] == [1]
    hook.steps.end()
    hook.steps.end()
    assert [one["steps"] for one in agent.receive()] == [20]


def test_process_tells_its_last_count_by_itself(agent: Agent) -> None:
    text = (
        "import sys; hook = {'__name__': 'hook'}; exec(sys.stdin.read(), hook); hook['steps'].begin(); one = type('O', (), {})()\n"
        "for _ in range(20): hook['steps'].stepped(one)"
    )
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE)
    process.communicate(source_of("group_hook.py").encode(), 30)
    assert process.returncode == 0
    assert [one["steps"] for one in agent.receive()] == [1, 20]


def test_slow_steps_are_each_reported(hook: Hook, agent: Agent) -> None:
    hook.step(optimizer := Optimizer(), 3, step_s=40.0)
    said = agent.receive()
    assert [(one["steps"], one["stepS"]) for one in said] == [(1, 0.0), (2, 40.0), (3, 40.0)]
    del optimizer


def test_process_holds_after_its_step_until_it_may_go_on(hook: Hook, agent: Agent) -> None:
    optimizer, passed = Optimizer(), threading.Event()
    hook.step(optimizer)
    agent.receive()
    agent.say("hold")

    def steps() -> None:
        hook.step(optimizer)
        passed.set()

    thread = threading.Thread(target=steps)
    thread.start()
    assert agent.receive() == [{"type": "held", "localRank": 1, "incarnation": 7}]
    assert not passed.wait(0.2)
    agent.say("go")
    thread.join(5)
    assert passed.is_set()
    hook.step(optimizer, 5)
    assert hook.count == 7, "it did not go on"


def test_process_holds_after_a_step_of_any_optimizer(hook: Hook, agent: Agent) -> None:
    leader, other = Optimizer(), Optimizer()
    hook.step(leader)
    agent.receive()
    agent.say("hold")
    thread = threading.Thread(target=hook.step, args=(other,))
    thread.start()
    assert agent.receive() == [{"type": "held", "localRank": 1, "incarnation": 7}]
    agent.say("go")
    thread.join(5)
    assert not thread.is_alive()


def test_both_of_two_threads_hold_and_go_on(hook: Hook, agent: Agent) -> None:
    optimizers = [Optimizer(), Optimizer()]
    hook.step(optimizers[0])
    agent.receive()
    agent.say("hold")
    threads = [threading.Thread(target=hook.step, args=(optimizer, 3)) for optimizer in optimizers]
    threads[0].start()
    assert agent.receive()[-1]["type"] == "held"
    threads[1].start()
    threads[1].join(0.2)
    assert all(thread.is_alive() for thread in threads)
    agent.say("go")
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_handler_of_the_script_may_make_a_step_while_it_holds(hook: Hook, agent: Agent) -> None:
    optimizer = Optimizer()
    hook.step(optimizer)
    agent.receive()
    agent.say("hold")

    def signals() -> None:
        agent.receive()
        until(hook.steps._agent.getblocking, "it waits")
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: hook.count == 3, "the handler's step")
        agent.say("go")

    before = signal.signal(signal.SIGUSR1, lambda *_: hook.step(optimizer))
    thread = threading.Thread(target=signals)
    thread.start()
    try:
        hook.step(optimizer)
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join(5)
    assert hook.count == 3


def test_process_goes_on_when_the_connection_ends(hook: Hook, agent: Agent) -> None:
    optimizer = Optimizer()
    hook.step(optimizer)
    agent.receive()
    agent.say("hold")
    thread = threading.Thread(target=hook.step, args=(optimizer,))
    thread.start()
    agent.receive()
    agent.close()
    thread.join(5)
    assert not thread.is_alive()
    hook.step(optimizer, 2000)
    assert hook.count == 2002


def test_word_to_go_on_that_comes_before_the_step_takes_the_word_to_hold_back(hook: Hook, agent: Agent) -> None:
    optimizer = Optimizer()
    hook.step(optimizer)
    agent.receive()
    agent.say("hold")
    agent.say("go")
    hook.step(optimizer, 10)
    assert hook.count == 11


@pytest.mark.parametrize("error", [SystemExit(3), TimeoutError("the script's own")])
def test_handler_of_the_script_may_end_the_process_while_it_holds(
    hook: Hook, agent: Agent, error: BaseException
) -> None:
    optimizer = Optimizer()
    hook.step(optimizer)
    agent.receive()
    agent.say("hold")

    def ends(*_: Any) -> None:
        raise error

    def signals() -> None:
        agent.receive()
        until(hook.steps._agent.getblocking, "it waits")
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, ends)
    thread = threading.Thread(target=signals)
    thread.start()
    try:
        with pytest.raises(type(error)) as ended:
            hook.step(optimizer)
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join(5)
    assert ended.value is error


def test_forked_child_counts_and_says_nothing(hook: Hook, agent: Agent) -> None:
    optimizer = Optimizer()
    hook.step(optimizer)
    agent.receive()
    pid = os.fork()
    if pid == 0:
        hook.step(optimizer, 500)
        os._exit(hook.count)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    hook.step(optimizer, 100)
    assert [one["steps"] for one in agent.receive()] == [101]


def test_agent_that_does_not_read_stops_nobody(hook: Hook, agent: Agent) -> None:
    hook.step(optimizer := Optimizer(), 20_000, step_s=1.0)
    assert hook.count == 20_000
    assert agent.receive()
    del optimizer
