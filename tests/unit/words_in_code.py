"""Which words the operator's code can put into an argument: reasons of conditions and events, causes of incidents.

Found in the source: constants, both sides of an `or` and of an `if ... else`, names of constants, and what a local variable is set
to. What only the running program knows (a kubelet's reason, an attribute) is not among them.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

OPERATOR = Path(__file__).resolve().parents[2] / "operator"


def words(function: str, argument: int | str) -> set[str]:
    """Return the words that calls of `function` can have as `argument`: a position, or a keyword."""
    return {
        word
        for place in _places()
        for call in place.calls(function)
        for word in place.words_of(_argument(call, argument))
    }


def yielded(function: str, position: int) -> set[str]:
    """Return the words that `function` can have at this position of the tuples that it yields."""
    return {
        word
        for place in _places()
        if place.body.name == function
        for node in ast.walk(place.body)
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple)
        for word in place.words_of(node.value.elts[position])
    }


def _argument(call: ast.Call, argument: int | str) -> ast.expr | None:
    if isinstance(argument, int):
        return call.args[argument] if argument < len(call.args) else None
    return next((keyword.value for keyword in call.keywords if keyword.arg == argument), None)


@cache
def _places() -> tuple[_Place, ...]:
    found = []
    for path in sorted((OPERATOR / "regroup_operator").rglob("*.py")):
        name = ".".join(path.relative_to(OPERATOR).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(_Place(name, node))
    return tuple(found)


@dataclass(frozen=True)
class _Place:
    """A function of a module."""

    module: str
    body: ast.FunctionDef | ast.AsyncFunctionDef

    def calls(self, function: str) -> Iterator[ast.Call]:
        for node in ast.walk(self.body):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                yield node

    def words_of(self, node: ast.expr | None) -> Iterator[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
            yield node.value
        for part in _parts(node):
            yield from self.words_of(part)
        if isinstance(node, ast.Name):
            constant: Any = getattr(importlib.import_module(self.module), node.id, None)
            if isinstance(constant, str):
                yield constant
            for value in self._values(node.id):
                yield from self.words_of(value)

    def _values(self, name: str) -> Iterator[ast.expr]:
        """Yield what a local variable is set to, also by a loop over a table that stands in it."""
        for node in ast.walk(self.body):
            if isinstance(node, ast.Assign) and name in map(_name, node.targets):
                yield node.value
            if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Tuple):
                for place, target in enumerate(node.target.elts):
                    if _name(target) == name:
                        yield from (row.elts[place] for row in node.iter.elts if isinstance(row, ast.Tuple))


def _parts(node: ast.expr | None) -> list[ast.expr]:
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return node.values if isinstance(node, ast.BoolOp) else []


def _name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None
