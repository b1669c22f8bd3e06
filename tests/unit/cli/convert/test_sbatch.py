"""Scripts for sbatch: options, lines, and the command behind srun."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_cli.convert import shell
from regroup_cli.convert.documents import Converted, Options, convert, read_documents
from regroup_cli.convert.findings import Verdict
from regroup_operator.api import SpecError


def converted(*options: str, body: str = "srun torchrun train.py", image: str | None = "train:1") -> Converted:
    text = "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), body])
    (found,) = convert(read_documents(text, "train.sbatch"), Options(image=image))
    return found


def spec_of(*options: str, **more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = converted(*options, **more).document["spec"]
    return spec


@pytest.mark.parametrize(
    ("options", "replicas", "limits", "requests"),
    [
        (["--nodes=3", "--gpus-per-node=2"], 3, {"nvidia.com/gpu": 2}, {}),
        (["-N3", "--gres=gpu:h100:4"], 3, {"nvidia.com/gpu": 4}, {}),
        (["-N 2", "--gres gpu"], 2, {"nvidia.com/gpu": 1}, {}),
        (["--nodes 2", "--gpus=8"], 2, {"nvidia.com/gpu": 4}, {}),
        (["--gpus-per-task=1 --ntasks-per-node=4"], 1, {"nvidia.com/gpu": 4}, {}),
        (["-c 4", "--ntasks-per-node=2", "--mem=0"], 1, {}, {"cpu": 8}),
        (["--mem=1G"], 1, {"memory": "1Gi"}, {"memory": "1Gi"}),
        (["--mem-per-cpu=500", "-c 4"], 1, {"memory": "2000Mi"}, {"memory": "2000Mi", "cpu": 4}),
        (["--nodes=2-4"], 2, {}, {}),
    ],
)
def test_sizes(options: list[str], replicas: int, limits: dict[str, Any], requests: dict[str, Any]) -> None:
    spec = spec_of(*options)
    resources = spec["template"]["spec"]["containers"][0].get("resources") or {}
    assert spec["replicas"] == replicas
    assert resources == {name: value for name, value in (("limits", limits), ("requests", requests)) if value}


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("1:30", 90), ("02:00:00", 7200), ("1-0", 86_400), ("2-12", 216_000), ("1-00:30", 88_200), ("UNLIMITED", None)],
)  # fmt: skip
def test_time_limit(time: str, seconds: int | None) -> None:
    policy = spec_of(f"--time={time}").get("runPolicy") or {}
    assert policy.get("activeDeadlineSeconds") == seconds


@pytest.mark.parametrize(
    ("signal", "wanted"),
    [
        ("USR1@120", {"signal": "SIGUSR1", "seconds": 120}),
        ("B:SIGTERM@900", {"signal": "SIGTERM", "seconds": 300}),
        ("INT", {"signal": "SIGINT", "seconds": 60}),
        ("KILL@60", None),
    ],
)
def test_signal_before_the_end_is_a_graceful_stop(signal: str, wanted: dict[str, Any] | None) -> None:
    found = converted(f"--signal={signal}")
    assert (found.document["spec"].get("recovery") or {}).get("gracefulStop") == wanted
    (verdict,) = [one.verdict for one in found.findings if "--signal" in one.path]
    assert verdict is (Verdict.CHANGED if wanted else Verdict.DROPPED)


@pytest.mark.parametrize(
    ("body", "command", "processes"),
    [
        pytest.param("srun python train.py", ["python", "train.py"], 4, id="a process for each task"),
        pytest.param(
            "srun torchrun --nnodes $SLURM_NNODES --node_rank=$SLURM_NODEID --rdzv_endpoint $H:1 t.py",
            ["torchrun", "--nnodes", "2", "t.py"],
            None,
            id="torchrun with its rendezvous",
        ),
        pytest.param(
            "torchrun --nproc_per_node=${SLURM_GPUS_ON_NODE:-8} t.py --lr '0.1'",
            ["torchrun", "--nproc_per_node=8", "t.py", "--lr", "0.1"],
            None,
            id="without srun",
        ),
        pytest.param(
            "srun bash -c 'export RANK=$SLURM_PROCID; exec python t.py --n \"a b\"'",
            ["python", "t.py", "--n", "a b"],
            4,
            id="a shell for the ranks",
        ),
        pytest.param(
            'ARGS="--lr"\nsrun -u --cpu-bind=v -- accelerate launch --num_processes 8 --num_machines 2 t.py $ARGS 1',
            ["accelerate", "launch", "--num_processes", "8", "--num_machines", "2", "t.py", "--lr", "1"],
            None,
            id="accelerate and a variable of the script",
        ),
        pytest.param("python prepare.py\nsrun python t.py", ["python", "t.py"], 4, id="a program before"),
        pytest.param("srun -l nvidia-smi -L\nsrun python t.py", ["python", "t.py"], 4, id="a look at the GPUs before"),
        pytest.param(
            'A="--lr 0.1"\nE=\nsrun python t.py $A "$A" $E "$E" --a=$A',
            ["python", "t.py", "--lr", "0.1", "--lr 0.1", "", "--a=--lr", "0.1"],
            4,
            id="values are split outside of quotes",
        ),
        pytest.param(
            'L="torchrun --nproc_per_node 8"\nsrun $L t.py',
            ["torchrun", "--nproc_per_node", "8", "t.py"],
            None,
            id="a launcher in a variable",
        ),
        pytest.param("LR=1 srun python t.py $LR", ["python", "t.py", "1"], 4, id="a variable before srun"),
        pytest.param("python t.py > log 2>&1 &\nwait", ["python", "t.py"], 4, id="redirections and background"),
        pytest.param(
            "srun bash -c 'python t.py data/*.bin'",
            ["bash", "-c", "python t.py data/*.bin"],
            4,
            id="a shell for its patterns",
        ),
        pytest.param(
            "srun python t.py '~/a' \"{a,b}\" \\*.bin a~b",
            ["python", "t.py", "~/a", "{a,b}", "*.bin", "a~b"],
            4,
            id="quoted",
        ),
        pytest.param(
            "HOME=/h\nsrun python ~/t.py --in=~", ["python", "/h/t.py", "--in=~"], 4, id="a home that is known"
        ),
    ],
)
def test_command(body: str, command: list[str], processes: int | None) -> None:
    spec = spec_of("--nodes=2", "--ntasks-per-node=4", body=body)
    assert spec["template"]["spec"]["containers"][0]["command"] == command
    assert spec.get("processesPerWorker") == processes


@pytest.mark.parametrize(
    ("line", "verdict", "env"),
    [
        ("export A=1", Verdict.MAPPED, [{"name": "A", "value": "1"}]),
        ("export A=$SLURM_NNODES", Verdict.MAPPED, [{"name": "A", "value": "1"}]),
        ("export A=$(date)", Verdict.DROPPED, None),
        ("export MASTER_PORT=29500", Verdict.UNNEEDED, None),
        ("head=$(scontrol show hostnames | head -n1)\nexport ADDR=$head", Verdict.UNNEEDED, None),
        ("module load cuda", Verdict.DROPPED, None),
        ("conda activate env", Verdict.DROPPED, None),
        ("echo start", Verdict.UNNEEDED, None),
        ("cp a b", Verdict.DROPPED, None),
        ("for i in 1 2; do cp $i b; done", Verdict.DROPPED, None),
        ("cd /src", Verdict.MAPPED, None),
        ("cd ~/src", Verdict.DROPPED, None),
        ("export A=~/data", Verdict.DROPPED, None),
        ("export A=/a:~/data", Verdict.DROPPED, None),
        ("export A=~alice/data", Verdict.DROPPED, None),
        ("export A=/a:'~/data'", Verdict.MAPPED, [{"name": "A", "value": "/a:~/data"}]),
        ("cp *.py b", Verdict.DROPPED, None),
    ],
)
def test_every_line_has_a_finding(line: str, verdict: Verdict, env: list[dict[str, str]] | None) -> None:
    found = converted(body=f"{line}\nsrun torchrun train.py")
    fates = {
        one.verdict for one in found.findings if one.path.startswith(("line 2 ", "line 3 ")) and "srun" not in one.path
    }
    assert fates == {verdict}
    assert found.document["spec"]["template"]["spec"]["containers"][0].get("env") == env


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("echo nothing", "No line starts the program"),
        ("srun torchrun a.py\nsrun torchrun b.py", "starts a second program"),
        ("for i in 1 2; do\nsrun torchrun a.py\ndone", "in a loop or a condition"),
        ("srun torchrun train.py $HOME", "uses \\$HOME, which only a shell"),
        ("srun python ~/train.py", "uses \\$HOME, which only a shell"),
        ("srun python train.py ~alice/data", r"uses \$\(echo ~alice\), which only a shell"),
        ("srun python train.py --in shard-{0..7}.bin", r"has shard-\{0..7\}.bin, which a shell makes several words of"),
        ("python {a,b}.py", r"has \{a,b\}.py, which a shell makes several words of. Write these words"),
        ("cat <<EOF\na\nEOF", "here-document"),
        ("srun torchrun 'train.py", "opens a quote"),
        ("srun --ntasks=2", "no program behind srun"),
        ("#SBATCH hetjob\nsrun torchrun train.py", "nodes of several kinds"),
        ("#SBATCH -N2 --ntasks=7\nsrun python train.py", "ntasks=7\\) is no multiple of the 2 nodes"),
        ("#SBATCH -N2 --gpus=3\nsrun python train.py", "gpus=3\\) is no multiple of the 2 nodes"),
    ],
)
def test_a_script_that_cannot_be_converted_is_one_sentence(body: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        converted(body=body)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("data/*.bin", ["data/*.bin"]),
        ("--layers=[1,2] part-?", ["--layers=[1,2]", "part-?"]),
        ("--layers='[1,2]' \"$A\"'*' a\\?", []),
        ("${A[0]}", []),
        ("$F --in=${F}", ["$F (*.bin)", "$F (*.bin)"]),
        ("\"$F\" '$F' $A", []),
    ],
)
def test_patterns_for_files_are_passed_as_they_are_with_a_word_on_it(words: str, named: list[str]) -> None:
    """A shell, too, passes a pattern that fits no file, as of options that are lists."""
    found = converted(body=f"A=1\nF=*.bin\nsrun python train.py {words}".replace("${A[0]}", "${A:-[0]}"))
    notes = [one.sentence for one in found.findings if "A shell replaces" in one.sentence]
    assert len(notes) == bool(named)
    assert all(f"Regroup passes {', '.join(named)} as " in note for note in notes)


def test_image_is_that_of_the_command_line_or_of_pyxis() -> None:
    body = "srun --container-image=nvcr.io#nvidia/pytorch:25.10-py3 python train.py"
    assert (
        spec_of(body=body, image=None)["template"]["spec"]["containers"][0]["image"]
        == "nvcr.io/nvidia/pytorch:25.10-py3"
    )
    assert spec_of(body=body)["template"]["spec"]["containers"][0]["image"] == "train:1"
    with pytest.raises(SpecError, match="Give --image"):
        converted(image=None)


def test_job_is_named_after_the_option_or_the_file() -> None:
    assert converted().document["metadata"]["name"] == "train"
    assert converted("-J My_Job").document["metadata"]["name"] == "my-job"
    assert converted("--job-name=" + "x" * 60).document["metadata"]["name"] == "x" * 45


def test_an_option_without_a_rule_is_dropped() -> None:
    found = converted("--novel=3", "--hold")
    assert [one.path for one in found.findings if one.verdict is Verdict.DROPPED] == [
        "line 2 (#SBATCH --novel=3)", "line 3 (#SBATCH --hold)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b $c' \"d e\"", [("a", "b \ue000c", "d e")]),
        ("a # b\nc", [("a",), ("c",)]),
        ("a \\\n  b; c && d | e", [("a", "b"), ("c",), ("d",), ("e",)]),
        ('a=$(b "c" | d) e', [('a=$(b "c" | d)', "e")]),
        ("a > b 2>&1 < c d", [("a", "d")]),
        ("x=( $(a b) )", [("x=( $(a b) )",)]),
        ('a \\$b \\"', [("a", "\ue000b", '"')]),
        ("", []),
    ],
)
def test_simple_commands_of_a_shells_text(text: str, words: list[tuple[str, ...]]) -> None:
    assert [one.words for one in shell.commands(text)] == words


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (["--export=ALL,LR=0.1,SEED=3"], "srun python train.py"),
        (["--export=ALL,LR=0.1"], "srun --export=ALL,SEED=3 python train.py"),
        ([], 'srun bash -c "export LR=0.1 SEED=3; python train.py"'),
        ([], "LR=0.1 SEED=3 srun python train.py"),
    ],
)
def test_variables_reach_the_program_wherever_a_script_sets_them(options: list[str], body: str) -> None:
    (container,) = spec_of(*options, body=body)["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "LR", "value": "0.1"}, {"name": "SEED", "value": "3"}]


def test_option_that_stands_twice_and_words_behind_an_option_are_named() -> None:
    found = converted("--gres=gpu:2", "--gres=gpu:4", "--job-name 'my job' spare")
    fates = {one.path: one.verdict for one in found.findings}
    assert fates["line 2 (#SBATCH --gres=gpu:2)"] == Verdict.UNNEEDED
    assert fates["line 4 (#SBATCH ... spare)"] == Verdict.DROPPED
    assert found.document["metadata"]["name"] == "my-job"
    limits = found.document["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 4}
