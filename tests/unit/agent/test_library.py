"""The library that the agent brings: whole in the zipapp, unpacked once, found behind the user's packages by every interpreter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
from pathlib import Path

import pytest

from _regroup_agent.build import build
from _regroup_agent.library import unpack
from regroup.protocol import RELEASE
from tests.unit.agent.python39 import oldest_python

ROOT = Path(__file__).parents[3]
WHERE = "import regroup; print(regroup.__file__)"
SENTENCE = (
    "`import regroup` gives {path}, which is not Regroup's library. The library comes with the pod, behind the packages of the "
    "image: rename that module, or remove the package."
)


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("agent") / "agent.pyz"
    build(target)
    return target


class Image:
    """A directory with packages of the user, and the library that the agent has brought."""

    def __init__(self, directory: Path, zipapp: Path) -> None:
        self.packages = directory / "packages"
        self.packages.mkdir()
        self.hook = unpack(str(zipapp), directory / "library", pytest.fail)
        self.library = directory / "library" / "packages" / "regroup" / "__init__.py"
        self.environ = {"PATH": os.environ["PATH"]}

    def put(self, name: str, text: str) -> Path:
        """Write a module of the user's packages and return its path."""
        path = self.packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, code: str, *options: str) -> str:
        """Return what an interpreter prints for this code; `-S` keeps the packages of the running one out."""
        environ = {**self.environ, "PYTHONPATH": f"{self.hook}{os.pathsep}{self.packages}"}
        # The base interpreter: its site-packages have nothing of ours.
        python = getattr(sys, "_base_executable", sys.executable)
        command = [python, *options, "-c", code]
        done = subprocess.run(command, env=environ, cwd=self.packages.parent, capture_output=True, text=True)
        return (done.stdout + done.stderr).strip()


@pytest.fixture
def image(tmp_path: Path, zipapp: Path) -> Image:
    return Image(tmp_path, zipapp)


# --- the archive ---------------------------------------------------------------------------------------------------


def test_zipapp_has_the_whole_library_of_one_release(zipapp: Path) -> None:
    with zipfile.ZipFile(zipapp) as archive:
        names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT / "trainer-image")) for path in (ROOT / "trainer-image/regroup").rglob("*.py")}
    assert sources <= names
    assert {"_regroup_agent/main.py", "_regroup_agent/library_hook.py", "__main__.py"} <= names
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == RELEASE


def test_library_is_unpacked_once_and_anew_for_another_release(tmp_path: Path, zipapp: Path) -> None:
    directory = tmp_path / "library"
    assert unpack(str(zipapp), directory, pytest.fail) == str(directory / "hook")
    kept = directory / "packages" / "compiled"
    kept.touch()
    unpack(str(zipapp), directory, pytest.fail)
    assert kept.exists(), "what Python has compiled is lost when the container starts again"
    (directory / "digest").write_text("of another release")
    (tmp_path / "library.new").mkdir()
    unpack(str(zipapp), directory, pytest.fail)
    assert not kept.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library"]


def test_state_directory_that_cannot_be_written_is_said_and_brings_nothing(tmp_path: Path, zipapp: Path) -> None:
    (tmp_path / "state").touch()
    said: list[str] = []
    assert unpack(str(zipapp), tmp_path / "state" / "library", said.append) == ""
    (sentence,) = said
    assert sentence.endswith("(Not a directory); `import regroup` finds the library only where the image has it.")


# --- who wins ------------------------------------------------------------------------------------------------------


def test_library_is_found_where_the_image_has_none(image: Image) -> None:
    assert image.run(WHERE) == str(image.library)
    assert image.run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHERE!r}])") == str(image.library)
    assert image.run("import regroup.protocol.wire as w; print(w.__name__)") == "regroup.protocol.wire"


def test_installed_library_wins_wherever_it_is_on_the_path(image: Image, tmp_path: Path) -> None:
    late = tmp_path / "late"
    (late / "regroup" / "protocol").mkdir(parents=True)
    (late / "regroup" / "protocol" / "__init__.py").touch()
    theirs = late / "regroup" / "__init__.py"
    theirs.write_text("")
    assert image.run(f"import sys; sys.path.append({str(late)!r}); {WHERE}") == str(theirs)


def test_directory_without_init_is_no_package_that_somebody_installed(image: Image) -> None:
    image.put("regroup/notes.txt", "a clone of the repository, in the working directory")
    assert image.run(WHERE) == str(image.library)


