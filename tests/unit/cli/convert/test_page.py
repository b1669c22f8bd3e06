"""The page on conversion shows what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from regroup_cli.__main__ import main
from regroup_cli.convert.documents import CONVERTERS

PAGE = (Path(__file__).parents[4] / "docs/how-to/coming-from-elsewhere.md").read_text()
EXAMPLES = re.findall(
    r"^`([\w.]+)`:\n\n```\w+\n(.*?)```\n\n```\n\$ regroup (convert .*?)\n(.*?)```\n\n`job.yaml`:\n\n```yaml\n(.*?)```$",
    PAGE,
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("name", "source", "command", "report", "job"), EXAMPLES, ids=[one[0] for one in EXAMPLES])
def test_example_prints_what_the_page_shows(
    name: str,
    source: str,
    command: str,
    report: str,
    job: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(source)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().err == report
    assert Path("job.yaml").read_text() == job


def test_page_has_examples_and_every_kind() -> None:
    assert len(EXAMPLES) == 2
    assert {kind for _, kind in CONVERTERS} <= set(re.findall(r"^\| (\w+) \(", PAGE, re.MULTILINE))
