"""The files that travel with a job: one script, or a directory without what `.gitignore` names.

Reads files, and refuses what must not or cannot travel: secrets, links that lead out, and more than a ConfigMap holds.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regroup_client.errors import SubmitError
from regroup_client.submission import Files

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_BYTES = 900 * 1024
"""A ConfigMap holds 1 MiB with its keys and everything else in it."""
MAX_FILES = 300
"""The job's template names each file, and the job's status keeps a copy of the template."""
IGNORE = ".gitignore"
_NEVER = frozenset({".git", "__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache"})
_ENVIRONMENT = "pyvenv.cfg"
"""File that marks the directory of a virtual environment."""
_SECRETS = (".env", ".netrc", ".pypirc", "id_rsa", "id_ed25519", "kubeconfig")
_PUBLIC = (".env.example", ".env.template", ".env.sample")
_ALTERNATIVES = (
    "Name what the job does not need in .gitignore, put data on a volume (--data CLAIM:PATH), or build an image that has "
    "the code."
)


def travelling(script: Path, directory: str | Path | None) -> tuple[str, Files]:
    """Return the path of a script in what travels, and the files: the script alone, or a directory. Raises SubmitError."""
    if script.suffix != ".py":
        raise SubmitError(f"The script {script} does not end in .py. Give a Python script.")
    if directory is None:
        return script.name, script_files(script)
    files = directory_files(Path(directory))
    return path_in(Path(directory), script), files


def script_files(script: Path) -> Files:
    """Return the one file of a script. A script that imports a module beside it is refused. Raises SubmitError."""
    content = _read(script)
    beside = sorted(_imported(content) & _modules(script.parent) - {script.stem})
    if beside:
        raise SubmitError(
            f"{script} imports {beside[0]}, which lies beside it and would not travel. Give the directory, too: --directory "
            f"{script.parent}"
        )
    return _bounded({script.name: content}, str(script))


def directory_files(directory: Path) -> Files:
    """Return the files of a directory that .gitignore does not name. Raises SubmitError."""
    top = directory.resolve()
    if not top.is_dir():
        raise SubmitError(f"The directory {directory} is not there. Give one that exists.")
    return _bounded(dict(_walk(top, top, _outer_rules(top))), str(directory))


def path_in(directory: Path, script: Path) -> str:
    """Return the path of a script below a directory. It is given as seen from here, or from the directory. Raises SubmitError."""
    for path in (script, directory / script):
        if path.is_file() and path.resolve().is_relative_to(directory.resolve()):
            return path.resolve().relative_to(directory.resolve()).as_posix()
    raise SubmitError(f"The script {script} is not in the directory {directory}. Give one that is in it.")


def _walk(top: Path, directory: Path, outer: Sequence[tuple[Path, GitIgnoreSpec]]) -> Iterator[tuple[str, bytes]]:
    rules = [*outer, *_rules(directory)]
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        raise SubmitError(
            f"The directory {directory} cannot be read ({error.strerror}). Check its name and owner."
        ) from None
    for entry in entries:
        path = Path(entry.path)
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name in _NEVER or _is_ignored(path, is_directory, rules):
            continue
        if is_directory:
            if not (path / _ENVIRONMENT).exists():
                yield from _walk(top, path, rules)
            continue
        _check(top, path)
        yield path.relative_to(top).as_posix(), _read(path)


def _rules(directory: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    """Return the patterns of a directory's .gitignore, if it has one. Raises SubmitError without the package that reads them."""
    try:
        lines = (directory / IGNORE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    try:
        from pathspec import GitIgnoreSpec
    except ModuleNotFoundError as error:  # all else does without
        raise SubmitError(
            f"The package {error.name} is missing. Install regroup-training with the extra client or cli, or run make venv in a "
            "checkout."
        ) from None
    return [(directory, GitIgnoreSpec.from_lines(lines))]


def _outer_rules(top: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    """Return the patterns of the directories above, up to the root of the repository. Without a repository there are none."""
    above = list(top.parents)
    root = next((number for number, one in enumerate([top, *above]) if (one / ".git").exists()), 0)
    return [rule for one in reversed(above[:root]) for rule in _rules(one)]


def _is_ignored(path: Path, is_directory: bool, rules: Sequence[tuple[Path, GitIgnoreSpec]]) -> bool:
    """Return whether a .gitignore names the path. As in git, the one nearest to the path decides."""
    for directory, spec in reversed(rules):
        name = path.relative_to(directory).as_posix() + ("/" if is_directory else "")
        decided = spec.check_file(name).include
        if decided is not None:
            return decided
    return False


def _check(top: Path, path: Path) -> None:
    """Raise SubmitError for a file that must not or cannot travel."""
    name = path.name
    if name in _SECRETS or (name.startswith(".env.") and name not in _PUBLIC):
        raise SubmitError(
            f"{path} may hold secrets, and everyone who may read ConfigMaps could read it. Name it in .gitignore, and put what the "
            "job needs of it into a Secret (--env-from SECRET)."
        )
    if path.is_symlink():
        target = path.resolve()
        if target.is_dir() or not target.is_relative_to(top.resolve()):
            raise SubmitError(
                f"{path} is a link to {target}, which does not travel. Copy the file here, or name the link in .gitignore."
            )
    if not path.is_file():
        raise SubmitError(f"{path} is no file. Remove it, or name it in .gitignore.")


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise SubmitError(
                f"{path} has {size // 1024} KiB, and at most {MAX_BYTES // 1024} KiB travel. {_ALTERNATIVES}"
            )
        return path.read_bytes()
    except OSError as error:
        raise SubmitError(f"{path} cannot be read ({error.strerror}). Check its name and owner.") from None


def _bounded(files: dict[str, bytes], where: str) -> Files:
    size = sum(len(content) for content in files.values())
    if size > MAX_BYTES:
        largest = max(files, key=lambda path: len(files[path]))
        raise SubmitError(
            f"The files of {where} have {size // 1024} KiB, and at most {MAX_BYTES // 1024} KiB travel; the largest is "
            f"{largest} ({len(files[largest]) // 1024} KiB). {_ALTERNATIVES}"
        )
    if len(files) > MAX_FILES:
        raise SubmitError(f"{where} has {len(files)} files, and at most {MAX_FILES} travel. {_ALTERNATIVES}")
    return files


def _imported(source: bytes) -> set[str]:
    """Return the top names that a script imports. A script that cannot be parsed imports nothing: Python will say what is wrong."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def _modules(directory: Path) -> set[str]:
    """Return the names of the modules and packages in a directory."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return set()
    files = {entry.stem for entry in entries if entry.suffix == ".py"}
    return files | {entry.name for entry in entries if (entry / "__init__.py").is_file()}
