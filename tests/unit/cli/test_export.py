"""`regroup checkpoint export`: the file has every type's bits, appears whole or not at all, and a wrong input is one sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from regroup.checkpoint import Checkpointer
from regroup.checkpoint.checkpointer import Origin
from regroup.checkpoint.selection import ASIDE
from regroup.checkpoint.store import COMMIT
from regroup.protocol.state import StatePair
from regroup_cli import safetensors_file
from regroup_cli.__main__ import main

DISK = "cannot be written (No such file or directory). Check its directory, the owner and the free space."


def write(directory: Path, step: int, model: dict[str, Any], generation: int = 1) -> Path:
    """Write one checkpoint as a session does, and return its path."""
    checkpointer = Checkpointer(str(directory), 0.0, "job")
    tree = {"model": model, "optimizer": {"state": {}, "param_groups": []}, "parameters": [[]], "state": {}}
    assert checkpointer.save(tree, pair=StatePair(generation, step), origin=Origin(generation, "abcdefgh", 0, 0))
    assert checkpointer.wait(30)
    assert checkpointer.problem is None
    return directory / f"step-{step}.g{generation}-abcdefgh"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10 and 20 of generation 1, step 20 of generation 2, and half a checkpoint of step 30."""
    directory = tmp_path_factory.mktemp("saved")
    for step, generation in ((10, 1), (20, 1), (20, 2), (30, 2)):
        write(directory, step, {"weight": torch.full((100,), float(step + generation))}, generation)
    (directory / "step-30.g2-abcdefgh" / COMMIT).unlink()
    return directory


@pytest.mark.parametrize(
    ("inside", "options", "value"),
    [
        ("", (), 22.0),
        ("", ("--step", "10"), 11.0),
        ("step-20.g1-abcdefgh", (), 21.0),
        ("step-20.g1-abcdefgh", ("--step", "20"), 21.0),
    ],
    ids=["the newest", "of a step", "one itself", "one itself and its step"],
)
def test_the_checkpoint_that_was_meant(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str, options: tuple[str, ...], value: float
) -> None:
    to = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(saved / inside), "--to", str(to), *options]) == 0
    assert torch.equal(load_file(to)["weight"], torch.full((100,), value))
    with safe_open(to, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert opened.metadata()["checkpoint"] in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [to]


def test_every_type_and_shape_has_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "BATCH_BYTES", 5000)
    torch.manual_seed(1)
    values = (torch.randn(30, 21) * 50).abs()
    model: dict[str, Any] = {str(one).removeprefix("torch."): values.to(one) for one in safetensors_file.TYPES}
    model |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "turned": values.t(), "a.b": torch.ones(1)}
    model |= {"again": values, "extra": {"n": 3, "deep": torch.arange(7)}}
    write(tmp_path / "saved", 1, model)
    to = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--to", str(to)]) == 0
    got = load_file(to)
    deep = model.pop("extra")["deep"]
    assert torch.equal(got.pop("extra.deep"), deep)
    assert got.keys() == model.keys()
    for name, one in model.items():
        assert (got[name].dtype, got[name].shape) == (one.dtype, one.shape), name
        assert got[name].flatten().view(torch.uint8).equal(one.contiguous().flatten().view(torch.uint8)), name


def test_values_that_are_no_tensors_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "saved", 1, {"weight": torch.ones(3), "extra": {"n": 3, "m": None}})
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--to", str(tmp_path / "m")]) == 0
    assert "left out 2 values of the model's state_dict that are no tensors" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [[], [1], [3, 3, 3], [20, 1, 1], [4, 20, 4]])