def test_path_and_environment_have_nothing_but_the_hook(image: Image) -> None:
    code = "import json, os, sys; print(json.dumps([sys.path, os.environ['PYTHONPATH']]))"
    path, python_path = json.loads(image.run(code))
    assert not [entry for entry in path if "library" in entry]
    assert python_path == f"{image.hook}{os.pathsep}{image.packages}", "children would not find the library"


def test_users_sitecustomize_runs_in_every_interpreter(image: Image) -> None:
    image.put("sitecustomize.py", "print('theirs', __name__, __file__)")
    once = f"theirs sitecustomize {image.packages / 'sitecustomize.py'}"
    child = "import subprocess, sys; sys.stdout.flush(); subprocess.run([sys.executable, '-c', 'pass'])"
    assert image.run(child) == f"{once}\n{once}"


def test_sitecustomize_of_the_user_that_fails_costs_no_library(image: Image) -> None:
    image.put("sitecustomize.py", "raise RuntimeError('theirs')")
    assert image.run(WHERE).startswith(f"{image.library}\nError in sitecustomize")


def test_isolated_interpreter_has_no_library(image: Image) -> None:
    assert image.run(WHERE, "-I").endswith("No module named 'regroup'")


def test_hook_runs_under_the_oldest_python(image: Image) -> None:
    environ = {**image.environ, "PYTHONPATH": image.hook}
    done = subprocess.run([oldest_python(), "-c", WHERE], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == str(image.library), done.stderr


# --- a module of that name which is not the library -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["regroup.py", "regroup/__init__.py"])
def test_foreign_module_is_named_when_a_name_of_the_library_is_missed(image: Image, name: str) -> None:
    path = image.put(name, "theirs = 1")
    assert image.run("import regroup; regroup.session").endswith("AttributeError: " + SENTENCE.format(path=path))


def test_part_that_a_foreign_package_lacks_is_refused_with_the_sentence(image: Image) -> None:
    path = image.put("regroup/__init__.py", "")
    assert image.run("import regroup.train").endswith("ModuleNotFoundError: " + SENTENCE.format(path=path))
    assert image.run("import regroup.nothing").endswith("ModuleNotFoundError: No module named 'regroup.nothing'")


def test_program_that_means_the_foreign_module_runs_undisturbed(image: Image) -> None:
    image.put("regroup.py", "theirs = 1\ndef __getattr__(name):\n    return name")
    code = "import regroup; print(regroup.theirs, regroup.lazy); from regroup import theirs"
    assert image.run(code) == "1 lazy"
    image.put("regroup.py", "theirs = 1")
    assert image.run("import regroup; print(hasattr(regroup, 'other'), regroup.theirs)") == "False 1"


def test_agent_hears_of_a_foreign_module(image: Image, tmp_path: Path) -> None:
    path = image.put("regroup.py", "")
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "s"))
        agent.listen()

        def answer() -> None:
            connection, _ = agent.accept()
            with connection:
                heard.append(connection.recv(1 << 16))

        agent.settimeout(30)
        thread = threading.Thread(target=answer)
        thread.start()
        image.environ |= {"REGROUP_SOCKET": str(tmp_path / "s"), "LOCAL_RANK": "1", "REGROUP_INCARNATION": "7"}
        image.run("from regroup import session")
        thread.join()
    message = {"type": "cannotRun", "localRank": 1, "incarnation": 7, "message": SENTENCE.format(path=path)}
    assert json.loads(heard[0]) == message


# --- the name of Horovod ---------------------------------------------------------------------------------------------


def test_library_takes_the_name_of_horovod_only_where_the_job_says_so(image: Image) -> None:
    image.put("horovod/__init__.py", "")
    where = "import horovod; print(horovod.__file__)"
    assert image.run(where) == str(image.packages / "horovod" / "__init__.py")
    image.environ["REGROUP_HOROVOD"] = "1"
    assert image.run(where).startswith(str(image.library.parent / "horovod" / "as_horovod")), "an installed one lost"
    assert "Regroup has Horovod's API for PyTorch only" in image.run("import horovod.tensorflow")


@pytest.mark.parametrize(
    ("package", "words"),
    [
        pytest.param("regroup/__init__.py", "which is not Regroup's library", id="foreign"),
        pytest.param("regroup/protocol/__init__.py", "has no part for it", id="older"),
    ],
)
def test_installed_horovod_is_not_used_where_the_library_lacks_its_api(image: Image, package: str, words: str) -> None:
    image.put("horovod/__init__.py", "")
    image.put("regroup/__init__.py", "")
    image.put(package, "")
    image.environ["REGROUP_HOROVOD"] = "1"
    said = image.run("import horovod; print('trains alone')")
    assert words in said
    assert "trains alone" not in said
