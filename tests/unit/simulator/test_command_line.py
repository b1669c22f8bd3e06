"""`python -m tests.simulator`: one sentence for what is no fault, and a table that can be read."""

from __future__ import annotations

import sys

import pytest

from tests.simulator.__main__ import main, table
from tests.simulator.faults import Fault
from tests.simulator.setting import setting_of
from tests.simulator.walk import Outcome


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--kinds", "kill,explode"], "--kinds: explode is no kind of fault. Known: api-down", id="a kind"),
        pytest.param(
            ["3", "--faults", "explode"], "--faults: explode is no kind of fault. Known: api-down", id="a fault"
        ),
        pytest.param(["3", "--faults", "kill when=3"], "--faults: when=3 is no field of a fault", id="a field"),
        pytest.param(["3", "--faults", "kill at=x"], "--faults: kill at=x cannot be read: ", id="a value"),
    ],
)
def test_what_is_no_fault_is_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulator", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_kind_whose_time_was_never_seen_has_none_in_the_table() -> None:
    outcome = Outcome(
        setting_of(1), [Fault("kill"), Fault("scale")], hits=["kill"], recoveries=[("scale", 1.5), ("scale", 2.5)]
    )
    kill, scale = (line.split() for line in table([outcome]).splitlines()[1:])
    assert kill == ["kill", "1", "1", "-", "-", "-", "0"]
    assert scale == ["scale", "1", "0", "2.50", "2.50", "2.50", "0"]
