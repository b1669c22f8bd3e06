"""Reads from a script's text which environment variables it sets before it imports torch. Pure.

Some libraries read their variables as they are loaded: OMP_NUM_THREADS, TORCH_LOGS. The zygote has loaded torch before the script
runs, so it has to know those values beforehand. A value that is written in the script's text goes to the zygote. If only the
running script knows the value of such a variable, the script is started without a zygote.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

READ_AT_IMPORT = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "PYTORCH_JIT", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)  # fmt: skip
"""Prefixes of the names of variables that torch and its libraries read while they are imported."""


@dataclass(frozen=True)
class ScriptSettings:
    """The environment variables that a script sets before its first import of torch."""

    values: dict[str, str | None] = field(default_factory=dict)
    """Values by name; None: the script removes the variable."""
    unknown: str = ""
    """Name of a variable in READ_AT_IMPORT whose value the text does not show; empty: there is none."""


def script_settings(source: bytes, environ: Mapping[str, str]) -> ScriptSettings:
    """Return the variables that a script with this source sets before its first import of torch.

    `environ` is the environment of its processes. A source that cannot be parsed sets nothing; python itself will report it.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: the source is nested too deeply
        return ScriptSettings()
    values: dict[str, str | None] = {}
    for statement, is_certain in _until_torch(body):
        for name, value, is_default in _assignments(statement):
            if is_default and (values.get(name) if name in values else environ.get(name)) is not None:
                continue
            if is_certain and not isinstance(value, _Unknown):
                values[name] = value
            elif name.startswith(READ_AT_IMPORT):
                return ScriptSettings(values, name)
    return ScriptSettings(values)


class _Unknown:
    """A value that the text does not show."""


def _until_torch(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the statements before the first import of torch, each with True if it certainly runs."""
    for statement in _flat(body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = (
                [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [a.name for a in statement.names]
            )
            if any(name.split(".")[0] == "torch" for name in names):
                return
        elif isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)):
            yield statement, True
        else:
            yield statement, False  # a function may run before the import, a branch may not


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in the order in which they run. `try`, `with` and `if __name__ == "__main__"` give their bodies."""
    for statement in body:
        if isinstance(statement, (ast.Try, ast.With)) or (isinstance(statement, ast.If) and _is_main(statement.test)):
            yield from _flat(statement.body)
        else:
            yield statement


_MAIN = ast.dump(ast.parse("__name__ == '__main__'", mode="eval").body)


def _is_main(test: ast.expr) -> bool:
    return ast.dump(test) == _MAIN


def _assignments(statement: ast.AST) -> Iterator[tuple[str, str | _Unknown | None, bool]]:
    """Yield (name, value, is_default) for each assignment to the environment. A default applies if the variable is not set."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield from _named(target.slice, node.value)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield from _named(target.slice, None)
        elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
            yield from _of_mapping(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _of_call(node, node.func)


def _of_call(call: ast.Call, function: ast.Attribute) -> Iterator[tuple[str, str | _Unknown | None, bool]]:
    arguments = call.args
    if function.attr == "putenv" and len(arguments) == 2:
        yield from _named(arguments[0], arguments[1])
    elif not _is_environ(function.value):
        return
    elif function.attr == "setdefault" and len(arguments) == 2:
        yield from _named(arguments[0], arguments[1], is_default=True)
    elif function.attr == "pop" and arguments:
        yield from _named(arguments[0], None)
    elif function.attr == "update":
        for argument in arguments:
            yield from _of_mapping(argument)
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, _value(keyword.value), False


def _of_mapping(mapping: ast.expr) -> Iterator[tuple[str, str | _Unknown | None, bool]]:
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values):
            if key is not None:
                yield from _named(key, value)


def _named(
    key: ast.expr, value: ast.expr | None, *, is_default: bool = False
) -> Iterator[tuple[str, str | _Unknown | None, bool]]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        yield key.value, None if value is None else _value(value), is_default


def _value(value: ast.expr) -> str | _Unknown:
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "str"
        and len(value.args) == 1
    ):
        inner = value.args[0]
        return str(inner.value) if isinstance(inner, ast.Constant) else _Unknown()
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else _Unknown()


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
