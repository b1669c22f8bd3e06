"""Finds the jobs in the text of files, converts each, and checks the result as the operator does."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from regroup_cli.convert import jobset, mpijob, pytorchjob, sbatch, tfjob, trainjob, xgboostjob
from regroup_cli.convert.draft import Draft
from regroup_cli.convert.findings import Field, Finding, Ledger, Verdict
from regroup_operator.api import KIND, SpecError, parse_job

Converter = Callable[[Field, Draft], None]
CONVERTERS: Mapping[tuple[str, str], Converter] = {
    ("kubeflow.org/v1", "PyTorchJob"): pytorchjob.convert,
    ("kubeflow.org/v1", "TFJob"): tfjob.convert,
    ("kubeflow.org/v1", "XGBoostJob"): xgboostjob.convert,
    ("kubeflow.org/v1", "MPIJob"): mpijob.convert,
    ("kubeflow.org/v2beta1", "MPIJob"): mpijob.convert,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): trainjob.convert,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): jobset.convert,
}
OTHER_JOBS = ("kubeflow.org", "trainer.kubeflow.org", "jobset.x-k8s.io", "batch.volcano.sh", "ray.io", "batch",
              "leaderworkerset.x-k8s.io")  # fmt: skip
"""API groups of jobs. A kind of theirs without a converter is refused, and kinds of other groups are written as they are."""
Document = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Values of the command line that take the place of the source's."""

    name: str | None = None
    image: str | None = None
    framework: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Converted:
    """One document of the output."""

    source: str
    """The kind and the name of the source, for the report."""
    document: Document
    findings: list[Finding]

    @property
    def dropped(self) -> int:
        return sum(one.verdict is Verdict.DROPPED for one in self.findings)


class _Loader(yaml.SafeLoader):
    """Reads YAML as kubectl does: a time and 12:30 stay texts, 1e3 is a number, and y is true."""

    bool_values: ClassVar[dict[str, bool]] = {**yaml.SafeLoader.bool_values, "y": True, "n": False}


_PYTHONS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in _PYTHONS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[\da-fA-F_]+|0|[1-9][\d_]*)"
_FLOAT = r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_BOOL = "[yYnN]"
for _tag, _pattern, _first in (
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("bool", _BOOL, "yYnN"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
_AS_GO = re.compile(f"{_INT}|{_FLOAT}|{_BOOL}|[-+]?0[oOxXbB][\\da-fA-F_]+")
"""Texts that kubectl reads as a number or a boolean, and PyYAML as a text."""
MOST_NODES = 100_000
"""Values in a file, each as often as an alias repeats it. A manifest has hundreds."""


SCRIPT = "Script"
"""The kind under which the text of an sbatch script stands among the documents."""


def read_documents(text: str, name: str) -> list[Document]:
    """Return the documents of a YAML or JSON text, with those of Lists. `name` is the file's, for sentences."""
    if sbatch.is_script(text):
        return [{"kind": SCRIPT, "metadata": {"name": name}, "text": text}]
    try:
        found = [one for one in yaml.load_all(text, Loader=_Loader) if one is not None]
        _check_bounds(found, name)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        at = f" in line {where.line + 1}" if where is not None else ""
        raise SpecError(f"{name} is no YAML{at}: {getattr(error, 'problem', None) or error}. Correct it.") from None
    return [one for document in found for one in _flat(document, name)]


def _check_bounds(documents: list[Any], name: str) -> None:
    """Refuse values that contain themselves, and aliases that repeat others without bound. All later walks rely on it."""
    left = [*documents]
    for _ in range(MOST_NODES):
        if not left:
            return
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    raise SpecError(
        f"{name} has more than {MOST_NODES} values, or an alias that contains itself. Write the values without aliases."
    )


def _flat(document: Any, name: str) -> Iterator[Document]:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise SpecError(f"{name} has a document without a kind. Give manifests of Kubernetes, or a script for sbatch.")
    if document["kind"].endswith("List") and isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _flat(item, name)
    else:
        yield document


def convert(documents: Iterable[Document], options: Options) -> list[Converted]:
    """Convert the jobs among documents. Other objects, such as a PersistentVolumeClaim, stay as they are.

    Raises SpecError with one sentence if a job cannot be converted, or would be refused.
    """
    found = list(documents)
    made = [_convert(one, options, found) for one in found if one["kind"] not in trainjob.RUNTIMES]
    if not any(one.document["kind"] == KIND for one in made):
        kinds = ", ".join(sorted({kind for _, kind in CONVERTERS}))
        raise SpecError(
            f"There is no job to convert. The kinds that can be converted are {kinds} and scripts for sbatch."
        )
    return made


def _convert(document: Document, options: Options, beside: list[Document]) -> Converted:
    kind, version = document["kind"], str(document.get("apiVersion", ""))
    metadata = document.get("metadata")
    if not isinstance(metadata, dict | None):
        raise SpecError(f"metadata of a {kind} is no mapping. Correct it.")
    name = (metadata or {}).get("name") or (metadata or {}).get("generateName") or ""
    source = f"{kind} {name}".strip()
    converter = CONVERTERS.get((version, kind))
    if converter is None and kind != SCRIPT:
        if version.partition("/")[0] in OTHER_JOBS:
            raise SpecError(
                f"{source} of {version} cannot be converted. Write its job by hand: docs/how-to/write-a-job.md."
            )
        return Converted(source, document, [])
    ledger = Ledger()
    draft = Draft(framework=options.framework or Draft.framework, beside=beside, command=words(options.command))
    try:
        if converter is None:
            stem = name.rpartition("/")[2].partition(".")[0]
            sbatch.convert(document["text"], draft, ledger, name=stem, image=options.image)
        else:
            converter(Field(document, ledger), draft)
        job = finished(draft, options)
    except SpecError as error:
        raise SpecError(f"{source}: {error}") from None
    if converter is None:
        return Converted(source, job, sorted((one for _, one in ledger.found), key=_line))
    return Converted(source, job, [*ledger.findings(document), *draft.more])


def _line(found: Finding) -> int:
    """Return the line of a script that a finding is on."""
    number = re.match(r"line (\d+)", found.path)
    return int(number[1]) if number else 0


def words(command: str | None) -> list[str] | None:
    """Return the words of --command."""
    try:
        return None if command is None else shlex.split(command)
    except ValueError:
        raise SpecError(f"--command ({command}) has a quote without an end. Close it.") from None


def finished(draft: Draft, options: Options) -> Document:
    """Return the job, with the changes of the command line. Raises SpecError if the operator would refuse it."""
    if options.name:
        draft.metadata["name"] = options.name
    if options.framework:
        draft.framework = options.framework
    if options.image:
        draft.trainer["image"] = options.image
    job = draft.job()
    parse_job(copy.deepcopy(job))
    if not draft.trainer.get("image"):
        raise SpecError(
            "The source names no image. Give --image with one that has python, the framework and the program."
        )
    return job


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, and texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _AS_GO.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(documents: Iterable[Document]) -> str:
    """Return documents as one YAML text."""
    return "---\n".join(
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120) for one in documents
    )
