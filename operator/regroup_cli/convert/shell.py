"""Reads the simple commands in a shell's text, as far as a training script needs it.

It knows quotes, comments, line continuations, operators and redirections. It runs nothing: $(command) stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from regroup_operator.api import SpecError

LITERAL = "\ue000"
"""Stands for a dollar that the shell does not expand."""
SHELLS = ("sh", "bash", "dash", "zsh")
_BRACES = re.compile(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_QUOTED = re.compile(r"\\.|'[^']*'|\"(\\.|[^\"\\])*\"|\$\([^)]*\)|`[^`]*`", re.DOTALL)
"""Parts of a word that a shell does not look into: quotes, escapes and commands."""
_TILDE = re.compile(r"~([\w.+-]*)(?=[/:\s;&|<>()]|$)")
_OPENS = frozenset({"if", "for", "while", "until", "case", "{", "function"})
CLOSES = frozenset({"fi", "done", "esac", "}"})


@dataclass(frozen=True)
class Command:
    """A simple command of a shell's text."""

    words: tuple[str, ...]
    line: int
    """The number of the line in which it begins, from 1."""
    text: str
    """The command as it is written."""
    end: str
    """The operator behind it; "" or a line end where it stands alone."""
    depth: int = 0
    """Number of loops and conditions around it."""
    patterns: tuple[str, ...] = ()
    """Words that the shell replaces by the files that they fit, if there are any: those with *, ? or [ outside of quotes."""
    variables: tuple[str, ...] = ()
    """Names of variables outside of quotes. The shell looks for patterns in their values, too."""
    raw: tuple[str, ...] = ()
    """The words as they are written, with their quotes."""
    braces: tuple[str, ...] = ()
    """Words that the shell makes several words of, such as {a,b}."""


def commands(text: str) -> Iterator[Command]:
    """Yield the simple commands of a text. Raises SpecError for a quote without end and for a here-document."""
    words: list[str] = []
    raw: list[str] = []
    start, begin, depth = 1, 0, 0
    for kind, word, line, at in _tokens(text):
        if kind == "word":
            if not words:
                start, begin, raw = line, at[0], []
            words.append(word)
            raw.append(text[at[0] : at[1]])
            continue
        if not words:
            continue
        if words[0] in CLOSES or words[0].endswith("()") or (words[0] in _OPENS):
            depth += -1 if words[0] in CLOSES else 1
            inner = 1
        else:
            inner = depth
        patterns = tuple(one for one in raw if is_pattern(_unquoted(one)))
        braces = tuple(one for one in raw if _BRACES.search(_unquoted(one)))
        variables = tuple(one[1] or one[2] for part in raw for one in _REFERENCE.finditer(_QUOTED.sub(" ", part)))
        written = text[begin : at[0]].strip()
        yield Command(
            tuple(words), start, written, word, max(inner, 0), patterns, variables, raw=tuple(raw), braces=braces
        )
        words = []


def _unquoted(raw: str) -> str:
    """Return the part of a word in which a shell looks for patterns: no quotes, escapes, variables and commands."""
    return re.sub(r"\$\{[^}]*\}|\$[*?]", "", _QUOTED.sub("", raw))


def is_pattern(text: str) -> bool:
    """Return whether a shell replaces a text without quotes by the files that it fits."""
    return re.search(r"[*?[]", text) is not None


def _tokens(text: str) -> Iterator[tuple[str, str, int, tuple[int, int]]]:
    """Yield (`word` or `end`, its text, its line, its place). Redirections are left out."""
    at, line, redirected = 0, 1, False
    while at < len(text):
        start = at
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text[at] in " \t\r":
            at += 1
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif found := re.compile(r"&>>?|\d*(>>?&?|<&?(?!<))\d*-?").match(text, at):
            at = found.end()
            redirected = found[0][-1] in "<>" or found[0][-1] == "&"
        elif text.startswith("<<", at):
            raise SpecError(f"line {line} has a here-document, which cannot be converted. Put it into a file.")
        elif found := re.compile(r"\n|;;?|&&|\|\||[|&()]").match(text, at):
            at = found.end()
            yield "end", found[0], line, (start, at)
            line += found[0] == "\n"
        else:
            word, at = _word(text, at, line)
            if not redirected:
                yield "word", word, line, (start, at)
            redirected = False
            line += text[start:at].count("\n")
    yield "end", "", line, (len(text), len(text))


def _word(text: str, at: int, line: int) -> tuple[str, int]:
    """Return the word that begins at a place, without its quotes, and the place behind it."""
    out, quote = "", ""
    while at < len(text):
        one = text[at]
        if quote == "'":
            if one == "'":
                quote = ""
            else:
                out += LITERAL if one == "$" else one
        elif one == "\\" and at + 1 < len(text):
            at += 1
            out += "" if text[at] == "\n" else LITERAL if text[at] == "$" else text[at]
        elif text.startswith("$(", at) or one == "`":
            end = _closing(text, at)
            out += text[at:end]
            at = end
            continue
        elif one == '"' or (one == "'" and not quote):
            quote = "" if quote == one else one
        elif not quote and (
            one in " \t\r\n;&|<>" or (one in "()" and not out.endswith(("=", "(")) and text[at : at + 2] != "()")
        ):
            break
        elif not quote and (found := _TILDE.match(text, at)) and _may_be_home(out):
            out += f"$(echo {found[0]})" if found[1] else "$HOME"
            at = found.end()
            continue
        elif not quote and text.startswith("=(", at):
            end = _closing(text, at)
            out += text[at:end]
            at = end
            continue
        else:
            out += one
        at += 1
    if quote:
        raise SpecError(f"line {line} opens a quote ({quote}) that does not end. Close it.")
    return out, at


def _may_be_home(before: str) -> bool:
    """Return whether a tilde behind this text is a home directory: it begins a word, or a path in the value of an assignment."""
    return not before or (before[-1] in "=:" and is_assignment(before))


def _closing(text: str, at: int) -> int:
    """Return the place behind the $(...) or `...` that begins at a place."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    depth = 0
    for index in range(at + 1, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    return len(text)


def expand(word: str, variables: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return a word with the values of its variables, and what is left that only a shell could expand."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[2], found[3]
        return variables.get(name, found[0] if default is None else default)

    made = _REFERENCE.sub(value, word)
    left = [found[0] for found in re.finditer(r"\$\([^)]*\)?|\$\w+|\$\{[^}]*\}?|`[^`]*`", made)]
    return made.replace(LITERAL, "$"), left


def split_values(command: Command, variables: Mapping[str, str]) -> list[str]:
    """Return a command's words, as a shell splits those with a variable outside of quotes. An empty value makes no word."""
    out = []
    for word, raw in zip(command.words, command.raw):
        is_bare = "$" in raw and not _QUOTED.search(raw) and not is_assignment(word)
        text = expand(word, variables)[0]
        out += text.split() if is_bare and "$" not in text else [word]  # a dollar in a value is none to expand
    return out


def is_assignment(word: str) -> bool:
    """Return whether a word is NAME=value."""
    return re.match(r"[A-Za-z_]\w*(\[\w*\])?=", word) is not None


def text_of(command: Sequence[str]) -> str | None:
    """Return the text that a command such as `bash -xc TEXT` runs, None if the command is another one."""
    if not command or PurePosixPath(command[0]).name not in SHELLS:
        return None
    rest = list(command[1:])
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if "c" in option and not option.startswith("--"):
            return rest[0] if len(rest) == 1 else None
        if option[-1] == "o":
            rest = rest[1:]
    return None
