"""The pattern of spec.progress.log: its named groups, and the rules that operator and agent hold it to."""

import re
import warnings

STEP, TOTAL, PERCENT, LOSS = "step", "total", "percent", "loss"
GROUPS = (STEP, TOTAL, PERCENT, LOSS)
"""Names of the groups that mean something. A pattern has at least one of them but `total`, and no other named group."""
MAX_PATTERN = 1000
"""Longest pattern, in characters."""


class PatternError(ValueError):
    """A pattern that cannot be used. Its text completes the sentence `spec.progress.log ...`."""


def compile_pattern(text: str) -> "re.Pattern[str]":
    """Return the compiled pattern. Raises PatternError.

    Python's own syntax holds. An operator and an agent may run different versions of Python, so the agent may refuse a pattern
    that the operator has accepted.
    """
    if len(text) > MAX_PATTERN:
        raise PatternError(f"has {len(text)} characters. Use at most {MAX_PATTERN}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        raise PatternError(f"is no regular expression of Python: {error}. Correct the pattern.") from None
    known = ", ".join(GROUPS)
    for name in pattern.groupindex:
        if name not in GROUPS:
            raise PatternError(f"has a group named {name}. Name the groups {known}; write other groups as (?:...).")
    if not set(pattern.groupindex) - {TOTAL}:
        raise PatternError(
            f"has none of the groups {known.replace(f' {TOTAL},', '')}. Write a number as (?P<step>\\d+)."
        )
    return pattern
