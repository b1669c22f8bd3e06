"""`bench.gpu` without a GPU: what is judged, how a part is ended, what is printed, and a dry run of some parts."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.gpu import __main__ as command
from bench.gpu import judge, machine, prepare
from bench.gpu.bounded import Ended, run_bounded
from bench.gpu.machine import Machine
from bench.gpu.part import ON_GPU, Context, Part, Process, Row
from bench.gpu.parts import PARTS, environment, gpt2, kills, meshes, state
from bench.gpu.report import Report
from bench.leftovers import end_leftovers
from bench.trials import BenchError, Trial
from regroup.layout import KNOWN_DIMS, PRODUCTS

ROOT = Path(__file__).parents[3]
H200 = Machine("cuda", ("NVIDIA H200",), "570.1", "2.11.0+cu130", (2, 30, 7), "/nccl", "3.12.3", 16, "/usr/bin/gcc")
OLD_NCCL = replace(H200, nccl=(2, 28, 9), preload="")
TWO_GPUS = replace(OLD_NCCL, gpus=("NVIDIA H100", "NVIDIA H100"))
CPU = Machine("cpu", (), "", "2.13.0", (), "", "3.11.7", 2, "")


def context(found: Machine) -> Context:
    return Context(found, Path("out"), time.monotonic() + 60)


# --- what there is to run on


@pytest.mark.parametrize(
    ("found", "ranks", "shares", "lacks"),
    [
        pytest.param(H200, 4, True, "", id="a new NCCL lets ranks share a GPU"),
        pytest.param(OLD_NCCL, 1, False, "", id="one rank needs no new one"),
        pytest.param(OLD_NCCL, 2, True, "NCCL 2.28.9 refuses that before 2.30", id="an old one does not"),
        pytest.param(TWO_GPUS, 2, False, "", id="each rank has a GPU"),
        pytest.param(TWO_GPUS, 4, True, "4 ranks on 2 GPUs", id="too many ranks for two GPUs"),
        pytest.param(CPU, 4, False, "", id="CPUs"),
    ],
)
def test_who_shares_a_gpu(found: Machine, ranks: int, shares: bool, lacks: str) -> None:
    assert found.shares(ranks) == shares
    assert lacks in found.lacks(ranks)
    assert bool(found.lacks(ranks)) == bool(lacks)
    if lacks:
        with pytest.raises(BenchError, match=r"bench\.gpu\.prepare"):
            context(found).environment(ranks)
        return
    variables = context(found).environment(ranks)
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in variables) == shares
    assert variables.get("LD_PRELOAD") == ("/nccl" if shares else os.environ.get("LD_PRELOAD"))
    assert (variables.get("CUDA_VISIBLE_DEVICES") == "") == (found is CPU)


def test_a_machine_is_the_same_after_json() -> None:
    assert machine.from_json(json.loads(json.dumps(H200.__dict__))) == H200


def test_missing_packages_are_named_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.packages() == ""
    monkeypatch.setattr(machine, "PACKAGES", {"json": "json", "no_such_package": "no-such-package"})
    assert command.main(["--device", "cpu"]) == 2
    assert "packages are missing: no-such-package." in capsys.readouterr().err


def test_packages_that_are_looked_for_are_those_that_regroup_run_imports() -> None:
    """What is installed here may not be there: each package that a run needs is named before, and can be fetched."""
    imports = "regroup_cli.__main__, regroup_cli.run, regroup.train.config"
    code = f"import sys; old = set(sys.modules); import {imports}; print(*(set(sys.modules) - old))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    tops = {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    of_others = {  # what the named ones bring
        "_cffi_backend", "aiohappyeyeballs", "aiosignal", "annotated_types", "attr", "attrs", "cython_runtime", "frozenlist",
        "idna", "multidict", "propcache", "pydantic_core", "typing_extensions", "typing_inspection", "yarl", "_yaml",
    }  # fmt: skip
    ours = {name for name in tops if name.startswith(("regroup", "_regroup", "_cython", "_openssl", "_sysconfigdata"))}
    assert tops - of_others - ours <= set(machine.PACKAGES)
    assert set(machine.PACKAGES.values()) - {"torch", "numpy"} == set(prepare.PACKAGES)


def test_what_measures_needs_no_further_package() -> None:
    """A machine with a GPU may have neither rich nor scikit-learn; torch is imported by the processes that use it only."""
    code = "import sys; import bench.gpu.__main__, bench.gpu.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"rich", "sklearn", "torch", "pydantic", "aiohttp"} & {
        name.split(".")[0] for name in done.stdout.split()
    }


@pytest.mark.parametrize(
    ("found", "want"),
    [
        pytest.param(H200, ["2.30.7 (preloaded): up to 4 ranks share GPUs", "holds", "holds"], id="as wanted"),
        pytest.param(OLD_NCCL, ["2.28.9 (torch's): ranks cannot share a GPU", "FAILS", "holds"], id="an old NCCL"),
        pytest.param(
            replace(OLD_NCCL, gpus=("A",) * 4, compiler=""),
            ["2.28.9 (torch's): each rank has a GPU of its own", "holds", "FAILS"],
            id="four GPUs, no compiler",
        ),
        pytest.param(CPU, [], id="CPUs"),
    ],
)
def test_environment_is_judged(found: Machine, want: list[str]) -> None:
    rows: list[Row] = []
    environment.run(context(found), rows.append)
    judged = [row for row in rows if row.aim]
    assert [*(row.found for row in judged[:1]), *(row.verdict for row in judged)] == want


# --- verdicts


def test_speed_is_not_judged_on_a_cpu() -> None:
    row = context(CPU).judged("pause", "9.00 s", "at most 0.5 s", False, speed=True)
    assert (row.holds, row.verdict) == (None, "not judged on a CPU")
    assert context(H200).judged("pause", "9.00 s", "at most 0.5 s", False, speed=True).verdict == "FAILS"
    assert context(CPU).judged("bits", "differ", "equal", False).verdict == "FAILS"


def trial(recovery_s: float, kept: int = 1, rolled_back: int = 0) -> Trial:
    return Trial(recovery_s, 0.0, 0, world=1, full_s=2.0, full_imports_s=0.0, kept=kept, rolled_back=rolled_back)


@pytest.mark.parametrize(
    ("trials", "want"),
    [
        pytest.param([trial(0.3)] * 19 + [trial(0.7)], [True, True, True], id="as wanted"),
        pytest.param([trial(0.31)] * 20, [False, True, True], id="the median is late"),
        pytest.param([trial(0.1)] * 19 + [trial(0.71)], [True, False, True], id="one is late"),
        pytest.param([trial(0.1)] * 19 + [trial(0.1, kept=0)], [True, True, False], id="a survivor died"),
        pytest.param([trial(0.1)] * 19 + [trial(0.1, rolled_back=1)], [True, True, False], id="a step came twice"),
    ],
)
def test_verdicts_about_kills(trials: list[Trial], want: list[bool]) -> None:
    assert [row.holds for row in kills.verdicts(context(H200), trials) if row.aim] == want


@pytest.mark.parametrize(
    ("trials", "want"),
    [
        pytest.param([trial(9.0, kept=2), trial(0.1, kept=3)], True, id="the other group goes on"),
        pytest.param([trial(0.1, kept=1)], False, id="one of the other group died"),
        pytest.param([trial(0.1, kept=2, rolled_back=1)], False, id="a step came twice"),
    ],
)
def test_verdict_about_kills_in_a_group(trials: list[Trial], want: bool) -> None:
    assert meshes.verdict_on_groups(context(H200), trials, "shard").holds is want


def test_every_split_of_a_model_is_trained() -> None:
    assert (ON_GPU.meshes, ON_GPU.read_at) == (None, None)
    sizes = [case.sizes for case in meshes.CASES.values()]
    assert {name for one in sizes for name in one} == set(KNOWN_DIMS)
    assert all(set(product) in [set(one) for one in sizes] for product in PRODUCTS)
    assert {case.ranks for case in meshes.CASES.values()} == {2, 4}
    wholes = {case.whole for case in meshes.CASES.values()}
    assert len(wholes) == 7, "models that differ in their mesh only are compared with one run"
    assert {case.whole for case in meshes.READERS.values()} == {meshes.WRITER.whole} <= wholes


@pytest.mark.parametrize(
    ("case", "losses", "want"),
    [
        pytest.param("fsdp", "1.0000 2.0000", True, id="equal"),
        pytest.param("fsdp", "1.0000 2.0030", False, id="another loss"),
        pytest.param("fsdp-tensor", "1.0000 2.0030", True, id="rounded products differ by more"),
        pytest.param("fsdp", "1.0000", False, id="a step is missing"),
        pytest.param("context", "1.0000 2.0000", False, id="nothing to compare with"),
        pytest.param("fsdp", None, False, id="it failed"),
    ],
)
def test_losses_of_a_split_model_are_judged(case: str, losses: str | None, want: bool) -> None:
    class Run:
        def finished(self) -> str:
            if losses is None:
                raise BenchError("fsdp-split ended with exit code 1.\nIts last lines")
            return "".join(f"step {n}  loss {loss}  norm 1\n" for n, loss in enumerate(losses.split(), 1))

    wholes = {meshes.CASES[name].whole: {1: 1.0, 2: 2.0, 3: 3.0} for name in ("fsdp", "fsdp-tensor")}
    row = meshes.compared(context(CPU), "what", meshes.CASES[case], wholes, cast(Process, Run()), range(1, 3))
    assert row.holds is want


@pytest.mark.parametrize(
    ("gpu", "rates", "want"),
    [
        pytest.param("NVIDIA H200", (515e3, 520e3, 541e3), [True, True, True], id="as wanted"),
        pytest.param("NVIDIA H200", (499e3, 500e3, 500e3), [True, True, False], id="too slow for an H200"),
        pytest.param("NVIDIA H100 80GB HBM3", (499e3, 500e3, 500e3), [True, True, True], id="an H100's aim is lower"),
        pytest.param("NVIDIA A100", (99e3, 100e3, 100e3), [True, True, None], id="another GPU has no aim of its own"),
        pytest.param("NVIDIA H200", (515e3, 530e3, 530e3), [False, True, True], id="behind the same loop"),
        pytest.param("NVIDIA H200", (510e3, 510e3, 541e3), [True, False, True], id="behind the best loop"),
    ],
)
def test_verdicts_about_gpt2(gpu: str, rates: tuple[float, float, float], want: list[bool | None]) -> None:
    assert [row.holds for row in gpt2.verdicts(context(replace(H200, gpus=(gpu,))), *rates)] == want


OUTPUT = """regroup: job in /tmp/x/job.json
step 1  loss 5.5452  norm 1.2  rate 0.000333  12,345 tokens/s  MFU 1.0 %  generation 1  ranks 2
step 2  loss 5.5000  norm 1.2  rate 0.000667  20,000 tokens/s  MFU 1.0 %  generation 1  ranks 2
step 3  loss 5.4000  norm 1.2  rate 0.001  500,000 tokens/s  generation 1  ranks 2
step 4  loss 5.3000  norm 1.2  rate 0.001  520,000 tokens/s  generation 1  ranks 2
step 5  loss 5.2000  norm 1.2  rate 0.001  510,000 tokens/s  generation 1  ranks 2
step 5  held-out loss 4.1000  accuracy 0.1000
parameters sha256 0a1b
"""


def test_figures_are_read_from_output() -> None:
    assert judge.losses(OUTPUT) == {1: 5.5452, 2: 5.5, 3: 5.4, 4: 5.3, 5: 5.2}
    assert (judge.parameter_hash(OUTPUT), judge.parameter_hash("")) == ("0a1b", None)


def test_losses_of_equal_steps_are_compared() -> None:
    assert judge.largest_difference({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.5}) == 0.5
    assert judge.largest_difference({1: 2.0}, {1: 2.0, 2: 1.5}) == float("inf")
    assert judge.largest_difference({}, {}) == float("inf"), "nothing was trained"


def kernel(ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "ts": ts, "dur": dur}


@pytest.mark.parametrize(
    ("events", "want"),
    [
        pytest.param([kernel(0, 40), kernel(50, 50)], 0.1, id="a gap"),
        pytest.param([kernel(0, 60), kernel(10, 20, "gpu_memcpy"), kernel(60, 40)], 0.0, id="streams overlap"),
        pytest.param(
            [kernel(50, 50), kernel(0, 40), kernel(40, 10, "cpu_op")], 0.1, id="the host's work does not count"
        ),
        pytest.param([kernel(0, 1, "cpu_op")], None, id="no work of a GPU"),
    ],
)
def test_idle_share_of_a_trace(events: list[dict[str, Any]], want: float | None) -> None:
    assert judge.idle_share(events) == want


def step(ms: float, copies: int, **more: Any) -> dict[str, Any]:
    return {"ms": ms, "copies": copies, "bytes": 1_500_000_000, **more}


def test_steps_beside_a_copy_are_compared_with_the_others() -> None:
    """The first copy allocates: it is not counted. The second one costs 20 ms in its step, and 10 ms in the next one."""
    steps = [
        step(100, 0),
        step(900, 1),
        step(100, 1),
        step(100, 1),
        step(120, 2),
        step(110, 2),
        step(100, 2),
        step(100, 2),
    ]
    assert judge.waits_ms(steps) == [30]
    (row,) = state.cost(context(H200), "snapshot", steps)
    assert (row.holds, row.value) == (True, 20.0)
    often = [(100, 0), (900, 1), (100, 1), (120, 2), (120, 2), (100, 2), (120, 3), (120, 3), (100, 3)]
    assert judge.waits_ms([step(*one) for one in often]) == [40, 40], "most steps are beside a copy"
    with pytest.raises(BenchError, match="no snapshot was taken"):
        state.cost(context(H200), "snapshot", steps[:4])


@pytest.mark.parametrize(
    ("at", "bits", "took_s", "want"),
    [
        pytest.param(7, 70, 2.9, [True, True], id="as wanted"),
        pytest.param(7, 71, 2.9, [False, True], id="other bits"),
        pytest.param(0, 10, 2.9, [False, True], id="it began anew"),
        pytest.param(7, 70, 3.1, [True, False], id="late"),
    ],
)
def test_verdicts_about_continuing(at: int, bits: int, took_s: float, want: list[bool]) -> None:
    def event(name: str, pid: int, t: float, **more: Any) -> dict[str, Any]:
        return {"event": name, "pid": pid, "t": t, **more}

    events = [
        event("before", 1, 1.0, step=0, hash=10, bytes=10),
        event("step", 1, 2.0, step=7, hash=70, bytes=1.485e9),
        event("step", 1, 3.0, step=8, hash=80, bytes=1.485e9),
        event("session", 2, 10.0),
        event("before", 2, 10.0 + took_s, step=at, hash=bits, bytes=1.485e9),
    ]
    assert [row.holds for row in state.continued(context(H200), "snapshot", events, 1, 2)] == want


# --- the table and its end


def report(tmp_path: Path, shown: list[str]) -> Report:
    return Report(H200, tmp_path / "gpu.json", "2026-11-27T00:00:00Z", "abc", shown.append)


@pytest.mark.parametrize(
    ("holds", "want"),
    [
        pytest.param([True, True], True, id="all hold"),
        pytest.param([True, None], True, id="what is not judged does not fail"),
        pytest.param([True, False], False, id="one fails"),
        pytest.param([None, None], False, id="nothing was judged"),
    ],
)
def test_the_report_holds_if_all_that_was_judged_does(tmp_path: Path, holds: list[bool | None], want: bool) -> None:
    shown: list[str] = []
    made = report(tmp_path, shown)
    made.part("kills")
    for i, one in enumerate(holds):
        made.add("kills", Row(f"row {i}", "0.3 s", "at most 0.3 s", one))
    made.add("kills", Row("a figure", "1"))
    made.end_part("kills", 3.0)
    saved = json.loads(made.path.read_text())
    assert made.holds is saved["holds"] is want
    assert saved["parts"]["kills"][-1]["verdict"] == ""
    assert saved["machine"]["gpus"] == ["NVIDIA H200"]
    assert ("row 1" in made.last_line()) == (holds[1] is False)


def test_the_table_grows_and_keeps_its_columns(tmp_path: Path) -> None:
    shown: list[str] = []
    made = report(tmp_path, shown)
    made.part("kills")
    made.add("kills", Row("a" * 60, "found", "aim", True))
    assert len(shown) == 2
    assert all(len(line) <= 150 for text in shown for line in text.splitlines())
    assert shown[-1].splitlines()[0].endswith("holds")


# --- bounds


def test_what_is_left_of_the_whole_bounds_a_part() -> None:
    part = Part("kills", "", 100, lambda *_: None)
    assert command.bound_s(part, left_s=300, is_gpu=True) == 100
    assert command.bound_s(part, left_s=30, is_gpu=True) == 30
    assert command.bound_s(part, left_s=-1, is_gpu=True) <= 0
    assert command.bound_s(part, left_s=30, is_gpu=False) == 500, "a dry run has patience"
    assert command.WHOLE_S == 480


def test_a_part_for_which_no_time_is_left_is_said_to_be_not_run(tmp_path: Path) -> None:
    made = report(tmp_path, [])
    times = iter([0.0, command.WHOLE_S + 1])
    command.run_all([Part("kills", "", 100, lambda *_: None)], H200, tmp_path, made, lambda: next(times))
    assert made.failed() == ["kills: kills"]
    assert not made.holds


HANGS = "setsid sleep 600 & echo $!; "
"""Of a shell: starts a process of a session of its own, and prints its id."""


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    lines: list[str] = []
    ended = run_bounded(
        ["sh", "-c", HANGS + "wait"], os.environ, mark="a part", bound_s=0.5, log=tmp_path / "log", on_line=lines.append
    )
    assert (ended.code, ended.is_clean) == (None, True)
    assert not is_alive(int(lines[0]))


def test_a_part_that_leaves_a_process_does_not_wait_for_it(tmp_path: Path) -> None:
    lines: list[str] = []
    ended = run_bounded(
        ["sh", "-c", HANGS + "echo last"],
        os.environ,
        mark="leaves",
        bound_s=100,
        log=tmp_path / "log",
        on_line=lines.append,
    )
    assert (ended.code, ended.is_clean, lines[1:]) == (0, True, ["last"])
    assert ended.took_s < 60
    assert not is_alive(int(lines[0]))


def test_only_processes_with_the_mark_are_ended() -> None:
    sleep = ["sleep", "600"]
    with (
        subprocess.Popen(sleep, env={**os.environ, "BENCH_TEST": "one"}) as one,
        subprocess.Popen(sleep, env={**os.environ, "BENCH_TEST": "two"}) as two,
    ):
        try:
            assert end_leftovers("BENCH_TEST", "one")
            assert one.wait(10) == -9
            assert two.poll() is None
        finally:
            two.kill()


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        pytest.param(Ended(0, 1.0, True), None, id="it ended by itself"),
        pytest.param(Ended(None, 9.0, True), "ended by its bound of 9 s", id="by its bound"),
        pytest.param(Ended(1, 1.0, True), "exit code 1: ZeroDivisionError", id="it raised"),
        pytest.param(Ended(0, 1.0, False), "could not be ended", id="something is left"),
    ],
)
def test_how_a_part_ended_is_a_row(tmp_path: Path, ended: Ended, said: str | None) -> None:
    log = tmp_path / "part.log"
    log.write_text("Traceback\nZeroDivisionError\n")
    row = command.row_at_end(PARTS[0], ended, 9, log)
    assert (row is None) == (said is None)
    assert row is None or (said in row.found and row.holds is False)  # type: ignore[operator]


# --- what is fetched


def fat_binary(*entries: tuple[int, bytes]) -> bytes:
    """Return a container with an entry for each architecture and its code."""
    body = b"".join(struct.pack("<HHIQIIII", 2, 0, 32, len(code), 0, 0, 0, arch) + code for arch, code in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_pruning_empties_other_architectures_and_moves_nothing() -> None:
    noise = b"\x50\xed\x55\xba and no container"
    code = bytearray(
        b"ELF" + noise + fat_binary((80, b"a" * 64), (90, b"b" * 64)) + b"end" + fat_binary((100, b"c" * 32))
    )
    size = len(code)
    assert prepare.prune(code, [90]) == {80: 64, 90: 64, 100: 32}
    assert len(code) == size
    assert b"b" * 64 in code
    assert b"aa" not in code
    assert b"cc" not in code
    assert bytes(code).startswith(b"ELF" + noise)
    assert bytes(code[-4:]) == bytes(4)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LIBRARY", "PACKED_LIBRARY"):
        monkeypatch.setattr(prepare, name, tmp_path / getattr(prepare, name).name)
    monkeypatch.setattr(prepare, "CACHE", tmp_path)
    return tmp_path


def test_what_was_fetched_is_unpacked_where_it_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(target: Path, _python: str, *packages: str) -> None:
        place = target / ("nvidia/nccl/lib" if prepare.NCCL in packages else "aiohttp")
        place.mkdir(parents=True)
        (place / "libnccl.so.2").write_bytes(fat_binary((80, b"a" * 64), (90, b"b" * 64)))

    assert (prepare.library(), prepare.site("3.12")) == (None, None)
    monkeypatch.setattr(prepare, "fetch", fetch)
    prepare.prepare_library([90])
    prepare.prepare_site("3.12")
    assert sorted(path.name for path in cache.iterdir()) == ["libnccl.so.2.xz", "site-3.12.tar.xz"]
    found, site = prepare.library(), prepare.site("3.12")
    assert found is not None
    assert site is not None
    assert found.read_bytes() == fat_binary((80, bytes(64)), (90, b"b" * 64))
    assert (site / "aiohttp").is_dir()
    assert prepare.site("3.13") is None, "machine code of another Python does not load"
    with pytest.raises(BenchError, match=r"no device code for \[75\]; it has \[80, 90\]"):
        prepare.prepare_library([75])
    assert prepare.library() == found, "what could not be made changes nothing"


def test_fetched_packages_are_used_only_where_some_are_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before the installed ones in the path, so they would replace those of another version."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    site = cache / f"site-{sys.version_info.major}.{sys.version_info.minor}"
    (site / "only_fetched").mkdir(parents=True)
    assert machine.packages() == ""
    monkeypatch.setattr(machine, "PACKAGES", {"only_fetched": "only-fetched"})
    assert machine.packages() == str(site)
    assert str(site) in replace(CPU, site=str(site)).environment(1)["PYTHONPATH"]
    assert str(site) not in CPU.environment(1)["PYTHONPATH"]


# --- the dry run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dry_run_of_some_parts_holds(tmp_path: Path) -> None:
    """Speeds are not judged on a CPU; all else holds. Takes less than a minute on two idle cores."""
    only = [word for name in ("environment", "forms", "exact", "kills", "scale") for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--out", str(tmp_path / "gpu"), *only],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["parts"]) == ["environment", "forms", "exact", "kills", "scale"]
    verdicts = {row["verdict"] for rows in found["parts"].values() for row in rows if row["aim"]}
    assert verdicts == {"holds", "not judged on a CPU"}
    assert "none fails" in done.stdout
