"""Builds the files of a release: `python -m manifests.dist --uv UV DIR`.

| file | what it is |
| --- | --- |
| `regroup_training-VERSION.tar.gz` | the Python package's sources |
| `regroup_training-VERSION-py3-none-any.whl` | the Python package, built from these sources |
| `regroup-VERSION.tgz` | the chart |
| `install.yaml` | the plain install |
| `sbom.cdx.json` | the locked packages of all extras, as CycloneDX |
| `SHA256SUMS` | the checksums of the others, for `sha256sum --check` |
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import yaml

from cluster import binaries

ROOT = Path(__file__).resolve().parent.parent
SUMS = "SHA256SUMS"


def differing_versions(project: str, chart: str) -> str | None:
    """Return a sentence if pyproject.toml and Chart.yaml, given as texts, are of different releases. Otherwise None."""
    package = tomllib.loads(project)["project"]["version"]
    held = yaml.safe_load(chart)
    for key in ("version", "appVersion"):
        if str(held[key]) != package:
            return (
                f"{key} of helm/regroup/Chart.yaml is {held[key]}, and version of pyproject.toml is {package}. "
                "A release has one version: correct one of them."
            )
    return None


def build(out: Path, uv: Path, helm: Path) -> None:
    """Build all files into `out`, which is replaced at the end. Raises CalledProcessError if a program fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".dist-") as directory:
        files = Path(directory, "files")
        files.mkdir(mode=0o755)
        _run(uv, "build", "--quiet", "--no-create-gitignore", "--out-dir", files)
        _run(helm, "package", "helm/regroup", "--destination", files)
        shutil.copy(ROOT / "manifests" / "install.yaml", files)
        sbom = ("--format", "cyclonedx1.5", "--frozen", "--no-default-groups", "--all-extras")
        _run(uv, "export", "--quiet", *sbom, "--output-file", files / "sbom.cdx.json")
        (files / SUMS).write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in sorted(files.iterdir())))
        shutil.rmtree(out, ignore_errors=True)
        files.rename(out)


def _run(program: Path, *arguments: str | Path) -> None:
    subprocess.run([program, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Build the files, or print one sentence and return 1."""
    parser = argparse.ArgumentParser(prog="python -m manifests.dist", description="Build the files of a release.")
    parser.add_argument("--uv", required=True, type=Path, help="the program uv")
    parser.add_argument("out", type=Path, metavar="DIR", help="the directory for the files; what is there is replaced")
    args = parser.parse_args(argv)
    chart = (ROOT / "helm" / "regroup" / "Chart.yaml").read_text(encoding="utf-8")
    if (wrong := differing_versions((ROOT / "pyproject.toml").read_text(encoding="utf-8"), chart)) is not None:
        print(f"make dist: {wrong}", file=sys.stderr)
        return 1
    out: Path = args.out.absolute()
    try:
        build(out, args.uv.absolute(), binaries.ensure() / "helm")
    except subprocess.CalledProcessError as error:
        print(f"make dist: {Path(error.cmd[0]).name} {error.cmd[1]} has failed; its output is above.", file=sys.stderr)
        return 1
    print("\n".join(f"{file.stat().st_size:>10,}  {out.name}/{file.name}" for file in sorted(out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
