"""Documents name only what exists: files, directories, targets of make. `make docs` checks anchors and links from page to page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from harness import rooms
from regroup_operator.api.conditions import TYPES
from regroup_operator.api.status import State
from tests.unit.words_in_code import words, yielded

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "cluster/*.md", "changelog.d/*.md")
    for path in ROOT.glob(pattern)
)
TREE = "docs/design/design.md"
TOP = "operator|trainer-image|crds|helm|manifests|cluster|harness|demo|chaos|bench|tests|docs|changelog.d"
_PATH = re.compile(rf"(?<![\w./<-])(?:{TOP})/[\w./-]*\w/?")
_NAME = re.compile(r"(?<![\w/<.-])[\w-]+\.md\b")
_ADR = re.compile(r"\badr/(\d{4})")
_TARGET = re.compile(r"\bmake ([a-z][a-z0-9-]+)")
_NOT_PROSE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^( *)([\w./-]+(?:/|\.py))(?:\s|$)")
MADE = ("bench/out",)
"""Written by commands, not kept."""


@pytest.mark.parametrize(
    ("package", "name"),
    [(rooms.LIBRARY, "rooms-after"), (rooms.OPERATOR, "operator-after")],
    ids=["library", "operator"],
)
def test_picture_of_the_rooms_is_current(package: rooms.Package, name: str) -> None:
    drawn = rooms.draw(package, rooms.imports(package, None))
    assert (ROOT / f"docs/design/{name}.svg").read_text() == drawn, "run `make generate`"
    assert "(circle)" not in drawn


def test_fragments_of_the_changelog_have_names_that_towncrier_collects() -> None:
    kinds = {
        kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    }
    names = {path.name for path in (ROOT / "changelog.d").iterdir()} - {"README.md"}
    wrong = [name for name in names if not re.fullmatch(rf"\+[\w-]+\.({'|'.join(kinds)})\.md", name)]
    assert wrong == [], "changelog.d/README.md says how a fragment is named"


def named(text: str) -> Iterator[str]:
    """Return the paths that a document names, as paths or glob patterns from the root."""
    for found in _PATH.findall(text):
        if not found.startswith(MADE):
            yield found
    yield from (f"docs/design/adr/{number}-*.md" for number in _ADR.findall(text))


def missing(text: str) -> list[str]:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return [
        *sorted({path for path in named(text) if not (ROOT / path).exists() and not any(ROOT.glob(path))}),
        *sorted(set(_NAME.findall(text)) - {path.name for path in DOCUMENTS}),
        *sorted({f"make {t}" for t in _TARGET.findall(_code(text)) if t not in targets}),
    ]


def _code(text: str) -> str:
    """Return what a document marks as code: "make" is a verb elsewhere."""
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`[^`\n]+`", text)])


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_what_a_document_names_exists(document: Path) -> None:
    assert missing((ROOT / document).read_text()) == []


_LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)(?:#[^)\s]*)?\)")


def dead_links(document: Path, text: str) -> list[str]:
    """Return the links to other files that do not work. On the site of docs/ nothing outside of docs/ can be reached."""
    home = ROOT / "docs" if document.parts[0] == "docs" else ROOT
    targets = {link: (ROOT / document.parent / link).resolve() for link in _LINK.findall(_NOT_PROSE.sub("", text))}
    return [link for link, target in targets.items() if not (target.exists() and target.is_relative_to(home))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_of_a_document_work(document: Path) -> None:
    assert dead_links(document, (ROOT / document).read_text()) == []


@pytest.mark.parametrize(
    ("document", "link", "works"),
    [
        ("docs/reference/settings.md", "library.md#strategies", True),
        ("docs/reference/settings.md", "nothing.md", False),
        ("docs/reference/settings.md", "../../helm/regroup/values.yaml", False),
        ("README.md", "helm/regroup/values.yaml", True),
        ("README.md", "docs/nothing.svg", False),
    ],
)
def test_a_dead_link_is_found(document: str, link: str, works: bool) -> None:
    text = f"See [there]({link}), https://example.com, and `[code](nothing.md)`."
    assert dead_links(Path(document), text) == ([] if works else [link])


_JOINED_LIST = re.compile(r"^(?![-*] |[#|>]|\d+\. ).+(?:\n.+)*?\n(?:[-*]|1\.) .+")


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if one.parts[0] == "docs"], ids=str)
def test_lists_begin_after_a_blank_line(document: Path) -> None:
    """The site's Markdown would take them for a part of the paragraph above."""
    text = re.sub(r"^```\w*\n.*?^```", "code", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [block for block in text.split("\n\n") if _JOINED_LIST.match(block)] == []


PARTS = ("tutorials", "how-to", "concepts", "reference")


@pytest.mark.parametrize(
    "page", [one for one in DOCUMENTS if one.parts[0] == "docs" and one.parts[1] in PARTS], ids=str
)
def test_a_page_says_first_what_its_reader_can_do_afterwards(page: Path) -> None:
    title, *rest = re.sub(r"<!--.*?-->\s*", "", (ROOT / page).read_text(), flags=re.DOTALL).split("\n\n")
    assert title.startswith("# ")
    assert rest[0].startswith("After this page you ")


def test_navigation_of_the_site_has_every_page_of_its_parts() -> None:
    listed = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text())
    pages = {str(one.relative_to("docs")) for one in DOCUMENTS if one.parts[0] == "docs" and one.parts[1] in PARTS}
    assert pages | {"index.md"} == {page for page in listed if not page.startswith("design/")}


