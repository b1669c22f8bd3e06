"""`regroup replay`: prints an operator's decision log as a table, and makes each decision again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from regroup.protocol.text import shorten
from regroup_operator.api import SpecError
from regroup_operator.decision_log import DecisionLogError, Line, decision_of, difference, from_line, reading
from regroup_operator.plan.job import plan_job


def run(args: argparse.Namespace) -> int:
    """Print a row for each decision, and return 1 if one is different now. Raises SpecError if the file cannot be read."""
    num_lines = number = 0
    try:
        for number, text in _lines(args.file):
            try:
                found = from_line(text)
            except DecisionLogError:
                if text.endswith("\n") or _is_json(text):
                    raise
                print("The last line is not whole: it was being written when the file was copied.")
                break
            with reading():
                key = "/".join(found.inputs.job.key)
            if args.job not in (None, key):
                continue
            num_lines += 1
            with reading():
                said = [f"{_time(found)}  {key}  {what}{f': {why}' if why else ''}" for what, why in rows(found)]
            for row in said:
                print(row)
            with reading():
                other = difference(found.decision, decision_of(plan_job(found.inputs)))
            if other is not None:
                where, then, now = other
                print(f"{args.file}, line {number}: {where} was {_short(then)} and is {_short(now)} now.")
                return 1
    except DecisionLogError as error:
        raise SpecError(f"{args.file}, line {number}: {error}") from None
    if num_lines == 0:
        raise SpecError(f"FILE ({args.file}) has no decision{f' on {args.job}' if args.job else ''}.")
    print(f"{num_lines} decisions, all made again alike.")
    return 0


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers. Raises SpecError if the file cannot be read.

    Errors of the loop that prints the lines are not caught here.
    """
    try:
        with open(path, encoding="utf-8") as lines:
            yield from enumerate(lines, 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(f"FILE ({path}) cannot be read ({why}). Give an operator's decision log.") from None


def rows(line: Line) -> Iterator[tuple[str, str]]:
    """Yield each decision and its reason, in the operator's own words."""
    decision, before = line.decision, line.inputs.job.status.to_dict()
    after = decision["status"]
    said = {c["type"]: c for c in before.get("conditions", ())}
    changed = [c for c in after.get("conditions", ()) if _word(said.get(c["type"], {})) != _word(c)]
    if decision["announced"]:
        membership = after["membership"]
        yield f"generation {membership['generation']} of workers {membership['members']}", _newest(after)
    for one in changed:
        yield f"{one['type']}={one['status']} ({one['reason']})", one["message"]
    for slot, attempt, avoid in decision["create"]:
        yield f"make worker {slot}.{attempt}", f"not on {', '.join(avoid)}" if avoid else ""
    for role, index, attempt in decision["create_roles"]:
        yield f"make pod {index}.{attempt} of role {role}", ""
    if decision["delete"]:
        yield f"delete {', '.join(decision['delete'])}", ""
    if decision["tell"]:
        yield f"tell {len(decision['tell'])} agents", ""
    for note in decision["notes"]:
        yield f"event {note['reason']}", note["note"]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _newest(status: Mapping[str, Any]) -> str:
    incidents = status.get("incidents") or []
    newest = incidents[-1] if incidents else {}
    return str(newest.get("decision", "")) if newest.get("generation") == status["membership"]["generation"] else ""


def _word(condition: Mapping[str, Any]) -> tuple[Any, Any]:
    return condition.get("status"), condition.get("reason")


def _time(line: Line) -> str:
    return datetime.fromtimestamp(line.inputs.clock.wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _short(value: Any) -> str:
    return shorten(str(value), 120)
