"""The objects of a submitted job: the operator accepts them, and the pod finds the files as they were."""

from __future__ import annotations

import base64
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regroup_client.errors import SubmitError
from regroup_client.submission import CODE_DIR, COPY, SOURCE_DIR, Choices, Objects, job_name, objects
from regroup_operator.api import parse_job

FILES = {"train.py": b"print('hi')\n", "pkg/a.py": b"A = 1\n"}


def made(files: dict[str, bytes] = FILES, **choices: Any) -> Objects:
    given: dict[str, Any] = {"name": "train", "image": "torch", "script": "train.py"}
    return objects(Choices(**(given | choices)), files)


def trainer(found: Objects) -> dict[str, Any]:
    container: dict[str, Any] = found.job["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"workers": 2, "most": 4, "gpus": 2, "cpu": "2", "memory": "4Gi"},
        {"workers": 3, "least": 2, "framework": "JAX", "namespace": "team-a"},
        {"checkpoint": "new:5Gi", "user": 1000, "data": ["images:/data", "images:/more:ro"], "env": {"A": "B"}},
        {"checkpoint": "mine", "env_from": ["keys"], "arguments": ["--lr", "0.1"]},
    ],
    ids=str,
)
def test_operator_accepts_the_job(choices: dict[str, Any]) -> None:
    job = parse_job(copy.deepcopy(made(**choices).job))
    assert job.spec.replicas == choices.get("workers", 1)


def test_all_choices_are_in_the_job() -> None:
    found = made(
        workers=2,
        most=4,
        gpus=2,
        memory="4Gi",
        data=["d:/x", "d:/y:ro", "e:/z"],
        env={"A": "$(B)"},
        arguments=["$$1", "$2"],
    )
    spec, container = found.job["spec"], trainer(found)
    assert spec["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 4}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2, "memory": "4Gi"}}
    assert container["env"] == [{"name": "A", "value": "$$(B)"}]
    assert container["args"] == ["$$$$1", "$2"]
    assert [(one["name"], one["mountPath"], one.get("readOnly", False)) for one in container["volumeMounts"]] == [
        ("code", "/code", False),
        ("data-0", "/x", False),
        ("data-0", "/y", True),
        ("data-1", "/z", False),
    ]
    (init,) = spec["template"]["spec"]["initContainers"]
    assert init["resources"] == {"limits": {"memory": "4Gi"}}, "copying needs no GPU"


@pytest.mark.parametrize(
    ("choices", "mode"),
    [({}, "ReadWriteOnce"), ({"workers": 2}, "ReadWriteMany"), ({"most": 3}, "ReadWriteMany")],
    ids=["alone", "several", "several later"],
)
def test_new_claim_is_one_that_all_workers_can_write(choices: dict[str, Any], mode: str) -> None:
    found = made(checkpoint="new:5Gi", **choices)
    (claim,) = found.others
    assert claim["metadata"]["name"] == found.new_claim == "train-checkpoints"
    assert claim["spec"] == {"accessModes": [mode], "resources": {"requests": {"storage": "5Gi"}}}
    assert found.job["spec"]["checkpoint"] == {"volumeClaim": "train-checkpoints"}


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"name": "Train"}, "--name (Train)"),
        ({"script": "gone.py"}, "gitignore names it"),
        ({"workers": 0}, "--workers (0) is less than 1"),
        ({"workers": 5, "most": 4}, "--workers (5) is more than --max (4)"),
        ({"least": 2}, "--workers (1) is less than --min (2)"),
        ({"gpus": -1}, "--gpus (-1)"),
        ({"env": {"A-B ": ""}}, "--env (A-B )"),
        ({"data": ["images"]}, "--data (images) is not CLAIM:PATH"),
        ({"data": ["images:data"]}, "--data (images:data)"),
        ({"data": ["images:/code/x"]}, "mounts /code/x, where the submitted files are"),
        ({"data": ["images:/data:rw"]}, "is not CLAIM:PATH"),
        ({"checkpoint": "new:"}, "has no size after new:"),
        ({"checkpoint": "new:5 GB"}, "has no size after new:"),
        ({"checkpoint": "My Claim"}, "neither the name of a claim nor new:SIZE"),
    ],
    ids=str,
)
def test_wrong_choice_is_one_sentence(choices: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SubmitError) as refused:
        made(**choices)
    assert sentence in str(refused.value)


def test_other_files_have_another_name_and_equal_ones_the_same() -> None:
    def name(files: dict[str, bytes]) -> str:
        return str(made(files).code[0]["metadata"]["name"])

    assert name(FILES) == name(dict(reversed(FILES.items())))
    assert len({name(FILES), name({**FILES, "pkg/a.py": b"A = 2\n"}), name({**FILES, "pkg/b.py": b""})}) == 3


def test_pod_finds_the_files_as_they_were(tmp_path: Path) -> None:
    files = {
        "train.py": b"x\n",
        "a/b.py": b"1",
        "a__b.py": b"2",
        "a/b c.py": b"3",
        ".hidden": b"4",
        "data.bin": b"\x00\xff",
        "dos.py": b"a\r\n",
        "escape.txt": b"\x1b[1m",
        "umlaut-\xc3\xa4.txt".encode("latin-1").decode(): "ä".encode(),
    }
    found = made(files)
    code, pod = found.code[0], found.job["spec"]["template"]["spec"]
    content = {key: text.encode() for key, text in code["data"].items()}
    content |= {key: base64.b64decode(text) for key, text in code["binaryData"].items()}
    # As the kubelet does it: the files in a directory of their own, and links to it.
    volume = tmp_path / "volume" / "..2026"
    for item in pod["volumes"][0]["configMap"]["items"]:
        (volume / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        (volume / item["path"]).write_bytes(content[item["key"]])
    (volume.parent / "..data").symlink_to(volume.name)
    for entry in list(volume.iterdir()):
        (volume.parent / entry.name).symlink_to(f"..data/{entry.name}")
    there = tmp_path / "code"
    there.mkdir()
    program = COPY.replace(SOURCE_DIR, str(volume.parent)).replace(CODE_DIR, str(there))
    subprocess.run([sys.executable, "-I", "-c", program], check=True)
    assert {
        path.relative_to(there).as_posix(): path.read_bytes() for path in there.rglob("*") if path.is_file()
    } == files
    assert not any(path.is_symlink() for path in there.rglob("*"))


@pytest.mark.parametrize(
    ("script", "name"),
    [("train", "train"), ("Train_GPT2", "train-gpt2"), ("2nd", "job-2nd"), ("___", "job"), ("x" * 60, "x" * 45)],
)
def test_job_is_called_as_its_script(script: str, name: str) -> None:
    assert job_name(script) == name
