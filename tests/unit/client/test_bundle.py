"""The files that travel with a job, in directories as users have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from regroup_client import bundle
from regroup_client.errors import SubmitError


def write(top: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


@pytest.mark.parametrize(
    ("files", "travels"),
    [
        pytest.param({"train.py": "", "pkg/a.py": "", "data.bin": "x"}, "data.bin pkg/a.py train.py", id="all files"),
        pytest.param(
            {".gitignore": "*.pt\n/out/\n", "a.pt": "", "out/x": "", "b/out/x": ""}, ".gitignore b/out/x", id="ignored"
        ),
        pytest.param({".gitignore": "*.txt\n!keep.txt", "a.txt": "", "keep.txt": ""}, ".gitignore keep.txt", id="kept"),
        pytest.param({"p/.gitignore": "x", "p/x": "", "x": ""}, "p/.gitignore x", id="a .gitignore below holds below"),
        pytest.param(
            {".gitignore": "*.log", "p/.gitignore": "!a.log", "p/a.log": "", "b.log": ""},
            ".gitignore p/.gitignore p/a.log",
            id="the nearest .gitignore decides",
        ),
        pytest.param({".git/config": "", "__pycache__/a": "", "a.py": ""}, "a.py", id="git and caches stay"),
        pytest.param({"venv/pyvenv.cfg": "", "venv/lib/x.py": "", "a.py": ""}, "a.py", id="environments stay"),
        pytest.param(
            {".gitignore": ".env", ".env": "KEY=1", "a.py": ""}, ".gitignore a.py", id="an ignored .env stays"
        ),
        pytest.param({".env.example": "KEY=", "a.py": ""}, ".env.example a.py", id="an example is no secret"),
    ],
)
def test_directory_without_what_gitignore_names(tmp_path: Path, files: Mapping[str, str], travels: str) -> None:
    assert sorted(bundle.directory_files(write(tmp_path, files))) == travels.split()


@pytest.mark.parametrize(("is_repository", "travels"), [(True, ["a.py"]), (False, ["a.ckpt", "a.py"])])
def test_gitignore_above_the_directory_holds_in_a_repository(
    tmp_path: Path, is_repository: bool, travels: list[str]
) -> None:
    write(
        tmp_path, {".gitignore": "*", "repo/.gitignore": "*.ckpt", "repo/src/deep/a.ckpt": "", "repo/src/deep/a.py": ""}
    )
    if is_repository:
        (tmp_path / "repo" / ".git").mkdir()
    assert sorted(bundle.directory_files(tmp_path / "repo" / "src" / "deep")) == travels


@pytest.mark.parametrize("name", [".env", "conf/.env", ".env.local", "id_rsa", ".netrc"])
def test_secret_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SubmitError, match=r"may hold secrets.*--env-from"):
        bundle.directory_files(write(tmp_path, {"a.py": "", name: "KEY=1"}))


@pytest.mark.parametrize(
    ("script", "beside", "refused"),
    [
        pytest.param("import model", "model.py", "model", id="import"),
        pytest.param("from model import Net", "model/__init__.py", "model", id="from a package"),
        pytest.param("def f():\n    import model.net", "model.py", "model", id="in a function"),
        pytest.param("import torch, os", "model.py", "", id="what is installed"),
        pytest.param("from train import x", "other.py", "", id="itself"),
        pytest.param("print 'old'", "print.py", "", id="no Python 3"),
    ],
)
def test_script_that_imports_a_module_beside_it_is_refused(
    tmp_path: Path, script: str, beside: str, refused: str
) -> None:
    write(tmp_path, {"train.py": script, beside: ""})
    if not refused:
        assert bundle.script_files(tmp_path / "train.py") == {"train.py": script.encode()}
        return
    with pytest.raises(SubmitError, match=f"imports {refused}.*--directory"):
        bundle.script_files(tmp_path / "train.py")


def test_more_than_a_config_map_holds_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", "b/big": "x" * 500_000, "c": "x" * 600_000})
    with pytest.raises(
        SubmitError, match=r"1074 KiB, and at most 900 KiB travel; the largest is c \(585 KiB\).*--data"
    ):
        bundle.directory_files(tmp_path)
    (tmp_path / "c").write_text("x" * 1_000_000)
    with pytest.raises(SubmitError, match=r"/c has 976 KiB"):
        bundle.directory_files(tmp_path)


def test_more_files_than_a_template_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {f"f{number}": "" for number in range(bundle.MAX_FILES)})
    assert len(bundle.directory_files(tmp_path)) == bundle.MAX_FILES
    write(tmp_path, {"one-more": ""})
    with pytest.raises(SubmitError, match=f"{bundle.MAX_FILES + 1} files"):
        bundle.directory_files(tmp_path)


def test_links_travel_only_as_files_of_the_directory(tmp_path: Path) -> None:
    top = write(tmp_path / "top", {"a.py": "A"})
    (top / "b.py").symlink_to("a.py")
    assert bundle.directory_files(top)["b.py"] == b"A"
    (tmp_path / "outside").write_text("secret")
    (top / "c.py").symlink_to("../outside")
    with pytest.raises(SubmitError, match="is a link to"):
        bundle.directory_files(top)


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="cannot be read"):
        bundle.script_files(tmp_path / "none")
    with pytest.raises(SubmitError, match="none is not there"):
        bundle.directory_files(tmp_path / "none")


def test_path_of_the_script_below_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"code/pkg/train.py": "", "other.py": ""})
    monkeypatch.chdir(tmp_path)
    for given in ("code/pkg/train.py", "pkg/train.py", str(tmp_path / "code/pkg/train.py")):
        assert bundle.path_in(Path("code"), Path(given)) == "pkg/train.py"
    with pytest.raises(SubmitError, match="not in the directory"):
        bundle.path_in(Path("code"), Path("other.py"))
