"""Count docstrings that a reader has to decode: `python -m harness.voice`.

The check reads the docstrings of modules, classes, functions and attributes in ROOMS. Tests are not read. It finds three kinds
of faults:

- `see`: the docstring begins with "See" and sends the reader elsewhere.
- `headless`: the docstring begins with a clause that has no subject, for example "Who ..." or "Until ...".
- `long`: a sentence has more than 25 words.

harness/voice-baseline.json has the number of faults of each kind that a file may have. The check fails if a file has more. If a
file has fewer, the check names the command that lowers the baseline: `python -m harness.voice --write`. That command never raises
a number.

A count cannot tell whether a docstring is understood. `python -m harness.voice --draw 40 --seed 7` prints docstrings drawn at
random, without their code. A reader says in other words what each means, and compares that with the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BASELINE = REPOSITORY / "harness" / "voice-baseline.json"
ROOMS = ("operator", "trainer-image", "bench", "chaos", "cluster", "demo", "harness", "manifests")
LONGEST = 25

SEE = re.compile(r"See\b")
QUESTION = re.compile(r"(Who|Whom|Whose|What|Whatever|Which|Where|Whether|Why|How|Of|By|Until|Than|Those)\b")
# "When a pod fails, the operator ..." has a subject after its comma, "When the job began." has none.
ADVERB = re.compile(r"(When|If|Since|While|With|Without|Because|After|Before|For|From|In|On|At|As|Between|Among|To)\b")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|incl|approx)\.")
LIST_ITEM = re.compile(r"([-*]|\d+\.)\s")
# A sentence ends before a space and a capital, a digit or a mark that opens code or a quotation; "0.5" and "job.py" have no space.
END = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=[A-Z0-9`"'(\[])""")


@dataclass(frozen=True)
class Docstring:
    line: int  # of its first line
    text: str
    name: str  # in its module, such as Pod.delete; empty for the module's own


@dataclass(frozen=True)
class Fault:
    line: int
    kind: str  # see, headless or long
    sentence: str


Faults = Mapping[str, Iterable[Fault]]  # file -> its faults
Baseline = Mapping[str, Mapping[str, int]]  # file -> kind -> number of faults


def docstrings(source: str) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes, functions and attributes, in the order of their lines."""
    yield from _docstrings_of(ast.parse(source), (), takes_first=True)


def _docstrings_of(block: ast.AST, scope: tuple[str, ...], *, takes_first: bool) -> Iterator[Docstring]:
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        before: ast.AST | None = None
        for statement in getattr(block, field, ()):
            opens = before is None and takes_first and field == "body"
            if isinstance(statement, ast.Expr) and (opens or isinstance(before, ast.Assign | ast.AnnAssign)):
                if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                    name = ".".join((*scope, *([] if opens else [_target(before)])))
                    yield Docstring(statement.lineno, statement.value.value, name)
            elif isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings_of(statement, (*scope, statement.name), takes_first=True)
            elif hasattr(statement, "body"):
                yield from _docstrings_of(statement, scope, takes_first=False)
            before = statement


def _target(assignment: ast.AST | None) -> str:
    targets = [assignment.target] if isinstance(assignment, ast.AnnAssign) else getattr(assignment, "targets", [])
    return ", ".join(ast.unparse(target) for target in targets)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring. An item of a list is a sentence; indented code and tables are none."""
    paragraph: list[str] = []
    in_list = False
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        is_item = bool(LIST_ITEM.match(line.lstrip()))
        is_code = line.startswith(("    ", ">>>", "|")) and not in_list and not is_item
        if paragraph and (not line.strip() or is_item or is_code):
            yield from _split(" ".join(paragraph))
            paragraph = []
        in_list = is_item or (in_list and line.startswith(" "))
        if line.strip() and not is_code:
            paragraph.append(LIST_ITEM.sub("", line.strip(), count=1) if is_item else line.strip())


def _split(paragraph: str) -> list[str]:
    # Code may contain a full stop and a space, an abbreviation a full stop before a capital. Each is hidden while splitting.
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"`{len(hidden) - 1}`"

    text = ABBREVIATION.sub(hide, re.sub(r"`[^`]+`", hide, paragraph))
    return [re.sub(r"`(\d+)`", lambda found: hidden[int(found[1])], sentence) for sentence in END.split(text)]


