"""The page on the commands is what the parsers say."""

from __future__ import annotations

import re
from pathlib import Path

from regroup_cli.reference import commands_page

PAGE = Path(__file__).parents[3] / "docs/reference/commands.md"


def test_page_of_the_commands_is_current() -> None:
    assert PAGE.read_text() == commands_page(), "run `make generate`"


def test_page_has_every_command_with_its_options_and_choices() -> None:
    page = commands_page()
    commands = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert len(commands) == len(set(commands)) > 10
    assert {"regroup run", "regroup checkpoint verify", "kubectl regroup why"} <= set(commands)
    assert "| `-f`, `--follow` | go on printing what is written, until the job ends |" in page, (
        "an option without a value"
    )
    assert "| `--gpus auto|none` |" not in page, "a bar would end the cell"
    assert r"| `--gpus auto\|none` |" in page
    assert "%(" not in page
    assert "%%" not in page
