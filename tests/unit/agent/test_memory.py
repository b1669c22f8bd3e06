"""The container's cgroup as the agent reads it: v1, v2, seen from inside and from the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from _regroup_agent import ending
from _regroup_agent.memory import Kills, Memory, MemoryCgroup, in_words, out_of_memory, parse

MIB = 1 << 20
V1_EVENTS = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
V2_EVENTS = "low 0\nhigh 0\nmax 81\noom 3\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("events", "limit", "peak", "want"),
    [
        pytest.param(V1_EVENTS, "536870912\n", "536870912\n", Memory(2, 512 * MIB, 512 * MIB), id="v1"),
        pytest.param(V2_EVENTS, "536870912\n", "535822336\n", Memory(2, 512 * MIB, 511 * MIB), id="v2"),
        pytest.param(V1_EVENTS, "9223372036854771712\n", "1\n", Memory(2, None, 1), id="v1 without a limit"),
        pytest.param(V2_EVENTS, "max\n", "1\n", Memory(2, None, 1), id="v2 without a limit"),
        pytest.param(V2_EVENTS, "536870912\n", "", Memory(2, 512 * MIB, None), id="a kernel without memory.peak"),
        pytest.param("oom_kill_disable 0\nunder_oom 0\n", "1", "1", Memory(0, 1, 1), id="a kernel that does not count kills"),
        pytest.param("", "", "", Memory(0), id="nothing can be read"),
    ],
)  # fmt: skip
def test_parse(events: str, limit: str, peak: str, want: Memory) -> None:
    assert parse(events, limit, peak) == want


def cgroup(directory: Path, kills: int, *, v2: bool = False) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.events", "memory.max", "memory.peak")
    if not v2:
        names = ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
    for name, text in zip(names, (f"oom_kill {kills}\n", f"{64 * MIB}\n", f"{63 * MIB}\n"), strict=True):
        (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("where", "own", "v2"),
    [
        pytest.param(
            "memory", "5:memory:/kubepods/pod1/ctr\n", False, id="v1: the container's own is mounted as the root"
        ),
        pytest.param(
            "memory/kubepods/pod1", "5:cpu,memory:/kubepods/pod1\n1:name=systemd:/x\n", False, id="v1: on the host"
        ),
        pytest.param("", "0::/\n", True, id="v2: a cgroup namespace"),
        pytest.param("user.slice/me", "0::/user.slice/me\n", True, id="v2: on the host"),
    ],
)
def test_cgroup_is_found_and_each_kill_is_told_once(tmp_path: Path, where: str, own: str, v2: bool) -> None:
    cgroup(tmp_path / where, kills=1, v2=v2)
    found = MemoryCgroup(str(tmp_path), own)
    assert found.newly_killed(1.0) is None, "what was killed before this agent started is no news"
    cgroup(tmp_path / where, kills=3, v2=v2)
    told = [found.newly_killed(2.0) for _ in range(3)]
    assert told == [Memory(3, 64 * MIB, 63 * MIB), Memory(3, 64 * MIB, 63 * MIB), None]


def test_kill_that_no_exit_followed_explains_no_later_exit(tmp_path: Path) -> None:
    cgroup(tmp_path, kills=0, v2=True)
    found = MemoryCgroup(str(tmp_path), "0::/\n")
    cgroup(tmp_path, kills=3, v2=True)
    found.look(10.0)
    assert found.newly_killed(3610.0) is None


@pytest.mark.parametrize(
    ("looks", "explained"),
    [
        pytest.param([(10, 1)], [True, False], id="one kill explains the exit of the same moment, and one exit only"),
        pytest.param([(10, 3), (10.1, 3)], [True, True, True, False], id="three that died together are all explained"),
        pytest.param([(10, 1), (14.9, 1)], [True, False], id="a trainer that fails some seconds after its helper"),
        pytest.param([(10, 3), (15.1, 3)], [False], id="an exit long after the kills has another cause"),
        pytest.param(
            [(10, 3), (15.1, 4)], [True, False], id="an exit after a new kill, when older ones no longer count"
        ),
        pytest.param([(10, 0), (11, 0)], [False], id="no kill"),
    ],
)
def test_kills_explain_the_exits_right_after_them(looks: list[tuple[float, int]], explained: list[bool]) -> None:
    kills = Kills(0)
    for now_s, counter in looks:
        kills.look(counter, now_s)
    assert [kills.explain() for _ in explained] == explained


def test_machine_without_cgroups_tells_nothing(tmp_path: Path) -> None:
    assert MemoryCgroup(str(tmp_path), "").newly_killed(1.0) is None
    assert MemoryCgroup(str(tmp_path), "no cgroup line\n").read() is None


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (Memory(1, 512 * MIB, 511 * MIB), "limit 512 MiB, at most 511 MiB used"),
        (Memory(1, 512 * MIB), "limit 512 MiB"),
        (Memory(1, None, 3 << 30), "no limit of its own, at most 3 GiB used"),
    ],
)
def test_numbers_behind_a_kill(memory: Memory, text: str) -> None:
    assert out_of_memory(memory) == text


def test_sizes() -> None:
    assert [in_words(n) for n in (100, 1024, 1536 * 1024, 5 << 30)] == ["100 bytes", "1 KiB", "1.5 MiB", "5 GiB"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-9, "Process 1 was killed for lack of memory (OOMKilled: limit 512 MiB)."),
        (
            1,
            "Process 1 ended with exit code 1 after a process that it had started was killed for lack of memory (OOMKilled: ",
        ),
        (-15, "Process 1 was ended by SIGTERM."),
        (0, "Process 1 ended (exit code 0) without finishing its steps."),
    ],
)
def test_exit_sentence_names_memory_only_where_it_explains_the_end(code: int, says: str) -> None:
    assert ending.exit_sentence(1, code, Memory(1, 512 * MIB)).startswith(says)
