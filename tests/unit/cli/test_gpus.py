"""GPUs are given out by slot, and a run with too few of them is refused before anything starts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from harness.polling import until
from regroup_cli.__main__ import main
from regroup_cli.gpus import Gpu, Shares, find, listed, share
from regroup_cli.local import LocalWorkers
from regroup_operator.api import SpecError
from tests.builders.plan import make_job

A, B = "GPU-5c1a3a52-7be1-4c32-b2a3-0d2f6b2f2a11", "GPU-e7f1b4d0-91aa-4f0e-8c1d-3a9b7c5d6e22"
MIG = "MIG-3f6b9e6c-1d0c-5b8e-9a44-6c1b2f8a7d33"
OF_MIG = "MIG-90a1d2c3-52e0-5f77-8d19-aa0b1c2d3e44"
FOUR = tuple(Gpu(f"GPU-{n}") for n in range(4))
SPLIT = (Gpu(A, (MIG, OF_MIG)), Gpu(B))

LISTED = f"""GPU 0: NVIDIA H200 (UUID: {A})
  MIG 1g.18gb     Device  0: (UUID: {MIG})
  MIG 1g.18gb     Device  1: (UUID: {OF_MIG})
GPU 1: NVIDIA H200 (UUID: {B})
"""


def shares(
    workers: int,
    most: int | None = None,
    processes: int = 1,
    found: tuple[Gpu, ...] = FOUR,
    choice: str = "auto",
    **environment: str,
) -> Shares:
    return share(
        workers=workers,
        most_workers=most or workers,
        processes=processes,
        choice=choice,
        found=found,
        environment=environment,
    )


@pytest.mark.parametrize(
    ("given", "want"),
    [
        pytest.param(shares(2), ["0", "1"], id="each worker one"),
        pytest.param(shares(2, processes=2), ["0,1", "2,3"], id="each process of a worker one"),
        pytest.param(shares(1, most=4), ["0", "1", "2", "3"], id="later slots, too"),
        pytest.param(shares(2, CUDA_VISIBLE_DEVICES="3,1,0"), ["3", "1"], id="the user's numbers, in the user's order"),
        pytest.param(shares(2, CUDA_VISIBLE_DEVICES=" 3 , 1 "), ["3", "1"], id="with blanks"),
        pytest.param(shares(1, CUDA_VISIBLE_DEVICES="2,-1,0"), ["2"], id="CUDA stops at a negative number"),
        pytest.param(shares(2, CUDA_VISIBLE_DEVICES=f"{B},{A}", found=(Gpu(A), Gpu(B))), [B, A], id="UUIDs"),
        pytest.param(shares(2, CUDA_VISIBLE_DEVICES=f"{MIG},{OF_MIG}", found=SPLIT), [MIG, OF_MIG], id="MIG devices"),
        pytest.param(shares(3, found=SPLIT), [MIG, OF_MIG, B], id="a GPU with MIG devices is those"),
        pytest.param(shares(2, CUDA_VISIBLE_DEVICES="0,1", found=()), ["0", "1"], id="GPUs that nobody lists"),
        pytest.param(shares(3, CUDA_VISIBLE_DEVICES=""), [None] * 3, id="empty: the CPU"),
        pytest.param(shares(3, CUDA_VISIBLE_DEVICES="-1"), [None] * 3, id="-1: the CPU"),
        pytest.param(shares(3, found=()), [None] * 3, id="no GPU: the CPU"),
        pytest.param(shares(9, choice="none"), [""] * 9, id="the script computes on the CPU"),
        pytest.param(
            shares(3, found=(Gpu(A),), NCCL_MULTI_RANK_GPU_ENABLE="1"), ["0", "0", "0"], id="ranks share the only one"
        ),
        pytest.param(
            shares(2, processes=3, found=FOUR, NCCL_MULTI_RANK_GPU_ENABLE="1"), ["0,1,2", "3,0,1"], id="ranks share four"
        ),
        pytest.param(
            shares(2, processes=2, found=(Gpu(A),), NCCL_MULTI_RANK_GPU_ENABLE="1"), ["0", "0"], id="no GPU twice in one"
        ),
    ],
)  # fmt: skip
def test_share(given: Shares, want: list[str | None]) -> None:
    got = [given.environment(slot).get("CUDA_VISIBLE_DEVICES") for slot in range(len(want))]
    assert got == want


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        pytest.param(
            {"workers": 5},
            "--workers (5) needs 5 GPUs, one for each process, and this machine has 4 GPUs. Lower --workers, or give --gpus none "
            "if the script computes on the CPU.",
            id="too few",
        ),
        pytest.param(
            {"workers": 2, "processes": 3},
            "--workers (2) with --processes-per-worker (3) needs 6 GPUs, one for each process, and this machine has 4 GPUs. Lower "
            "--workers or --processes-per-worker, or give --gpus none if the script computes on the CPU.",
            id="too few for the processes of each",
        ),
        pytest.param({"workers": 2, "most": 5}, "--max (5) needs 5 GPUs", id="too few to grow"),
        pytest.param({"workers": 2, "found": (Gpu(A),)}, "and this machine has 1 GPU. Lower", id="one"),
        pytest.param(
            {"workers": 2, "CUDA_VISIBLE_DEVICES": "3"}, "and CUDA_VISIBLE_DEVICES (3) names 1 GPU. Lower", id="the user's"
        ),
        pytest.param(
            {"workers": 1, "CUDA_VISIBLE_DEVICES": "4"}, "names GPU 4, and this machine has GPUs 0 to 3.", id="none of ours"
        ),
        pytest.param(
            {"workers": 1, "CUDA_VISIBLE_DEVICES": "0,0"}, "names GPU 0 twice, and CUDA then shows no GPU.", id="one twice"
        ),
        pytest.param({"workers": 1, "CUDA_VISIBLE_DEVICES": "cuda:0"}, "names 'cuda:0', which is neither", id="no name"),
        pytest.param(
            {"workers": 1, "processes": 2, "found": SPLIT}, "CUDA shows a process only one MIG device.", id="MIG devices"
        ),
    ],
)  # fmt: skip
def test_share_that_cannot_be_is_one_sentence(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        shares(**asked)  # type: ignore[arg-type]
    assert sentence in str(refused.value)


def test_no_gpu_goes_to_two_slots() -> None:
    for num_gpus in range(1, 7):
        for processes in range(1, 4):
            for most in range(1, num_gpus // processes + 1):
                given = shares(1, most, processes, tuple(Gpu(str(n)) for n in range(num_gpus)))
                taken = [given.environment(slot)["CUDA_VISIBLE_DEVICES"].split(",") for slot in range(most)]
                assert all(len(names) == processes for names in taken)
                assert len({name for names in taken for name in names}) == most * processes


def smi(directory: Path, text: str, code: int = 0) -> None:
    directory.mkdir(exist_ok=True)
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\ncat <<'END'\n{text}END\nexit {code}\n")
    program.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in front of everything else on PATH; no GPU is excluded by the environment."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "bin"


def test_gpus_that_nvidia_smi_lists(path: Path) -> None:
    smi(path, LISTED)
    assert find() == SPLIT
    assert listed("No devices found.\n") == ()


def test_gpus_of_a_container_without_nvidia_smi(path: Path, tmp_path: Path) -> None:
    """The driver names all GPUs of the node; the container has the device of one."""
    smi(path, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9)
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    dev.mkdir()
    (dev / "nvidia1").touch()
    assert find(proc, dev) == ()
    for bus, uuid, minor in (("0000:18:00.0", A, 0), ("0000:2a:00.0", B, 1)):
        (proc / bus).mkdir(parents=True)
        (proc / bus / "information").write_text(
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\nDevice Minor: \t {minor}\n"
        )
    assert find(proc, dev) == (Gpu(B),)


def test_run_with_too_few_gpus_ends_before_anything_starts(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(path, LISTED.splitlines(keepends=True)[-1])
    state = tmp_path / "state"
    assert main(["run", "--state-dir", str(state), "--workers", "2", "true"]) == 2
    assert capsys.readouterr().err.startswith(
        "regroup: --workers (2) needs 2 GPUs, one for each process, and this mach"
    )
    assert not state.exists()
    config = tmp_path / "cuda.yaml"
    config.write_text("task: digits\nglobal_batch: 64\nmicrobatch: 8\nsteps: 1\ndevice: cuda\n")
    assert main(["run", "--gpus", "none", str(config)]) == 2
    assert "device ('cuda') needs a GPU, and --gpus none hides them all." in capsys.readouterr().err


def test_slot_that_comes_back_takes_its_gpu_again(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import os, pathlib\n"
        "pathlib.Path(os.environ['REGROUP_STATE_DIR'], 'gpu').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    job = make_job().build()

    async def run() -> None:
        workers = LocalWorkers(tmp_path, agent, ["true"], os.environ, gpus=shares(2, processes=2))
        for slot, attempt in ((1, 0), (0, 0), (1, 1)):
            await workers.create(job, slot, attempt, ())
        ended = lambda: {pod.phase for pod in workers.list(job.key, job.uid)} == {"Succeeded"}  # noqa: E731
        await asyncio.to_thread(until, ended, "the agents end")
        pods = {(pod.slot, pod.attempt): pod.name for pod in workers.list(job.key, job.uid)}
        await workers.stop()
        assert {place: (tmp_path / name / "state" / "gpu").read_text() for place, name in pods.items()} == {
            (0, 0): "0,1", (1, 0): "2,3", (1, 1): "2,3",
        }  # fmt: skip

    asyncio.run(run())
