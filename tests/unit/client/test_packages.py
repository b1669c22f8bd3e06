"""`--pip`: what is fixed at submit, and what a pod installs from an index of this machine into a directory."""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from cluster.paths import REPOSITORY
from regroup_client import packages, submission
from regroup_client.errors import SubmitError
from regroup_client.packages import entries, resolve
from regroup_client.submission import Choices
from regroup_operator.api import parse_job

UV = REPOSITORY / ".uv/bin"


def wheel(index: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel with one module of the package's name, and the page of an index for it."""
    files = {
        f"{name}/__init__.py": f"VERSION = '{version}'\n",
        f"{name}-{version}.dist-info/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {one}" for one in needs),
                "",
            ]
        ),
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{name}-{version}.dist-info/RECORD"
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for path, text in files.items()
    ]
    files[record] = "\n".join([*lines, f"{record},,", ""])
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    links = []
    for file in sorted(folder.glob("*.whl")):
        links.append(f'<a href="{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}">{file.name}</a>')
    (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve an index on this machine, and yield its URL. No other index is known to uv and pip."""
    handler = functools.partial(Quiet, directory=str(directory))
    with pytest.MonkeyPatch.context() as patch, http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            patch.delenv(name)
        patch.setenv("PATH", f"{UV}:{os.environ['PATH']}")
        patch.setenv("UV_CACHE_DIR", str(directory.parent / "cache"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index with these packages."""
    directory = tmp_path_factory.mktemp("pip") / "index"
    wheel(directory, "app", "1.0", "base>=2", "extra; python_version < '3'")
    wheel(directory, "app", "2.0", "base>=2", "other")
    wheel(directory, "base", "1.0")
    wheel(directory, "base", "2.0", "deep")
    wheel(directory, "deep", "1.0")
    wheel(directory, "other", "1.0", "torch")
    wheel(directory, "torch", "9.0", "heavy")
    wheel(directory, "heavy", "1.0")
    wheel(directory, "wants", "1.0", "torch>=8")
    with served(directory) as url:
        yield url


def lock_of(*wanted: str, url: str) -> dict[str, Any]:
    found = resolve(wanted, url)
    assert found is not None
    lock: dict[str, Any] = json.loads(found.lock)
    return lock


class Image:
    """A place with packages that an image has, and the code of the pod."""

    def __init__(self, directory: Path, lock: dict[str, Any], url: str, **has: str) -> None:
        self.to, self._lock, self._url = directory / "packages", directory / "lock", url
        self._site = directory / "site"
        for each in (self.to, self._lock, self._site):
            each.mkdir()
        (self._lock / "lock.json").write_text(json.dumps(lock))
        (self._lock / "install.py").write_text(packages.PROGRAM)
        for name, version in has.items():
            info = self._site / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def install(self, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(self._site), "PIP_INDEX_URL": self._url, "HOME": str(self._site)}
        command = [python, "install.py", str(self._lock), str(self.to)]
        return subprocess.run(command, cwd=self._lock, env=environment, capture_output=True, text=True, timeout=120)

    def installed(self) -> list[str]:
        return sorted(
            entry.name for entry in self.to.iterdir() if "-" not in entry.name and not entry.name.startswith(".")
        )


@pytest.mark.parametrize(
    ("wanted", "has", "want"),
    [
        pytest.param(["app==1.0"], {}, ["app", "base", "deep"], id="all that is missing"),
        pytest.param(["app==1.0"], {"base": "3.0"}, ["app"], id="what the image has stays"),
        pytest.param(["app==1.0"], {"base": "1.0"}, ["app", "base", "deep"], id="what the image has and does not fit is replaced"),
        pytest.param(["app==1.0"], {"app": "0.9", "base": "2.0"}, ["app"], id="a named package wins over the image"),
        pytest.param(["app"], {"torch": "2.13"}, ["app", "base", "deep", "other"], id="torch and what it needs stay as they are"),
        pytest.param(["app", "deep"], {"base": "2.0", "torch": "2"}, ["app", "deep", "other"], id="several"),
    ],
)  # fmt: skip
def test_pod_installs_what_was_named_and_what_the_image_lacks(
    index: str, tmp_path: Path, wanted: list[str], has: dict[str, str], want: list[str]
) -> None:
    image = Image(tmp_path, lock_of(*wanted, url=index), index, **has)
    (image.to / "left").write_text("by an attempt before")
    done = image.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert image.installed() == want
    assert done.stdout.splitlines()[-1] == f"Installed: {' '.join(want)}"


def test_package_for_another_torch_is_refused(index: str, tmp_path: Path) -> None:
    image = Image(tmp_path, lock_of("wants", url=index), index, torch="2.13")
    done = image.install()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ERROR: wants needs torch>=8, and the image has torch 2.13. Use an image with that torch, or name another version."
    )


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_file_that_was_changed_after_submit_is_refused(tmp_path: Path, installer: str) -> None:
    directory = tmp_path / "index"
    wheel(directory, "deep", "1.0")
    with served(directory) as url:
        image = Image(tmp_path, lock_of("deep", url=url), url)
        assert image.install(python_with(installer)).returncode == 0
        assert image.installed() == ["deep"]
        with zipfile.ZipFile(directory / "deep/deep-1.0-py3-none-any.whl", "a") as archive:
            archive.writestr("deep/more.py", "")
        (directory / "deep/index.html").write_text('<a href="deep-1.0-py3-none-any.whl">deep-1.0-py3-none-any.whl</a>')
        done = image.install(python_with(installer))
    assert done.returncode != 0
    assert image.installed() == []


