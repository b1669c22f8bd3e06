"""Dataclass <-> JSON for every message of the protocol.

A message class is a frozen dataclass; its JSON object has `type` (the class's TYPE) and the fields in camelCase. Decoding
is strict on what it needs: a missing or wrongly typed field is a ProtocolError of one sentence. It ignores fields that it does not
know, so that a newer peer may say more.
"""

import dataclasses
import functools
import json
import typing
from typing import Any, NamedTuple, TypeVar, Union

T = TypeVar("T")


class ProtocolError(ValueError):
    """A message that cannot be used; its text is one sentence for the sender."""


def camel(name: str) -> str:
    """`rank_offset` -> `rankOffset`."""
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


class _Field(NamedTuple):
    """A field of a message class, as encoding and decoding need it."""

    name: str
    key: str
    hint: Any
    is_required: bool
    plain: Any
    """The type of a value that is taken as it is; None: each value is looked at."""


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Return a class's resolved field types: it takes 40 us."""
    return typing.get_type_hints(cls)


@functools.cache
def _fields(cls: Any) -> tuple[_Field, ...]:
    """Return a message class's fields. Looked up once for each class: a message comes with each committed step."""
    hints = _hints(cls)
    missing = dataclasses.MISSING
    return tuple(
        _Field(
            f.name,
            camel(f.name),
            hints[f.name],
            f.default is missing and f.default_factory is missing,
            _plain(hints[f.name]),
        )
        for f in dataclasses.fields(cls)
    )


def _plain(hint: Any) -> Any:
    inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) is Union and len(inner) == 1:
        hint = inner[0]
    return hint if hint in (str, int, float, bool) else None


_TOO_LARGE = 2**63
_MOST = 1e100
"""Bound for the floats of a message. JSON has no word for infinity, and `1e400`, products and sums of large numbers would turn into
it."""

_PLAIN = frozenset({str, int, bool, type(None)})
"""Types of values that are JSON data as they are."""


def to_json(value: Any) -> Any:
    """Return plain JSON data for a message, or for anything that a message contains."""
    cls = type(value)
    if cls in _PLAIN:
        return value
    if dataclasses.is_dataclass(cls):
        out: dict[str, Any] = {}
        kind = getattr(cls, "TYPE", None)
        if kind is not None:
            out["type"] = kind
        for field in _fields(cls):
            item = getattr(value, field.name)
            if type(item) not in _PLAIN:
                item = to_json(item)
            if item is not None:
                out[field.key] = item
        return out
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [to_json(item) for item in value]
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, float) and not abs(value) < _MOST:
        return None  # a loss that is not a number, or no number that anybody reads, is not said
    return value


def from_json(cls: type[T], data: Any, where: str = "") -> T:
    """Build `cls` (a dataclass of this package) from JSON data. Raises ProtocolError."""
    where = where or cls.__name__
    if not isinstance(data, dict):
        raise ProtocolError(f"{where} must be a JSON object, not {type(data).__name__}.")
    values: dict[str, Any] = {}
    for field in _fields(cls):  # type: ignore[arg-type]
        item = data.get(field.key)
        if item is not None:
            # Nearly all of them are. Longer integers than anybody counts are no numbers for a float or a status.
            most = _LARGEST.get(field.plain)
            plain = type(item) is field.plain and (most is None or -most < item < most)
            values[field.name] = item if plain else _convert(field.hint, item, f"{where}.{field.key}")
        elif field.is_required:
            if type(None) not in typing.get_args(field.hint):
                raise ProtocolError(f"{where}.{field.key} is missing.")
            values[field.name] = None
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union:
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _convert(inner, value, where)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        item_hints = _hints(hint)
        if not isinstance(value, list) or len(value) != len(item_hints):
            raise ProtocolError(f"{where} must be a list of {len(item_hints)} values.")
        return hint(*(_convert(h, item, where) for h, item in zip(item_hints.values(), value)))
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where} must be a list, not {type(value).__name__}.")
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} must be a JSON object, not {type(value).__name__}.")
        return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise ProtocolError(f"{where} must be a number of 64 bits.")
    if isinstance(value, float) and not abs(value) < _MOST:
        raise ProtocolError(f"{where} must be a number between -{_MOST:g} and {_MOST:g}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ProtocolError(f"{where} must be {_NAMES.get(hint, hint.__name__)}, not {type(value).__name__}.")
    return value


_LARGEST = {int: _TOO_LARGE, float: _MOST}
_NAMES = {int: "an integer", str: "a string", float: "a number", bool: "true or false", dict: "a JSON object"}


class Registry:
    """The message classes of one direction, by their TYPE."""

    def __init__(self, *classes: type[Any]) -> None:
        self.classes = classes
        self._classes = {cls.TYPE: cls for cls in classes}

    def decode(self, data: Any) -> Any:
        """Return the message that the JSON object stands for. Raises ProtocolError."""
        if not isinstance(data, dict) or not isinstance(data.get("type"), str):
            raise ProtocolError("A message must be a JSON object with a string field `type`.")
        cls = self._classes.get(data["type"])
        if cls is None:
            raise ProtocolError(
                f"Unknown message type {data['type'][:80]!r}; known: {', '.join(sorted(self._classes))}."
            )
        return from_json(cls, data, data["type"])

    def decode_line(self, line: Union[bytes, str]) -> Any:
        """Like `decode`, for one line of NDJSON."""
        return self.decode(parse(line))


def parse(text: Union[bytes, str]) -> Any:
    """Return the JSON value of a text. Raises ProtocolError instead of a decoder's own errors."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"The message is not JSON: {error}.") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def line(message: Any) -> bytes:
    """Return a message as one line of NDJSON, newline included."""
    return canonical(to_json(message)) + b"\n"


def canonical(data: Any) -> bytes:
    """Return the one byte form of JSON data that digests are taken of."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
