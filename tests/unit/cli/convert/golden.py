"""What `regroup convert` makes of the examples. `python -m tests.unit.cli.convert.golden` writes it: read the difference."""

from __future__ import annotations

from pathlib import Path

from regroup_cli.convert.command import report
from regroup_cli.convert.documents import Options, as_yaml, convert, read_documents

EXAMPLES = Path(__file__).parent / "examples"
NAMES = sorted(one.name.split(".in.")[0] for one in EXAMPLES.glob("*.in.*"))
OPTIONS = {"sbatch": Options(image="registry.example/train:1")}
"""Options by the first part of an example's name."""


def made(name: str) -> tuple[str, str]:
    """Return the jobs and the report of an example."""
    (source,) = EXAMPLES.glob(f"{name}.in.*")
    found = convert(read_documents(source.read_text(), source.name), OPTIONS.get(name.split("-")[0], Options()))
    return as_yaml(one.document for one in found), "\n".join(report(found)) + "\n"


if __name__ == "__main__":
    for example in NAMES:
        for kind, text in zip(("job.yaml", "report.txt"), made(example)):
            (EXAMPLES / f"{example}.{kind}").write_text(text)
