"""What a trainer says of where it is: stacks of all threads, and what may take longer than a step."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from regroup.errors import UsageError
from regroup.generation import stacks
from regroup.generation.stacks import Call, chain_of, where_of
from regroup.progress.busy import BusyStack
from regroup.progress.pace import Pace
from regroup.protocol.local import BusyLocally

OURS = Call(stacks.__file__, 7, "wait")
TORCH = Call(stacks._TORCH_COLLECTIVES, 3, "all_reduce")
LIBRARY = Call(threading.__file__, 5, "wait")
LOAD = Call("/app/train.py", 4, "load")
MAIN = Call("/app/train.py", 9, "<module>")


@pytest.mark.parametrize(
    ("calls", "want"),
    [
        pytest.param([LOAD, MAIN], "load (train.py:4)", id="the innermost of the script"),
        pytest.param([OURS, LIBRARY, MAIN], "<module> (train.py:9)", id="not one of this library or Python's"),
        pytest.param([TORCH, LOAD], "load (train.py:4)", id="not one of an installed package"),
        pytest.param([LIBRARY], "wait (threading.py:5)", id="where there is no script, the innermost of all"),
        pytest.param([], "nowhere", id="no stack at all"),
    ],
)
def test_where(calls: list[Call], want: str) -> None:
    assert where_of(calls) == want


def test_chain_names_the_innermost_calls_in_one_line() -> None:
    assert chain_of([LOAD, MAIN]) == "load (train.py:4) < <module> (train.py:9)"
    assert chain_of([LOAD] * 50).count("<") == stacks.MAX_CHAIN - 1


def test_another_thread_describes_this_one() -> None:
    found: list[stacks.Description] = []
    thread = threading.Thread(target=lambda: found.append(stacks.describe()), name="listener")
    thread.start()
    thread.join()
    assert "test_another_thread_describes_this_one" in found[0].chain
    assert "thread MainThread:" in found[0].text
    assert "thread listener:" in found[0].text
    assert not found[0].in_torch


# --- what may take longer than a step ------------------------------------------------------------------------------


def stack() -> tuple[BusyStack, list[Any], list[float]]:
    said: list[Any] = []
    paused: list[float] = []
    return BusyStack(said.append, paused.append), said, paused


def test_inner_pause_is_said_and_then_the_outer_one_with_the_time_it_has_left() -> None:
    busy, said, paused = stack()
    with busy.pause("eval", 60):
        with busy.pause("plot", 5.0):
            assert [(m.name, m.max_s) for m in said] == [("eval", 60.0), ("plot", 5.0)]
        assert said[-1].name == "eval"
        assert 0 < said[-1].max_s < 60
        assert paused == []
    assert said[-1] == BusyLocally()
    assert len(paused) == 1


def test_pause_that_an_exception_ends_is_over() -> None:
    busy, said, _ = stack()
    with pytest.raises(KeyError), busy.pause("eval", 60):
        raise KeyError
    assert said[-1] == BusyLocally()


@pytest.mark.parametrize("max_s", [0, -1, float("nan"), float("inf"), True, "60", None])
def test_pause_without_a_limit_is_refused(max_s: Any) -> None:
    with pytest.raises(UsageError, match=r'max_s of job.pause\("eval"\) is .*; it must be a number of seconds above 0'):
        BusyStack(None, lambda _: None).pause("eval", max_s)


def test_wait_for_a_state_is_no_part_of_the_first_step() -> None:
    """Of a worker that joins the state takes minutes, and so does the step in which it compiles."""
    pace = Pace()
    pace.begin_generation(300.0, waited_s=290.0)
    pace.committed(500.0, waited_s=310.0)
    assert pace.longest_s == 180.0
    pace.committed(502.0, waited_s=310.5)
    assert pace.longest_s == 1.5


def test_pauses_are_no_part_of_a_steps_duration() -> None:
    pace = Pace()
    pace.begin_generation(0.0)
    pace.committed(10.0)
    assert (pace.step_s, pace.longest_s) == (None, 10.0)
    pace.committed(11.0)
    pace.paused(100.0)
    pace.committed(113.0)
    pace.committed(114.0)
    assert (pace.step_s, pace.longest_s) == (1.0, 2.0)
    pace.committed(214.0, waited_s=98.5)
    assert pace.longest_s == 2.0, "what others took is not this process's own time"
    pace.begin_generation(200.0)
    pace.committed(300.0)
    assert pace.longest_s == 2.0, "the first step of a generation has a time of its own"
