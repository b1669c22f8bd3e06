"""`python -m tests.model [RULE ...]`: search the wide scenarios, each rule off and on. Minutes, and 4 GB of memory."""

from __future__ import annotations

import sys

from tests.model.core import Core
from tests.model.scenarios import QUICK, WIDE, WIDE_MAX_STATES
from tests.model.search import search


def main(rules: list[str]) -> int:
    """Print every outcome; 1 if one is not as expected. A bound that was hit is said, and is no failure."""
    surprises = 0
    for trace in (*QUICK, *WIDE):
        if rules and trace.rule not in rules:
            continue
        for title, scenario, expected in (
            (f"{trace.id}, {trace.rule} off", trace.without_rule, trace.expected),
            (f"{trace.id}, all rules on", trace.scenario, "holds"),
        ):
            got = search(Core(scenario), max_states=WIDE_MAX_STATES, live=trace.is_live)
            is_expected = got.verdict == expected and trace.words in (
                got.detail if expected != "holds" else trace.words
            )
            surprises += not is_expected
            print(f"{title}: {'' if is_expected else 'UNEXPECTED '}{got}", flush=True)
    return min(surprises, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
