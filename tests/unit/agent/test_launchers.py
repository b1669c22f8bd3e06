"""Commands of launchers: the table of their options, our reading against the real parsers, and what becomes of a command."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from _regroup_agent.group_hook_files import source_of
from _regroup_agent.launch import program, translator
from _regroup_agent.launch.command import LaunchError, python_command
from regroup.protocol import env
from regroup.protocol.launchers import (
    IGNORED,
    MAPPED,
    OPTIONS,
    REFUSED,
    LauncherError,
    expand,
    hidden,
    read,
    recognise,
    shortened,
)

RANDOM_COMMANDS = 100


def parser_of(launcher: str) -> argparse.ArgumentParser:
    """Return the launcher's own parser; skips the test where the launcher is not installed."""
    if launcher == "torchrun":
        from torch.distributed import run

        return run.get_args_parser()
    module = {"accelerate": "accelerate.commands.launch", "deepspeed": "deepspeed.launcher.runner"}[launcher]
    real: Any = pytest.importorskip(module, reason=f"`make test-frameworks` has {launcher}")
    if launcher == "accelerate":
        found: argparse.ArgumentParser = real.launch_command_parser()
        return found
    kept: list[argparse.ArgumentParser] = []
    before = argparse.ArgumentParser.parse_args

    def keep(parser: argparse.ArgumentParser, *args: Any, **given: Any) -> Any:
        kept.append(parser)
        return before(parser, *args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", keep)
        real.parse_args(["x"])
    return kept[0]


REAL = ("torchrun", "accelerate", "deepspeed")


@pytest.mark.parametrize("launcher", REAL)
def test_table_has_every_option_of_the_real_parser(launcher: str) -> None:
    table = {name: option for option in OPTIONS[launcher] for name in option.names}
    for action in parser_of(launcher)._actions:
        for name in action.option_strings:
            assert name in table, f"{launcher} {name} is missing in regroup/protocol/launcher_options.py"
            assert table[name].takes == (0 if action.nargs == 0 else 1), name
            assert len(set(action.option_strings) - set(table[name].names)) == 0, name


def test_every_option_says_what_becomes_of_it() -> None:
    for launcher, options in OPTIONS.items():
        names = [name for option in options for name in option.names]
        assert len(names) == len(set(names)), launcher
        for option in options:
            assert option.effect in (MAPPED, IGNORED, REFUSED)
            assert option.says.endswith("."), option
            assert option.effect == MAPPED or not option.counts


# --- our reading against the real parsers ----------------------------------------------------------------------------


def _spelled(rng: random.Random, name: str, value: str) -> list[str]:
    if name.startswith("--") and rng.random() < 0.5:
        return [f"{name}={value}"]
    return [name, value]


def _value(action: argparse.Action, rng: random.Random) -> str:
    if action.choices:
        return str(rng.choice(list(action.choices)))
    kind = getattr(action.type, "__name__", "")
    by_dest = {"nproc_per_node": ["1", "4", "gpu", "auto"], "nnodes": ["1", "3", "1:4"], "num_processes": ["6", "12"],
               "num_machines": ["1", "2", "3"]}  # fmt: skip
    if action.dest in by_dest:
        return rng.choice(by_dest[action.dest])
    return {"int": "3", "float": "0.5", "bool": "True", "str_to_bool": "true", "<lambda>": "true"}.get(
        kind, rng.choice(["a", "x=1", "b c"])
    )


def command_line(parser: argparse.ArgumentParser, launcher: str, rng: random.Random) -> list[str]:
    """Return a random command line of options that are not refused, in one of their spellings, and a program with arguments."""
    table = {name: option for option in OPTIONS[launcher] for name in option.names}
    usable = [a for a in parser._actions if a.option_strings and table[a.option_strings[0]].effect != REFUSED]
    counts = [a for a in usable if table[a.option_strings[0]].counts]
    words = []
    for action in [*rng.sample(usable, rng.randint(0, 5)), *rng.sample(counts, rng.randint(0, len(counts)))]:
        name = rng.choice(action.option_strings)
        words += [name] if action.nargs == 0 else _spelled(rng, name, _value(action, rng))
    return [
        *words,
        rng.choice(["train.py", "/a/b.py"]),
        *rng.choice([[], ["--lr", "1"], ["--nnodes", "9", "-m"]]),
    ]


@pytest.mark.parametrize("launcher", REAL)
def test_a_hundred_command_lines_are_read_as_the_real_parser_reads_them(launcher: str) -> None:
    parser, rng = parser_of(launcher), random.Random(31)
    start = ["accelerate", "launch"] if launcher == "accelerate" else [launcher]
    names = {"torchrun": ("training_script", "training_script_args", "nproc_per_node"),
             "accelerate": ("training_script", "training_script_args", "num_processes"),
             "deepspeed": ("user_script", "user_args", "num_gpus")}[launcher]  # fmt: skip
    for _ in range(RANDOM_COMMANDS):
        words = command_line(parser, launcher, rng)
        args = vars(parser.parse_args(words))
        try:
            ours = read([*start, *words], {})
        except LauncherError as error:
            if "is no multiple" in str(error):  # accelerate itself rounds down in silence
                continue
            raise
        assert ours is not None
        assert list(ours.program) == [args[names[0]], *args[names[1]]], words
        asked = args[names[2]]
        if launcher == "torchrun":
            given = any(
                w.partition("=")[0] in ("--nproc-per-node", "--nproc_per_node") for w in words[: -len(ours.program)]
            )
            assert ours.counts.processes == ((int(asked) if asked.isdecimal() else asked) if given else None), words
            nodes = args["nnodes"].split(":")
            if ours.counts.workers is not None:
                assert ours.counts.workers == (int(nodes[0]), int(nodes[-1])), words
        elif launcher == "accelerate":
            assert ours.counts.processes == (None if asked is None else asked // (args["num_machines"] or 1)), words
            assert ours.counts.workers == (None if args["num_machines"] is None else (args["num_machines"],) * 2), words
        else:
            assert ours.counts.processes == (None if asked < 0 else asked), words
            assert ours.counts.workers == (None if args["num_nodes"] < 0 else (args["num_nodes"],) * 2), words


@pytest.mark.parametrize(
    ("command", "launcher", "words", "counts"),
    [
        ("torchrun --standalone --nproc-per-node=gpu train.py", "torchrun", "train.py", ("gpu", None, None)),
        ("torchrun --nproc 2 train.py --nnodes 3", "torchrun", "train.py --nnodes 3", (2, None, None)),
        ("/opt/bin/torchrun -r3 -t 3 --nnodes 1:4 -m pkg.train", "torchrun", "pkg.train", (None, None, (1, 4))),
        ("env A=b torchrun train.py", "torchrun", "train.py", (None, None, None)),
        ("python -u -m torch.distributed.run --nnodes=2 t.py", "torchrun", "t.py", (None, None, (2, 2))),
        ("python3.11 -m torch.distributed.launch --use-env t.py", "torchrun", "t.py", (None, None, None)),
        ("python /opt/bin/torchrun t.py", "torchrun", "t.py", (None, None, None)),
        ("accelerate launch --num-processes 4 --num_machines 2 t.py", "accelerate", "t.py", (2, None, (2, 2))),
        ("accelerate-launch --cpu t.py", "accelerate", "t.py", (None, None, None)),
        ("python -m accelerate.commands.launch --config_file a.yaml t.py", "accelerate", "t.py", (None, None, None)),
        ("deepspeed --num_gpus 8 --num_nodes -1 t.py --deepspeed", "deepspeed", "t.py --deepspeed", (8, None, None)),
        ("horovodrun -np 4 -H a:2,b:2 python t.py", "horovodrun", "python t.py", (None, 4, None)),
        ("horovodrun -np 4 --min-np 2 --max-np 8 --slots-per-host 2 --host-discovery-script d.sh python t.py",
         "horovodrun", "python t.py", (2, None, (1, 4))),
        ("mpirun --allow-run-as-root -np 2 --mca btl_tcp_if_include eth0 -x A=b python t.py", "mpirun", "python t.py",
         (None, 2, None)),
        ("mpiexec -n 4 -ppn 2 -genv A b ./train", "mpirun", "./train", (2, 4, None)),
        ("mpirun --map-by ppr:2:node --bind-to none -N 2 python -m pkg", "mpirun", "python -m pkg", (2, None, None)),
    ],
)  # fmt: skip
def test_commands_of_documentation_are_read(
    command: str, launcher: str, words: str, counts: tuple[int | str | None, int | None, tuple[int, int] | None]
) -> None:
    found = read(command.split(), {})
    assert found is not None
    assert (found.launcher, " ".join(found.program)) == (launcher, words)
    assert (found.counts.processes, found.counts.total, found.counts.workers) == counts


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("torchrun --foo 1 t.py", "the option --foo, which Regroup does not know"),
        ("torchrun --virtual-local-rank t.py", "is refused"),
        ("torchrun --nproc-per-node 0 t.py", "is no number from 1 to 999999999"),
        (f"torchrun --nproc-per-node {'9' * 5000} t.py", "99... in the command is no number from 1 to 999999999"),
        (f"torchrun --nnodes 1:{'9' * 5000} t.py", "99... in the command is no number and no range"),
        (f"deepspeed --num_gpus {'9' * 5000} t.py", "is no number from 1"),
        (f"accelerate launch --num_processes {'9' * 10} t.py", "is no number from 1"),
        (f"mpirun -np {'9' * 5000} t.py", "is no number from 1"),
        (f"horovodrun -np {'9' * 5000} t.py", "is no number from 1"),
        ("torchrun --nnodes 4:1 t.py", "no number and no range"),
        ("torchrun --nnodes", "has no value"),
        ("torchrun --standalone=1 t.py", "takes no value"),
        ("torchrun --nproc-per-node 2", "without a program"),
        ("accelerate launch --num_process 2 t.py", "does not know"),
        ("accelerate launch --tpu t.py", "does not train on TPUs"),
        ("accelerate launch --num_processes 3 --num_machines 2 t.py", "no multiple of --num_machines"),
        ("deepspeed --include localhost:0 t.py", "The container's limit of GPUs"),
        ("mpirun -np 1 python a.py : -np 1 python b.py", "several programs"),
        ("mpirun -wdir /x python a.py", "Set workingDir"),
        ("horovodrun --check-build", "trains nothing"),
    ],
)
def test_command_that_cannot_be_translated_gets_a_sentence(command: str, sentence: str) -> None:
    with pytest.raises(LauncherError) as refused:
        read(command.split(), {})
    assert sentence in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    "command",
    ["python train.py", "accelerate config", "env", "python -m torch", "./torchrun.py a", "sh -c true", "",
     "python -X", "python -m", "python -c torchrun", "python -", "python -X dev train.py torchrun",
     "sh -c 'pip install deepspeed && python ddp.py'", "bash -c 'python ddp.py --strategy deepspeed --epochs 3'",
     "bash -c 'echo \"now; torchrun a\"'", "bash -c 'A=torchrun python t.py deepspeed x'", "bash run.sh torchrun",
     "nice python ddp.py --strategy deepspeed 1", "nice -n 5 python t.py deepspeed", "numactl -N 0 ./train deepspeed 1",
     "env A=b python t.py torchrun", "nice train torchrun x", "conda run -n deepspeed python t.py",
     "nohup bash -c 'python t.py deepspeed'"],
)  # fmt: skip
def test_other_commands_are_no_launchers(command: str) -> None:
    assert recognise(shlex.split(command)) is None
    assert hidden(shlex.split(command)) is None


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("sh -c 'torchrun t.py'", "torchrun"),
        ("bash -lc 'pip install x && torchrun t.py'", "torchrun"),
        ("bash -eo pipefail -c 'torchrun t.py' sh", "torchrun"),
        ("bash -c 'cd /a; exec torchrun t.py'", "torchrun"),
        ("bash -c '(A=\"b c\" /opt/bin/deepspeed t.py) | tee log'", "deepspeed"),
        ("bash -c 'false || env A=b accelerate launch t.py'", "accelerate"),
        ("bash -c 'if true; then mpirun -np 2 t.py; fi'", "mpirun"),
        ("bash -c 'set -e\ntorchrun \\\n --nnodes 2 t.py'", "torchrun"),
        ("bash -c '# it'\"'\"'s\ntorchrun t.py'", "torchrun"),
        ("bash -c 'python -u -mtorch.distributed.run t.py'", "torchrun"),
        ("bash -c 'nohup torchrun t.py &'", "torchrun"),
        ("nohup bash -c 'torchrun t.py'", "torchrun"),
        ("nice -n 5 torchrun t.py", "torchrun"),
        ("timeout -s KILL 2h torchrun t.py", "torchrun"),
        ("numactl --cpunodebind=0 python -X dev -m torch.distributed.run t.py", "torchrun"),
        ("taskset ff torchrun t.py", "torchrun"),
        ("env -u A B=c torchrun t.py", "torchrun"),
        ("sudo -E nice deepspeed t.py", "deepspeed"),
        ("conda run -n train torchrun t.py", "torchrun"),
        ("uv run --with x accelerate launch t.py", "accelerate"),
        ("tini -- torchrun t.py", "torchrun"),
    ],
)
def test_launcher_that_a_shell_or_a_wrapper_starts_gets_a_sentence(command: str, launcher: str) -> None:
    why = hidden(shlex.split(command))
    assert why is not None
    assert why.startswith(f"The command starts {launcher} from ")
    assert ", t.py" in why


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        ("python -X dev -m torch.distributed.run", "-X dev"),
        ("python -Xdev -m torch.distributed.run", "-X dev"),
        ("python -mtorch.distributed.run", ""),
        ("python -W ignore -m torch.distributed.run", "-W ignore"),
        ("python -Om torch.distributed.run", "-O"),
        ("python -u -m torch.distributed.run", ""),
        ("python -uOOBmtorch.distributed.run", "-OOB"),
        ("python -I -E -s -m torch.distributed.run", ""),
        ("python -uW error -X faulthandler /opt/bin/torchrun", "-W error -X faulthandler"),
        ("env A=b python -X dev -m deepspeed.launcher.runner", "-X dev"),
        ("python -Om accelerate.commands.accelerate_cli launch", "-O"),
    ],
)
def test_options_of_python_before_a_launcher_reach_the_program(start: str, kept: str) -> None:
    found = read([*start.split(), "t.py", "-x"], {})
    assert found is not None
    want = ["python", "-u", *kept.split(), "t.py"]
    assert program.program_of(found, "python", SAID).command[: len(want)] == tuple(want)
    assert list(program.guess(found, "python")) == [*want, "-x"]


