"""Operators and agents of one protocol version, whatever their releases, understand each other.

A job outlives upgrades of the operator, and its agents are those that it was started with. `version-1.json` has the messages as
release 0.1.0 writes them. It changes only when the oldest version that is served changes: what fails here breaks running jobs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from regroup.protocol import OLDEST, VERSION, codec, wire
from regroup_operator.endpoint import server

Fields = dict[str, list[Any]]
"""By name in JSON: the type, and whether it must be there."""

RECORDED: dict[str, dict[str, Fields]] = json.loads((Path(__file__).parent / f"version-{OLDEST}.json").read_text())
REPORTS: tuple[type[Any], ...] = (wire.Report, *wire.REPORTS.classes)
COMMANDS: tuple[type[Any], ...] = (wire.Command, *wire.COMMANDS.classes, wire.Answered)


def schema(classes: tuple[type[Any], ...]) -> dict[str, Fields]:
    """Return the fields of these messages and of everything in them, by class."""
    found: dict[str, Fields] = {}
    todo: list[Any] = list(classes)
    while todo:
        cls = todo.pop()
        if cls.__name__ in found:
            continue
        hints = typing.get_type_hints(cls)
        if dataclasses.is_dataclass(cls):
            required = {f.name: _is_required(f, hints[f.name]) for f in dataclasses.fields(cls)}
        else:  # a NamedTuple is a list in JSON: all of it has to be there
            required = dict.fromkeys(hints, True)
        found[cls.__name__] = {codec.camel(name): [_name(hints[name]), required[name]] for name in required}
        todo += [inner for hint in hints.values() for inner in _classes(hint)]
    return found


def _is_required(field: dataclasses.Field[Any], hint: Any) -> bool:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return not has_default and type(None) not in typing.get_args(hint)


def _classes(hint: Any) -> list[Any]:
    inner = [one for argument in typing.get_args(hint) for one in _classes(argument)]
    is_message = dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")
    return [hint, *inner] if is_message and isinstance(hint, type) else inner


def _name(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"[a-z_.]+\.(?=[A-Z])", "", name)  # without modules


def breaks(sender: dict[str, Fields], reader: dict[str, Fields]) -> list[str]:
    """Return what a reader needs and a sender does not write, or writes with another type."""
    out = []
    for name, fields in reader.items():
        written = sender.get(name)
        if written is None:
            continue  # nobody sends it
        for key, (kind, required) in fields.items():
            if key in written and _plain(written[key][0]) != _plain(kind):
                out.append(f"{name}.{key} is {written[key][0]}, and {kind} is expected")
            if required and (key not in written or not _is_sent(written[key])):
                out.append(f"{name}.{key} is needed, and may be missing")
    return out


def _plain(kind: str) -> str:
    return kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind


def _is_sent(field: list[Any]) -> bool:
    """None is left out of JSON; a default is not."""
    return not str(field[0]).startswith("Optional[")


def test_operator_understands_the_reports_of_the_oldest_agent() -> None:
    assert breaks(RECORDED["reports"], schema(REPORTS)) == []
    assert RECORDED["reports"].keys() <= schema(REPORTS).keys(), "an older agent sends what nobody reads any more"


def test_oldest_agent_understands_the_commands_of_the_operator() -> None:
    assert breaks(schema(COMMANDS), RECORDED["commands"]) == []
    assert RECORDED["commands"].keys() <= schema(COMMANDS).keys(), "an older agent waits for what nobody sends any more"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param({"lossScale": ["float", True]}, "Progress.lossScale is needed, and may be missing", id="needed"),
        pytest.param({"step": ["str", True]}, "Progress.step is int, and str is expected", id="another type"),
        pytest.param({"step": ["Optional[int]", False], "more": ["str", False]}, "", id="fields that may be missing"),
    ],
)
def test_what_breaks_an_older_agent_is_found(change: Fields, what: str) -> None:
    now = RECORDED["reports"] | {"Progress": RECORDED["reports"]["Progress"] | change}
    assert breaks(RECORDED["reports"], now) == ([what] if what else [])


@pytest.mark.parametrize(
    ("version", "is_served"),
    [(OLDEST - 1, False), (OLDEST, True), (VERSION, True), (VERSION + 1, False), (-1, False)],
)
def test_agents_are_served_from_the_oldest_version_on(version: int, is_served: bool) -> None:
    refusal = server.unsupported(version)
    assert (refusal is None) == is_served
    if refusal is not None:
        assert refusal.startswith(f"Protocol version {version} is not supported; this operator supports {OLDEST}")
