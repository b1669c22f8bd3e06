"""Fields of a source. The rules that read a Field leave Findings on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from regroup_operator.api import SpecError

Path = tuple[str | int, ...]


class Verdict(StrEnum):
    """The fate of a field."""

    MAPPED = "mapped"
    """The job has a field with the same meaning."""
    CHANGED = "changed"
    """The job has a field for it, with another meaning, which the sentence explains."""
    UNNEEDED = "unneeded"
    """Regroup or the API server does by itself what the field asks for."""
    DROPPED = "dropped"
    """The job has nothing for it, and something is lost."""


@dataclass(frozen=True)
class Finding:
    """The fate of one field."""

    path: str
    """The field in the source, such as spec.runPolicy.suspend."""
    verdict: Verdict
    sentence: str
    """For MAPPED the field of the job, else a sentence."""


@dataclass
class Ledger:
    """The findings on one document, by path."""

    source: str = ""
    """Stands before each path, where a job is made from several documents."""
    found: list[tuple[Path, Finding]] = field(default_factory=list)
    settled: dict[Path, Finding] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)
    """Fields that a rule has read, with all below them."""

    def add(self, path: Path, verdict: Verdict, sentence: str) -> None:
        self.found.append((path, Finding(self.source + dotted(path), verdict, sentence)))

    def settle(self, path: Path, verdict: Verdict, sentence: str) -> None:
        """Record the fate of a field. It takes the place of an earlier one, which a shared rule recorded; notes stay."""
        earlier = self.settled.pop(path, None)
        if earlier is not None:
            self.found.remove((path, earlier))
        self.add(path, verdict, sentence)
        self.settled[path] = self.found[-1][1]

    def findings(self, document: Any) -> list[Finding]:
        """Return the findings in the order of the document's fields, with one for each field that no rule has read."""
        order = {path: index for index, path in enumerate(_paths(document, ()))}
        for path in _unread(document, (), self.read):
            self.add(path, Verdict.DROPPED, "`regroup convert` has no rule for this field.")
        last = len(order)
        return [one for _, one in sorted(self.found, key=lambda entry: order.get(entry[0], last))]


class Field:
    """One field of a source. Its methods `mapped`, `changed`, `unneeded` and `dropped` record what became of it and of all below
    it. They return its value, and record nothing if the field is absent."""

    def __init__(self, value: Any, ledger: Ledger, path: Path = ()) -> None:
        self.value, self.ledger, self.path = value, ledger, path

    def __bool__(self) -> bool:
        """Return whether the source has the field. A field that is null counts as absent, as in Kubernetes."""
        return self.value is not None

    def __str__(self) -> str:
        return self.ledger.source + dotted(self.path)

    def at(self, *names: str) -> Field:
        """Return the field below this one."""
        found = self
        for name in names:
            found = Field(found._mapping().get(name), self.ledger, (*found.path, name))
        return found

    def part(self, path: Path) -> Field:
        """Return the field at a path below this one, through mappings and lists."""
        value = self.value
        for name in path:
            if isinstance(value, list) and isinstance(name, int) and name < len(value):
                value = value[name]
            else:
                value = value.get(name) if isinstance(value, Mapping) else None
        return Field(value, self.ledger, (*self.path, *path))

    def fields(self) -> Iterator[tuple[str, Field]]:
        """Yield each field of a mapping."""
        for name in self._mapping():
            if (one := self.at(name)).value is not None:
                yield name, one

    def items(self) -> Iterator[Field]:
        """Yield each item of a list."""
        if self.value is not None and not isinstance(self.value, list):
            raise SpecError(f"{self} is no list. Correct it.")
        for index, value in enumerate(self.value or ()):
            yield Field(value, self.ledger, (*self.path, index))

    def count(self, default: int) -> int:
        """Return a number that counts something, without recording anything."""
        if self.value is None:
            return default
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 0:
            raise SpecError(f"{self} ({self.value}) is no number of at least 0. Correct it.")
        return self.value

    def text(self) -> str:
        """Return the text of a scalar, "" if it is absent. Nothing is recorded."""
        return "" if self.value is None else str(self.value)

    def mapped(self, to: str) -> Any:
        return self._record(Verdict.MAPPED, to)

    def changed(self, sentence: str) -> Any:
        return self._record(Verdict.CHANGED, sentence)

    def unneeded(self, sentence: str) -> Any:
        return self._record(Verdict.UNNEEDED, sentence)

    def dropped(self, sentence: str) -> Any:
        return self._record(Verdict.DROPPED, sentence)

    def known(self) -> None:
        """Note that the field has been read and needs no word."""
        self.ledger.read.add(self.path)

    def note(self, sentence: str) -> None:
        """Record a change of meaning. The fields below this one still need rules, and it may be absent."""
        self.ledger.add(self.path, Verdict.CHANGED, sentence)

    def known_mapping(self) -> None:
        """Raise SpecError if the field is there, and no mapping."""
        self._mapping()

    def _record(self, verdict: Verdict, sentence: str) -> Any:
        if self.value is not None:
            self.ledger.read.add(self.path)
            self.ledger.settle(self.path, verdict, sentence)
        return self.value

    def _mapping(self) -> Mapping[str, Any]:
        if self.value is None:
            return {}
        if not isinstance(self.value, Mapping):
            raise SpecError(f"{self or 'The document'} is no mapping. Correct it.")
        return self.value


def dotted(path: Path) -> str:
    """Return a path as people write it: spec.containers[0].env, metadata.labels[a.b/c]."""
    out = ""
    for part in path:
        plain = isinstance(part, str) and not set(part) & set("./[] ")
        out += str(part) if not out else f".{part}" if plain else f"[{part}]"
    return out


def differences(one: Any, other: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each part in which two values differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*one, *other]):
            yield from differences(one.get(name), other.get(name), (*path, name))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and _of_mappings(one):
        for index, pair in enumerate(zip(one, other)):
            yield from differences(*pair, (*path, index))
    elif one != other:
        yield path


def _of_mappings(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _paths(value: Any, path: Path) -> Iterator[Path]:
    """Yield the path of a value and of all parts of it, in their order."""
    yield path
    parts: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from _paths(part, (*path, name))


def _unread(value: Any, path: Path, read: set[Path]) -> Iterator[Path]:
    """Yield the path of each value that no rule has read, itself or as a part of another."""
    if path in read or value is None:
        return
    if isinstance(value, Mapping):  # an empty one says nothing
        for name, part in value.items():
            yield from _unread(part, (*path, name), read)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _unread(part, (*path, index), read)
    else:
        yield path