def words(sentence: str) -> int:
    """Return the number of words in a sentence. Code between backticks is one word; signs such as "->" are none."""
    return sum(1 for word in re.sub(r"`[^`]+`", "code", sentence).split() if re.search(r"\w", word))


def faults(source: str) -> list[Fault]:
    """Return the faults in the docstrings of a file."""
    found = []
    for docstring in docstrings(source):
        for i, sentence in enumerate(sentences(docstring.text)):
            if i == 0 and SEE.match(sentence):
                found.append(Fault(docstring.line, "see", sentence))
            if i == 0 and (QUESTION.match(sentence) or (ADVERB.match(sentence) and ", " not in sentence)):
                found.append(Fault(docstring.line, "headless", sentence))
            if words(sentence) > LONGEST:
                found.append(Fault(docstring.line, "long", sentence))
    return found


def counted(found: Faults) -> dict[str, dict[str, int]]:
    """Return the number of faults by file and kind, without zeros, sorted."""
    counts = {file: Counter(fault.kind for fault in inside) for file, inside in found.items()}
    return {file: dict(sorted(kinds.items())) for file, kinds in sorted(counts.items()) if kinds}


def too_many(found: Faults, baseline: Baseline) -> list[str]:
    """Return one line for each fault in a file that has more of its kind than the baseline."""
    counts = counted(found)
    lines = []
    for file, inside in sorted(found.items()):
        for fault in inside:
            has, may = counts[file][fault.kind], baseline.get(file, {}).get(fault.kind, 0)
            if has > may:
                lines.append(f"{file}:{fault.line}: {fault.kind}, {has} where {may} may be: {fault.sentence}")
    return lines


def lowered(found: Faults, baseline: Baseline) -> dict[str, dict[str, int]]:
    """Return the baseline with each number lowered to what the file has. No number rises and no file is added."""
    counts = counted(found)
    pairs = {
        file: {kind: min(may, counts.get(file, {}).get(kind, 0)) for kind, may in kinds.items()}
        for file, kinds in baseline.items()
    }
    kept = {file: {kind: may for kind, may in kinds.items() if may} for file, kinds in pairs.items()}
    return {file: kinds for file, kinds in kept.items() if kinds}


def drawn(sources: Mapping[str, str], number: int, seed: int) -> list[str]:
    """Return `number` docstrings of these files, each under its full name. The same seed draws the same ones."""
    every = [
        f"{'.'.join(filter(None, (file.removesuffix('.py').removesuffix('/__init__').replace('/', '.'), one.name)))}\n"
        + textwrap.indent(inspect.cleandoc(one.text), "    ")
        for file, source in sources.items()
        for one in docstrings(source)
    ]
    return random.Random(seed).sample(every, min(number, len(every)))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.voice", description="Count docstrings to be rewritten.")
    parser.add_argument("--write", action="store_true", help="lower the baseline to the present numbers")
    parser.add_argument("--draw", type=int, metavar="N", help="print N docstrings drawn at random, without their code")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="other docstrings for --draw (default 0)")
    options = parser.parse_args(arguments)
    files = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
    sources = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in files}
    if options.draw is not None:
        for number, text in enumerate(drawn(sources, options.draw, options.seed), 1):
            print(f"{number}. {text}\n")
        return 0
    found = {file: faults(source) for file, source in sources.items()}
    baseline = json.loads(BASELINE.read_text())
    if options.write:
        baseline = lowered(found, baseline)
        BASELINE.write_text(json.dumps(baseline, indent=2) + "\n")
    lines = too_many(found, baseline)
    print("\n".join([*lines, _summary(baseline)]))
    if lowered(found, baseline) != baseline:
        print("some files have fewer than their baseline: run `python -m harness.voice --write`")
    return 1 if lines else 0


def _summary(baseline: Baseline) -> str:
    total = Counter[str]()
    for kinds in baseline.values():
        total.update(kinds)
    return "docstrings to rewrite: " + ", ".join(f"{total[kind]} {kind}" for kind in ("see", "headless", "long"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