def test_variables_count_as_in_the_launcher_and_in_the_kubelet() -> None:
    by_pet = read(["torchrun", "t.py"], {"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2"})
    assert by_pet is not None
    assert (by_pet.counts.processes, by_pet.counts.workers) == (4, (2, 2))
    expanded = read(["torchrun", "--nproc-per-node", "$(N)", "t.py", "$(M)"], {"N": "3"})
    assert expanded is not None
    assert (expanded.counts.processes, expanded.program) == (3, ("t.py", "$(M)"))
    unknown = read(["torchrun", "--nproc-per-node", "$(N)", "t.py"], {"PET_NPROC_PER_NODE": "4"})
    assert unknown is not None
    assert unknown.counts.processes is None, "only the pod knows"
    assert expand("$$(N) $(N)", {"N": "3"}) == "$(N) 3"


@pytest.mark.parametrize(
    "command",
    ["torchrun --nproc-per-node 2 --nnodes 1:4 --rdzv-id secret t.py --token x", "mpirun -np 4 -x TOKEN=x python t.py",
     "accelerate launch --num_processes 4 --num_machines 2 --config_file x t.py", "deepspeed --num_gpus 2 t.py",
     "horovodrun -np 4 --slots-per-host 2 python t.py"],
)  # fmt: skip
def test_shortened_command_has_the_same_counts_and_nothing_else(command: str) -> None:
    kept = shortened(command.split(), {})
    mine, theirs = read(command.split(), {}), read(kept, {})
    assert mine is not None
    assert theirs is not None
    assert theirs.counts == mine.counts
    assert not {"x", "secret", "TOKEN=x", "--token"} & set(kept)
    assert shortened(["torchrun", "t.py"], {"PET_NNODES": "3"}) == ["torchrun", "--nnodes", "3", "train.py"]
    assert shortened(["python", "t.py", "secret"], {}) == ["python"]