def python_with(installer: str) -> str:
    """Return a Python that has pip, or this one, whose environment has none."""
    if installer == "uv":
        assert util.find_spec("pip") is None
        return sys.executable
    return str(Path(sys.base_prefix) / "bin/python3")


def test_versions_of_several_pythons_keep_their_markers() -> None:
    text = """\
numpy==1.0 ; python_full_version < '3.11' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via app
numpy==2.0 ; python_full_version >= '3.11' \\
    --hash=sha256:cc
    # via
    #   App_One
    #   b
typing-extensions==4.0 \\
    --hash=sha256:dd
"""
    assert entries(text) == [
        {
            "name": "numpy",
            "lines": [
                "numpy==1.0 ; python_full_version < '3.11' \\",
                "    --hash=sha256:aa \\",
                "    --hash=sha256:bb",
            ],
            "via": ["app"],
        },
        {
            "name": "numpy",
            "lines": ["numpy==2.0 ; python_full_version >= '3.11' \\", "    --hash=sha256:cc"],
            "via": ["app-one", "b"],
        },
        {"name": "typing-extensions", "lines": ["typing-extensions==4.0 \\", "    --hash=sha256:dd"], "via": []},
    ]


@pytest.mark.parametrize(
    ("wanted", "url", "sentence"),
    [
        (["-r x"], None, "--pip (-r x) is no package of an index. Write NAME or NAME==VERSION."),
        (["app @ file:///etc"], None, "is no package of an index"),
        (["app==7"], None, "--pip (app==7) cannot be resolved: Because there is no version of app==7"),
        (["app"], "ftp://x/", "--index-url (ftp://x/) is no URL of an index"),
        (["app"], "https://me:secret@index/simple", "--index-url has a password"),
        ([], "https://index/simple", "--index-url goes with --pip"),
    ],
    ids=lambda value: str(value),
)
def test_wrong_packages_are_one_sentence(index: str, wanted: list[str], url: str | None, sentence: str) -> None:
    with pytest.raises(SubmitError) as refused:
        resolve(wanted, index if url is None else url)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_missing_uv_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "uv", None)
    with pytest.raises(SubmitError, match="--pip needs uv"):
        resolve(["app"])


@pytest.mark.parametrize("environment", [{}, {"UV_DEFAULT_INDEX": "x"}], ids=["pip's own", "uv's first"])
def test_variables_of_pip_choose_the_index(environment: dict[str, str]) -> None:
    of_pip = {"PIP_INDEX_URL": "a", "PIP_EXTRA_INDEX_URL": "b c", "PIP_FIND_LINKS": "d"}
    options = packages._index_options("", of_pip | environment)
    assert options == [*([] if environment else ["--default-index=a"]), "--index=b", "--index=c", "--find-links=d"]
    assert packages._index_options("mine", of_pip | environment)[0] == "--default-index=mine"


def test_job_with_packages_is_accepted_and_they_win_over_the_image() -> None:
    found = packages.Packages('{"named":[],"entries":[]}', "https://index/simple", {"PIP_TIMEOUT": "9"})
    choices = Choices(
        "train", "torch", "train.py", env={"PYTHONPATH": "/mine"}, env_from=["keys"], user=1000, packages=found
    )
    made = submission.objects(choices, {"train.py": b"", ".hidden": b"x"})
    parse_job(copy.deepcopy(made.job))
    pod = made.job["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"] == [{"name": "PYTHONPATH", "value": "/packages:/mine"}]
    copier, installer = pod["initContainers"]
    assert installer["env"][1:] == [
        {"name": "PIP_TIMEOUT", "value": "9"},
        {"name": "PIP_INDEX_URL", "value": "https://index/simple"},
    ]
    assert installer["securityContext"] == copier["securityContext"]
    assert installer["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert set(made.code[0]["data"]) == {"train.py", "hidden", ".lock.json", ".install.py"}


def test_too_many_hashes_are_refused() -> None:
    with pytest.raises(SubmitError, match="Name fewer packages"):
        submission.objects(
            Choices("train", "torch", "train.py", packages=packages.Packages("x" * (1000 << 10))), {"train.py": b"x"}
        )