def test_tree_in_the_design_exists() -> None:
    block = (ROOT / TREE).read_text().split("## 2. The rooms\n```\n")[1].split("```")[0]
    above: list[tuple[int, str]] = []
    paths = []
    for line in block.splitlines():
        found = _LINE.match(line)
        if found is None or len(found[1]) > 8:  # a description goes on
            continue
        above = [(depth, name) for depth, name in above if depth < len(found[1])] + [(len(found[1]), found[2])]
        paths.append("".join(name for _, name in above))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


CRD: dict[str, Any] = yaml.safe_load((ROOT / "crds/regroup.dev_distributedtrainingjobs.yaml").read_text())["spec"][
    "versions"
][0]


def test_columns_in_the_design_are_those_of_kubectl() -> None:
    text = (ROOT / TREE).read_text()
    narrow, wide = re.findall(r"Columns: ([\w, /]+?) \(.*; wide adds ([\w, /]+)\.", text)[0]
    columns = {c["name"]: c.get("priority", 0) for c in CRD["additionalPrinterColumns"]}
    assert narrow.split(", ") == [name for name, priority in columns.items() if not priority]
    assert wide.split(", ") == [name for name, priority in columns.items() if priority]


def rows(head: str, page: str = "reference/states.md") -> list[list[str]]:
    """Return the cells of each row of the page's table that begins with `head`."""
    lines = (ROOT / "docs" / page).read_text().split(f"\n| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_page_explains_every_state_and_condition() -> None:
    assert set(get_args(State)) <= {state for state, *_ in rows("State")}
    assert {condition for condition, *_ in rows("condition")} == set(TYPES)


GOOD = {
    "AllConnected", "AllRunning", "AsWanted", "Ended", "Finished", "NoneYet", "NotStarted", "Resumed", "Running", "Saved", "Taken",
    "Valid",
}  # fmt: skip
"""Reasons of conditions that are as they should be, or of which there is nothing to say yet."""


def test_page_explains_every_reason() -> None:
    reasons = words("JobCondition", 2) | words("_bounded", 2) | words("Wait", 0) | words("Verdict", 0)
    reasons |= words("SpecError", "reason") | yielded("_lacks", 0)
    assert {"Connecting", "HeldBack", "Hung", "NoWitness", "NameTaken"} <= reasons
    explained = {word for _, reason, *_ in rows("condition") for word in re.findall(r"\w+", reason)}
    assert sorted(reasons - explained - GOOD - set(get_args(State))) == []


def test_page_explains_every_event() -> None:
    reasons = words("EventNote", 1) | words("Announce", 2) | words("replace", "reason") | words("verdict_of", 2)
    assert {"Resized", "MemberLost", "RolledBack", "DeleteFailed"} <= reasons
    told = {word.strip() for reason, *_ in rows("reason") for word in reason.split(",") if " " not in word.strip()}
    assert told == reasons


def test_page_explains_every_cause_of_an_incident() -> None:
    causes = words("Announce", "cause") | words("replace", "cause") | words("_Finding", 2)
    assert {"Resized", "Resumed", "Stopped", "Overdue"} <= causes
    explained = {word.strip() for cause, *_ in rows("cause", "how-to/incidents.md") for word in cause.split(",")}
    assert sorted(causes - explained) == ["Started"], "the first generation is no incident"


def test_fields_of_the_status_in_the_design_exist() -> None:
    text = (ROOT / TREE).read_text().split("- Status also has ")[1].split(".\n")[0]
    fields = re.findall(r"(?:^|, |\n\s*)`(\w+)", text)
    assert len(fields) > 8
    assert set(fields) <= set(CRD["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param("see tests/unit/test_documents.py, docs/ and design.md (adr/0001)", [], id="all of it is there"),
        pytest.param("tests/unit/test_nothing.py", ["tests/unit/test_nothing.py"], id="a file that is not"),
        pytest.param("style-guide.md", ["style-guide.md"], id="a document that is not"),
        pytest.param("adr/9999", ["docs/design/adr/9999-*.md"], id="a decision record that is not"),
        pytest.param("`make test`, `make coffee`; to make haste", ["make coffee"], id="a target that is not"),
    ],
)
def test_what_is_missing_is_found(text: str, wanted: list[str]) -> None:
    assert missing(text) == wanted