def test_tensors_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Several tensors at once are within the bound; a larger tensor is read by itself."""
    monkeypatch.setattr(safetensors_file, "BATCH_BYTES", 8)
    tensors = {str(i): torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    batches = list(safetensors_file.batches(list(tensors), tensors))
    assert [name for batch in batches for name in batch] == list(tensors)
    assert all(len(batch) == 1 or sum(tensors[name].nbytes for name in batch) <= 8 for batch in batches)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{saved}", "--to", "{here}/there"], "--to ({here}/there) exists. Name another file, or delete this one."),
        (
            ["{saved}", "--to", "{here}/no/m"],
            "--to ({here}/no/m) is in no directory: {here}/no is none. Make it first.",
        ),
        (
            ["{saved}", "--to", "{here}/there/m"],
            "--to ({here}/there/m) is in no directory: {here}/there is none. Make it first.",
        ),
        (["{saved}", "--to", "/proc/m"], "--to (/proc/m) {disk}"),
        (
            ["{saved}", "--to", "{here}/m", "--optimizer", "{here}/m"],
            "--optimizer ({here}/m) is the file of --to. Name another one.",
        ),
        (
            ["{saved}", "--to", "{here}/m", "--optimizer", "{here}/there"],
            "--optimizer ({here}/there) exists. Name another file, or delete this one.",
        ),
        (["{saved}", "--to", "{here}/m", "--optimizer", "/proc/m"], "--optimizer (/proc/m) {disk}"),
        (["{saved}", "--to", "{here}/m", "--step", "7"], "--step (7) is the step of no checkpoint in {saved}. {all}"),
        (
            ["{saved}", "--to", "{here}/m", "--step", "30"],
            "--step (30) is the step of a checkpoint that is not complete in {saved}. {all}",
        ),
        (
            ["{saved}/step-30.g2-abcdefgh", "--to", "{here}/m"],
            "DIR ({saved}/step-30.g2-abcdefgh) is not a complete checkpoint. {all}",
        ),
        (
            ["{saved}/step-40.g2-abcdefgh", "--to", "{here}/m"],
            "DIR ({saved}/step-40.g2-abcdefgh) is not a complete checkpoint. {all}",
        ),
        (
            ["{saved}/step-20.g1-abcdefgh", "--to", "{here}/m", "--step", "10"],
            "--step (10) is the step of no checkpoint in {saved}. {all}",
        ),
        (
            ["{here}", "--to", "{here}/m"],
            "DIR ({here}) holds no checkpoint. `regroup checkpoint list {here}` shows all.",
        ),
        (
            ["{here}/no", "--to", "{here}/m"],
            "DIR ({here}/no) is not a directory. Give the directory of spec.checkpoint, or of --checkpoint.",
        ),
    ],
)
def test_wrong_input_is_one_sentence(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    (tmp_path / "there").write_text("mine")
    words = {"saved": saved, "here": tmp_path, "all": f"`regroup checkpoint list {saved}` shows all.", "disk": DISK}
    assert main(["checkpoint", "export", *(one.format(**words) for one in arguments)]) == 2
    assert capsys.readouterr() == ("", f"regroup: {sentence.format(**words)}\n")
    assert [file.name for file in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "mine"


def test_checkpoints_that_are_all_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "saved", 1, {}).rename(tmp_path / "saved" / f"{ASIDE}step-1.g1-abcdefgh")
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--to", str(tmp_path / "m")]) == 2
    assert f"DIR ({tmp_path}/saved) holds no complete checkpoint." in capsys.readouterr().err


def test_type_that_the_format_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "saved", 1, {"weight": torch.ones(3, dtype=torch.complex128)})
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--to", str(tmp_path / "m")]) == 2
    assert capsys.readouterr().err == (
        "regroup: weight is of the type torch.complex128, which safetensors has not. Load the checkpoint with torch instead.\n"
    )
    assert not (tmp_path / "m").exists()


def flip(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


def false_record(path: Path, file: Path, data: bytes) -> None:
    """Write data that cannot be read, and a record whose hashes hold for it."""
    file.write_bytes(data)
    record = json.loads((path / COMMIT).read_text())
    record["files"][file.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / COMMIT).write_text(json.dumps(record))


def false_index(path: Path) -> None:
    false_record(path, path / ".metadata", b"no index")


def false_tensor(path: Path) -> None:
    """Damage the archive of the tensor only. The structure, which is read before the export's file is begun, is in another one."""
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    end = data.index(torch.ones(1000).numpy().tobytes()) + 4000
    data[end : end + 800] = b"x" * 800
    false_record(path, file, bytes(data))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "is not what was committed (SHA-256 differs)."),
        (false_index, "cannot be read (UnpicklingError: "),
        (false_tensor, "cannot be read ("),
    ],
)
def test_damaged_checkpoint_is_one_sentence_and_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], why: str
) -> None:
    damage(write(tmp_path / "saved", 1, {"weight": torch.ones(1000)}))
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--to", str(tmp_path / "m")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("regroup: step-1.g1-abcdefgh cannot be exported: ")
    assert why in line
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