# --- what becomes of a command ---------------------------------------------------------------------------------------


def answer(command: str, **environ: str) -> dict[str, Any]:
    """Return what the launcher's own parser says, in a process of its own as in a pod."""
    found = recognise(shlex.split(command))
    assert found is not None
    request = json.dumps({"launcher": found.launcher, "arguments": list(found.arguments), "module": found.module})
    argv = [sys.executable, "-c", source_of("launch/own_parser.py"), request]
    output = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, check=True).stdout
    return translator.read_answer(found.launcher, output)


def translated(command: str, said: dict[str, Any]) -> program.Program:
    found = read(shlex.split(command), {})
    assert found is not None
    return program.program_of(found, "python", said)


def test_torchruns_own_parser_is_asked() -> None:
    said = answer("torchrun --nproc-per-node 2 --nnodes 1:3 -m pkg.train --lr 1")
    assert said == {"program": "pkg.train", "args": ["--lr", "1"], "module": True, "no_python": False, "processes": "2",
                    "workers": [1, 3]}  # fmt: skip
    plain = answer("torchrun train.py")
    assert (plain["processes"], plain["workers"]) == (None, None), "a default is no word"
    assert answer("torchrun train.py", PET_NPROC_PER_NODE="3")["processes"] == "3"
    assert "invalid int value" in answer("torchrun --max-restarts x t.py")["refused"]
    assert answer("python -m torch.distributed.launch --use-env t.py")["program"] == "t.py"


