"""The command line of `regroup convert`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from regroup.protocol import frameworks
from regroup_cli.convert.documents import Converted, Options, as_yaml, convert, read_documents
from regroup_cli.convert.findings import Finding, Verdict
from regroup_operator.api import KIND, SpecError

SCRIPT_TIER = (
    "The program runs as it is (tier Script): after a failure or a resize all processes start again, from the program's own "
    "checkpoint. docs/concepts/three-ways.md shows what a few lines more give."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="manifests in YAML or JSON, or a script for sbatch; - is stdin"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="file for the job (default: stdout)")
    parser.add_argument("--strict", action="store_true", help="write nothing and return 1 if a field is dropped")
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: the source's)")
    parser.add_argument("--image", metavar="IMAGE", help="image of the training container (default: the source's)")
    parser.add_argument(
        "--command",
        metavar="COMMAND",
        dest="program",
        help="command of the training container, such as 'python train.py' (default: the source's)",
    )
    parser.add_argument("--framework", choices=frameworks.ALL, help="spec.framework (default: what the source shows)")


def run(args: argparse.Namespace) -> int:
    """Convert, write the job and the report, and return the exit code. Raises SpecError with one sentence."""
    options = Options(name=args.name, image=args.image, framework=args.framework, command=args.program)
    documents = [one for file in args.files for one in read_documents(_read(file), file)]
    made = convert(documents, options)
    if args.name and sum(one.document["kind"] == KIND for one in made) > 1:
        raise SpecError("--name names one job, and the files have several. Leave it out.")
    print("\n".join(report(made)), file=sys.stderr)
    dropped = sum(one.dropped for one in made)
    if args.strict and dropped:
        print(
            f"regroup: --strict: nothing is written, because {_count(dropped, 'field')} would be dropped.",
            file=sys.stderr,
        )
        return 1
    text = as_yaml(one.document for one in made)
    if args.output is None:
        print(text, end="")
        return 0
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--output ({args.output}) cannot be written ({error.strerror}). Give another file.") from None
    return 0


def report(made: Iterable[Converted]) -> list[str]:
    """Return the lines on what became of each field."""
    lines = []
    for one in made:
        if not one.findings:
            lines.append(f"{one.source}: written as it is")
            continue
        lines.append(f"{one.source} -> {KIND} {one.document['metadata']['name']}")
        lines += [_line(found) for found in one.findings]
        counts = {verdict: sum(found.verdict is verdict for found in one.findings) for verdict in Verdict}
        lines += ["  " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".", f"  {SCRIPT_TIER}"]
    return lines


def _line(found: Finding) -> str:
    return f"  {found.verdict:<8}  {found.path}{' -> ' if found.verdict is Verdict.MAPPED else ': '}{found.sentence}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"FILE ({file}) cannot be read ({error.strerror}). Give a file that exists.") from None
    except UnicodeDecodeError:
        raise SpecError(f"FILE ({file}) is no text in UTF-8. Give a manifest, or a script for sbatch.") from None
