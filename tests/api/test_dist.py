"""The files of a release: each is of this checkout, and the wheel runs jobs where pip has installed nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cluster import binaries
from cluster.paths import REPOSITORY
from harness.installed import Clean, asked, contents
from manifests import dist
from tests.long import only_long

pytestmark = pytest.mark.timeout(600)
UV = Path(shutil.which("uv") or REPOSITORY / ".uv/bin/uv")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the files once."""
    out = tmp_path_factory.mktemp("release") / "dist"
    dist.build(out, UV, binaries.ensure() / "helm")
    return out


def one(release: Path, pattern: str) -> Path:
    (file,) = release.glob(pattern)
    return file


@pytest.mark.slow
def test_files_and_checksums(release: Path) -> None:
    names = [re.sub(r"\d+\.\d+\.\d+", "V", file.name) for file in sorted(release.iterdir())]
    wheel, sdist = "regroup_training-V-py3-none-any.whl", "regroup_training-V.tar.gz"
    assert names == ["SHA256SUMS", "install.yaml", "regroup-V.tgz", wheel, sdist, "sbom.cdx.json"]
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", dist.SUMS], cwd=release, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout.count(": OK")) == (0, len(names) - 1), checked.stderr


@pytest.mark.slow
def test_sdist_builds_the_wheel_of_the_checkout(release: Path, tmp_path: Path) -> None:
    for source in (REPOSITORY, one(release, "*.tar.gz")):
        out = tmp_path / source.name
        subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", out, source], check=True)
        assert contents(one(out, "*.whl")) == contents(one(release, "*.whl"))
    modules = {name.split("/")[0] for name in contents(one(release, "*.whl"))}
    packages = {"regroup", "_regroup_agent", "regroup_operator", "regroup_client", "regroup_cli"}
    assert {name for name in modules if not name.endswith(".dist-info")} == packages
    assert "regroup_client/py.typed" in contents(one(release, "*.whl")), "users' type checkers read the annotations"


@pytest.mark.slow
def test_chart_and_plain_install_are_of_this_checkout(release: Path, tmp_path: Path) -> None:
    assert (release / "install.yaml").read_bytes() == (REPOSITORY / "manifests/install.yaml").read_bytes()
    with tarfile.open(one(release, "regroup-*.tgz")) as archive:
        archive.extractall(tmp_path, filter="data")
    for directory in ("templates", "crds", "files", "dashboards"):
        ours = {
            p.relative_to(REPOSITORY / "helm")
            for p in (REPOSITORY / "helm/regroup" / directory).rglob("*")
            if p.is_file()
        }
        for path in ours:
            assert (tmp_path / path).read_bytes() == (REPOSITORY / "helm" / path).read_bytes(), path
    (version,) = re.findall(r"^version: (.+)$", (tmp_path / "regroup/Chart.yaml").read_text(), re.MULTILINE)
    assert f"regroup_training-{version}-" in one(release, "*.whl").name


@pytest.mark.slow
def test_sbom_has_every_package_that_an_extra_asks_for(release: Path) -> None:
    components = {component["name"] for component in json.loads((release / "sbom.cdx.json").read_text())["components"]}
    assert {
        name for extra in ("cli", "operator", "trainer") for name in asked(one(release, "*.whl"), extra)
    } <= components
    assert not {"pytest", "ruff"} & components


CLIENT = """
import sys
from pathlib import Path
from regroup_client import Client, ClientError, bundle
path, files = bundle.travelling(Path("plain.py"), ".")
print({path: len(files[path])})
try:
    Client.local().submit("plain.py")
except ClientError as error:
    print(error)
heavy = {"kopf", "kubernetes", "torch", "pydantic", "aiohttp", "regroup_operator", "regroup_cli", "regroup"}
assert not heavy & {name.split(".")[0] for name in sys.modules}
"""


@pytest.mark.slow
def test_wheel_in_a_clean_environment_runs_jobs(release: Path, tmp_path: Path) -> None:
    clean = Clean(tmp_path / "venv", one(release, "*.whl"))
    plugin = clean.run(tmp_path, "kubectl-regroup", "--help")
    assert (plugin.returncode, plugin.stderr) == (0, ""), "kubectl regroup needs no package"
    bare = clean.run(tmp_path, "regroup", "--help")
    assert (bare.returncode, bare.stderr.count("\n")) == (2, 1)
    assert re.match(r"regroup: the package \w+ is missing\. Install regroup-training with the extra cli", bare.stderr)

    clean.add(asked(one(release, "*.whl"), "client"))
    (tmp_path / "plain.py").write_text("print('it runs')\n")
    client = clean.run(tmp_path, "python", "-c", CLIENT)
    assert client.returncode == 0, client.stderr
    assert client.stdout.splitlines()[0] == "{'plain.py': 17}", client.stdout
    assert "is missing. Install regroup-training with the extra cli" in client.stdout

    clean.add(asked(one(release, "*.whl"), "cli"))
    assert clean.run(tmp_path, "regroup", "--help").stdout.startswith("usage: regroup")
    plain = clean.run(tmp_path, "regroup", "run", "--plain", "--workers", "2", "--framework", "None", "plain.py")
    assert (plain.returncode, plain.stdout.count("it runs")) == (0, 2), plain.stdout + plain.stderr

    clean.add([*asked(one(release, "*.whl"), "trainer"), "scikit-learn"])
    sample = str(REPOSITORY / "manifests/samples/digits.py")
    options = ["--plain", "--workers", "2", "--checkpoint", "saved"]
    trained = clean.run(tmp_path, "regroup", "run", *options, sample, "--steps", "20")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    exported = clean.run(tmp_path, "regroup", "checkpoint", "export", "saved", "--to", "model.safetensors")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith("model.safetensors: 4 tensors, ")
    where = clean.run(tmp_path, "python", "-c", "import regroup; print(regroup.__file__)")
    assert str(tmp_path) in where.stdout, sys.path


@pytest.mark.parametrize(
    ("version", "app_version", "sentence"),
    [
        ("1.2.3", "1.2.3", None),
        ("1.2.4", "1.2.3", "version of helm/regroup/Chart.yaml is 1.2.4, and version of pyproject.toml is 1.2.3. "),
        ("1.2.3", "1.2", "appVersion of helm/regroup/Chart.yaml is 1.2, and version of pyproject.toml is 1.2.3. "),
    ],
)
def test_chart_and_package_have_one_version(version: str, app_version: str, sentence: str | None) -> None:
    found = dist.differing_versions(
        '[project]\nversion = "1.2.3"\n', f"version: {version}\nappVersion: {app_version}\n"
    )
    assert found == (sentence and f"{sentence}A release has one version: correct one of them.")


@only_long("the test above installs the same wheel with pip")
@pytest.mark.slow
def test_wheel_is_installed_with_pipx(release: Path, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    pipx = [str(UV), "tool", "run", "pipx", "install", f"--python={sys.executable}", f"{one(release, '*.whl')}[cli]"]
    done = subprocess.run(pipx, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    names = sorted(entry.name for entry in (tmp_path / "bin").iterdir())
    assert names == ["kubectl-regroup", "kubectl_complete-regroup", "regroup"]

    def run(*command: str) -> str:
        environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert run("kubectl-regroup", "--help").startswith("usage: kubectl regroup")
    (tmp_path / "train.py").write_text("print('it runs')\n")
    assert run("regroup", "run", "--plain", "--framework", "None", "train.py").count("it runs") == 1
    run("regroup", "submit", "train.py", "--image=torch", "--save=job.yaml")
    assert (tmp_path / "job.yaml").read_text().count("kind: DistributedTrainingJob") == 1