def test_accelerates_own_code_makes_the_environment(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="`make test-frameworks` has accelerate")
    home = {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = answer("accelerate launch --num_processes 4 --num_machines 2 --mixed_precision no t.py --lr 1", **home)
    assert (said["program"], said["args"], said["processes"], said["workers"]) == ("t.py", ["--lr", "1"], "2", [2, 2])
    assert said["environ"]["ACCELERATE_MIXED_PRECISION"] == "no"
    if not importlib.import_module("torch").cuda.is_available():
        assert said["environ"]["ACCELERATE_USE_CPU"] == "true", "else each rank trains alone"
    config = tmp_path / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_machines: 1\n"
        "num_processes: 8\nuse_cpu: false\ndebug: false\n"
    )
    said = answer(f"accelerate launch --config_file {config} t.py", **home)
    assert (said["processes"], said["workers"]) == ("8", None)
    assert "refused" in answer("accelerate launch --cpu --multi_gpu t.py", **home)


def test_deepspeeds_own_parser_is_asked() -> None:
    pytest.importorskip("deepspeed", reason="`make test-frameworks` has deepspeed")
    said = answer("deepspeed --num_gpus 2 t.py --deepspeed")
    assert (said["program"], said["args"], said["processes"], said["workers"]) == ("t.py", ["--deepspeed"], "2", None)


