"""Check the arguments that a program gives to the Python client, and name them in errors as Python does.

A wrong type would otherwise be a TypeError from the depths of the client, or a job with other arguments than its author meant.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regroup_client.errors import ApiError, ArgumentError, ClientError

_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?: ([A-Z]+)\b)?")
_WHOLE = ("min", "max", "user")
_TEXTS = ("env_from", "data", "pip")


@contextlib.contextmanager
def in_words_of_python() -> Iterator[None]:
    """Name arguments in errors as they are in Python: `--env-from` becomes `env_from`, and `--slot N` becomes `slot=N`."""
    try:
        yield
    except ApiError:
        raise  # these are the words of the API server
    except ClientError as error:
        error.args = (_OPTION.sub(_word, str(error)),)
        raise


def _word(option: re.Match[str]) -> str:
    return option[1].replace("-", "_") + (f"={option[2]}" if option[2] else "")


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """Return a whole number, also one of NumPy. Raises ArgumentError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ArgumentError(f"{name} ({value!r}) is no whole number. Give one, such as 2.")
    if least is not None and number < least:
        raise ArgumentError(f"{name} ({number}) is less than {least}. Give at least {least}.")
    return number


def seconds(name: str, value: Any) -> float:
    """Return a number of seconds. Raises ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # not a number
        raise ArgumentError(f"{name} ({value!r}) is no number of seconds. Give one, such as 60.")
    return value


def text(name: str, value: Any) -> str:
    """Return a text, a number or a path as text. Raises ArgumentError."""
    if value is None or isinstance(value, (bytes, Mapping, list, tuple, set)):
        raise ArgumentError(f"{name} ({value!r}) is no text. Give a text or a number.")
    found = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if "\0" in found:
        raise ArgumentError(f"{name} ({found!r}) has a NUL character. Remove it.")
    return found


def texts(name: str, values: Any) -> list[str]:
    """Return the elements of a list as texts. Raises ArgumentError: one text would become a list of its letters."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise ArgumentError(f"{name} ({values!r}) is no list. Give a list, such as ['10'].")
    return [text(name, value) for value in values]


def variables(values: Any) -> dict[str, str]:
    """Return environment variables as texts. Raises ArgumentError."""
    if not isinstance(values, Mapping):
        raise ArgumentError(f"env ({values!r}) is no dict. Give one, such as {{'SEED': '1'}}.")
    found = {text("env", name): text(f"env[{name!r}]", value) for name, value in values.items()}
    for name in found:
        if not name or "=" in name:
            raise ArgumentError(f"env ({name!r}) is no name of a variable. Remove = from it.")
    return found


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further arguments of `submit`, without those that are None: they have their defaults. Raises ArgumentError."""
    return {name: _option(name, value) for name, value in given.items() if value is not None}


def _option(name: str, value: Any) -> Any:
    if name in _WHOLE:
        return whole(name, value)
    if name in _TEXTS:
        return texts(name, value)
    return variables(value) if name == "env" else text(name, value)
