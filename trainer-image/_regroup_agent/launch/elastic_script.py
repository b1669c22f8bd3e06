"""Tells from a script's text whether it calls `hvd.elastic.run`. Pure, and nothing of the script runs.

Names are followed through imports and assignments, without regard to scopes. Comments and strings mean nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_OURS, _HOROVODS = "regroup.horovod", "horovod.torch"


def calls_elastic_run(source: str, is_horovod_ours: bool) -> bool | None:
    """Return whether the script calls `elastic.run` of `regroup.horovod`; None for a text that this version of Python cannot read.

    `is_horovod_ours` says that `horovod.torch` is the library's there.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    wanted = {f"{package}.elastic.run" for package in (_OURS, *([_HOROVODS] if is_horovod_ours else []))}
    names = _names(tree)
    used = {path for node in ast.walk(tree) if isinstance(node, ast.expr) for path in _paths(node, names)}
    return bool(wanted & used.union(*names.values()))


def _names(tree: ast.AST) -> dict[str, set[str]]:
    """Map each name of the script to the dotted paths that it may stand for."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                path = each.name if each.asname else each.name.split(".")[0]
                names.setdefault(each.asname or path, set()).add(path)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                # A star gives the decorator, too.
                name = "run" if each.name == "*" else each.name
                names.setdefault(each.asname or name, set()).add(f"{node.module}.{name}")
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for _ in range(2):  # an assignment may stand before the one whose name it uses
        for node in assigned:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, set()).update(list(_paths(node.value, names)))
    return names


def _paths(node: ast.expr, names: dict[str, set[str]]) -> Iterator[str]:
    """Yield the dotted paths that a name, or attributes of a name, may stand for."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        for path in names.get(node.id, ()):
            yield ".".join([path, *attributes])