def test_launcher_that_is_not_installed_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("raise ImportError('none here')")
    said = answer("accelerate launch t.py", PYTHONPATH=str(tmp_path))
    assert "accelerate cannot be imported by" in said["refused"]


SAID = {"program": "t.py", "args": ["-x"], "module": False, "no_python": False}


@pytest.mark.parametrize(
    ("command", "changed", "want"),
    [
        ("torchrun t.py -x", {}, ["python", "-u", "t.py", "-x"]),
        ("torchrun -m t.py -x", {"module": True}, ["python", "-u", "-m", "t.py", "-x"]),
        ("torchrun --no-python t.py -x", {"no_python": True}, ["t.py", "-x"]),
        ("python -m torch.distributed.launch t.py -x", {}, ["python", "-u", "t.py", "--local-rank=1", "-x"]),
        ("deepspeed t.py -x", {}, ["python", "-u", "t.py", "--local_rank=1", "-x"]),
        ("deepspeed --module t.py -x", {"module": True}, ["python", "-u", "-m", "t.py", "--local_rank=1", "-x"]),
        ("deepspeed --no_python t.py -x", {"no_python": True}, ["t.py", "--local_rank=1", "-x"]),
        (
            "python -X dev -m torch.distributed.launch t.py -x",
            {},
            ["python", "-u", "-X", "dev", "t.py", "--local-rank=1", "-x"],
        ),
        ("deepspeed --no_local_rank t.py -x", {}, ["python", "-u", "t.py", "-x"]),
    ],
)
def test_command_of_a_process(command: str, changed: dict[str, Any], want: list[str]) -> None:
    assert translated(command, {**SAID, **changed}).command_of(1) == want
    found = read(command.split(), {})
    assert found is not None
    ours = program.guess(found, "python")
    assert list(ours) == [word for word in want if not word.startswith("--local")], "the table agrees with the launcher"


