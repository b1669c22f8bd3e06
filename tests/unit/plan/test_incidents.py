"""What an incident says of its parts, in milliseconds."""

from __future__ import annotations

import pytest

from regroup.protocol.wire import Formed
from regroup_operator.plan.incidents import with_times
from tests.builders.plan import make_session, make_worker


@pytest.mark.parametrize(
    ("planned", "want"),
    [
        pytest.param(False, 90.0, id="forced: all begin together, the slowest counts"),
        pytest.param(True, 40.0, id="planned: a joiner waits while the others train on, the last to come counts"),
    ],
)
def test_form_time(planned: bool, want: float) -> None:
    members = [
        make_worker(slot, session=make_session(slot, formed=Formed(form_ms), formed_generation=2))
        for slot, form_ms in enumerate((40.0, 90.0))
    ]
    assert with_times({"generation": 2}, 2, members, None, planned=planned)["formMs"] == want


def test_form_time_is_not_said_before_all_have_formed() -> None:
    formed = make_worker(0, session=make_session(0, formed=Formed(40.0), formed_generation=2))
    forming = make_worker(1, session=make_session(1, formed=Formed(9.0), formed_generation=1))
    assert "formMs" not in with_times({"generation": 2}, 2, [formed, forming], None)
