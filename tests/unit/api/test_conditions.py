"""`set_condition`: one entry per type, and lastTransitionTime means what it says."""

from __future__ import annotations

from regroup_operator.api.conditions import TRAINING, Condition, set_condition

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"


def test_same_status_keeps_the_transition_time_and_takes_the_new_words() -> None:
    first = set_condition([], TRAINING, "True", "Training", "3 of 3 workers train.", EARLY, 1)
    second = set_condition(first, TRAINING, "True", "Training", "2 of 3 workers train.", LATE, 2)
    assert second == [
        Condition(
            type="Training",
            status="True",
            reason="Training",
            message="2 of 3 workers train.",
            last_transition_time=EARLY,
            observed_generation=2,
        )
    ]
    assert first[0].message == "3 of 3 workers train."


def test_changed_status_moves_the_transition_time_and_keeps_the_order() -> None:
    both = set_condition(
        set_condition([], TRAINING, "True", "Training", "", EARLY, 1), "Degraded", "False", "Whole", "", EARLY, 1
    )
    changed = set_condition(both, TRAINING, "False", "Recovering", "", LATE, 1)
    assert [(c.type, c.last_transition_time) for c in changed] == [("Training", LATE), ("Degraded", EARLY)]