def test_environment_of_a_process_keeps_regroups_ranks_and_adds_the_launchers() -> None:
    said = {**SAID, "environ": {"MASTER_PORT": "29500", "RANK": "0", "ACCELERATE_MIXED_PRECISION": "bf16", "A": "1"}}
    ours = {env.RANK: "3", env.MASTER_PORT: "7", env.LOCAL_WORLD_SIZE: "2", "A": "0"}
    assert translated("accelerate launch t.py", said).environ_of(ours) == {
        **ours, "ACCELERATE_MIXED_PRECISION": "bf16", "A": "1", "LOCAL_SIZE": "2",
    }  # fmt: skip
    found = read(["env", "B=2", "mpirun", "-np", "4", "-x", "C=3", "-x", "D", "python", "t.py"], {})
    assert found is not None
    of_mpi = program.program_of_table(found).environ_of({env.RANK: "1", env.WORLD_SIZE: "4", env.LOCAL_RANK: "0"})
    assert (of_mpi["B"], of_mpi["C"], of_mpi.get("D")) == ("2", "3", None)
    assert (of_mpi["OMPI_COMM_WORLD_RANK"], of_mpi["OMPI_COMM_WORLD_SIZE"]) == ("1", "4")
    found = read(
        ["horovodrun", "-np", "2", "--no-stall-check", "--stall-check-warning-time-seconds", "7", "python", "t.py"], {}
    )
    assert found is not None
    of_horovod = program.program_of_table(found).environ
    assert of_horovod == {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}
    assert not list(found.ignored())


@pytest.mark.parametrize(
    ("said", "environ", "part"),
    [
        ({"processes": "2"}, {env.PROCESSES: "2"}, None),
        ({"processes": "8"}, {env.PROCESSES: "2"}, "Set spec.processesPerWorker to 8"),
        ({"processes": "9" * 5000}, {env.PROCESSES: "2"}, "asks for 99999999999999999999 processes"),
        ({"processes": "gpu"}, {env.PROCESSES: "2"}, None),
        ({"processes": None, "workers": None}, {env.PROCESSES: "2"}, None),
        ({"workers": [1, 4]}, {env.PROCESSES: "2", env.MAX_WORLD_SIZE: "8"}, None),
        ({"workers": [2, 2]}, {env.PROCESSES: "2", env.MAX_WORLD_SIZE: "8"}, "has at most 4"),
    ],
)
def test_counts_that_only_the_pod_knows_are_compared_there(
    said: dict[str, Any], environ: dict[str, str], part: str | None
) -> None:
    found = program.contradiction("torchrun", said, environ)
    assert (found is None) == (part is None)
    assert part is None or part in str(found)


@pytest.mark.parametrize(
    ("launcher", "source", "size", "refused"),
    [
        ("mpirun", "from mpi4py import MPI", "2", True),
        ("horovodrun", "import torch\n  import horovod.torch as hvd", "4", False),
        ("mpirun", "import mpi4py", "1", False),
        ("mpirun", "import torch", "4", False),
        ("torchrun", "import mpi4py", "4", False),
    ],
)
def test_program_that_needs_mpi_ends_with_a_sentence(launcher: str, source: str, size: str, refused: bool) -> None:
    assert (program.needs_mpi(launcher, source, {env.MAX_WORLD_SIZE: size}) is not None) is refused


@pytest.mark.parametrize(
    ("head", "want"),
    [
        ("#!/opt/venv/bin/python3.11\nimport x", "/opt/venv/bin/python3.11"),
        ("#!/usr/bin/env python3\n", "python3"),
        ("#!/bin/sh\n'''exec' '/a long/path/bin/python' \"$0\" \"$@\"\n' '''\n", "/a long/path/bin/python"),
        ("#!/bin/sh\nexec something\n", "{bin}/python3"),
    ],
)
def test_interpreter_is_the_launchers(head: str, want: str, tmp_path: Path) -> None:
    for name, text in (("torchrun", head), ("python3", "")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    assert program.interpreter(["torchrun"], str(tmp_path)) == want.format(bin=tmp_path)
    assert program.interpreter(["/x/python", "-m", "torch.distributed.run"], None) == "/x/python"


def test_command_of_the_guess_can_be_forked_by_a_zygote() -> None:
    found = read(["torchrun", "-m", "pkg", "--x"], {})
    assert found is not None
    python = python_command(program.guess(found, "/p/python"))
    assert python is not None
    assert (python.module, python.args) == ("pkg", ("--x",))


def test_given_options_that_are_ignored() -> None:
    found = read(["torchrun", "--max-restarts", "3", "--nproc-per-node", "2", "t.py"], {})
    assert found is not None
    assert [(option.names[0], option.says) for option in found.ignored()] == [
        ("--max-restarts", "spec.recovery.maxRestarts and spec.recovery.windowSeconds bound restarts.")
    ]


def _exec_only(test: Callable[..., Any], python: str) -> Any:
    found = recognise(["torchrun", "t.py"])
    assert found is not None

    async def fork(*_: Any) -> None:
        return None

    return asyncio.run(translator.answer_of(found, python, {"PATH": os.environ["PATH"]}, fork, test))


@pytest.mark.parametrize(
    ("python", "part"),
    [
        ("/nowhere/python", "cannot be started"),
        ("/bin/true", "did not say how it reads the command (it wrote nothing)"),
    ],
)
def test_parser_that_does_not_answer_ends_with_a_sentence(python: str, part: str) -> None:
    adopted: list[Any] = []
    with pytest.raises(LaunchError) as refused:
        _exec_only(adopted.append, python)
    assert part in str(refused.value)
    for popen in adopted:
        popen.wait()


def test_mark_of_the_answer_is_one() -> None:
    assert f'MARK = "{translator.MARK.decode()}"' in source_of("launch/own_parser.py")


@pytest.mark.parametrize(
    ("command", "environ", "want"),
    [
        ("accelerate launch t.py", {}, "1"),
        ("accelerate launch t.py", {"OMP_NUM_THREADS": "4"}, "4"),
        ("env OMP_NUM_THREADS=3 accelerate launch t.py", {"OMP_NUM_THREADS": "4"}, "3"),
        ("accelerate launch --num_cpu_threads_per_process 2 t.py", {"OMP_NUM_THREADS": "4"}, "2"),
        ("torchrun t.py", {}, None),
    ],
)
def test_zygote_imports_with_the_threads_that_the_launcher_will_set(
    command: str, environ: dict[str, str], want: str | None
) -> None:
    found = read(command.split(), environ)
    assert found is not None
    assert program.zygote_env(found, environ).get("OMP_NUM_THREADS") == want


@pytest.mark.parametrize(
    ("path", "want"), [("/x", "/lib:/x"), ("/lib:/x", "/lib:/x"), (None, None)], ids=["without", "with", "not set"]
)
def test_path_that_a_command_sets_keeps_the_library(path: str | None, want: str | None) -> None:
    given = program.Program(("python", "t.py"), {} if path is None else {"PYTHONPATH": path})
    assert program.with_library(given, "/lib").environ.get("PYTHONPATH") == want
    assert program.with_library(given, "").environ == given.environ, "no library was brought"
