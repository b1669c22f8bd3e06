"""Charts of the page: axes, places, and texts that cannot leave their element."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from regroup_cli.page import charts
from regroup_cli.page.charts import Dot, Mark, Size

HOSTILE = '</title><script>alert(1)</script>" onload="x'


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        pytest.param(0, 10, [0, 5, 10], id="fives"),
        pytest.param(0, 8, [0, 2, 4, 6, 8], id="twos"),
        pytest.param(0.31, 2.3, [0.5, 1, 1.5, 2], id="not beyond the values"),
        pytest.param(-3, 3, [-2, 0, 2], id="below zero"),
        pytest.param(0, 1e-6, [0, 5e-7, 1e-6], id="tiny"),
        pytest.param(5, 5, [5], id="no room"),
        pytest.param(0, float("inf"), [0], id="no end"),
    ],
)
def test_ticks(low: float, high: float, want: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(want)


@pytest.mark.parametrize("high", [1, 3, 7, 12, 64, 100, 999, 12345])
def test_ticks_are_few_and_within(high: float) -> None:
    for low in (0, -high, high / 3):
        found = charts.ticks(low, high)
        assert 2 <= len(found) <= 6
        assert all(low - 1e-9 <= one <= high + 1e-9 for one in found)


@pytest.mark.parametrize(
    ("end_s", "want"),
    [
        (0, [0]),
        (3, [0, 1, 2, 3]),
        (90, [0, 30, 60, 90]),
        (5400, [0, 1800, 3600, 5400]),
        (86400, [0, 21600, 43200, 64800, 86400]),
        (86400 * 9, [0, 86400 * 5]),
    ],
)
def test_time_axis(end_s: float, want: list[float]) -> None:
    assert charts.times(end_s) == want


@pytest.mark.parametrize(
    ("seconds", "want"), [(0, "0 s"), (45, "45 s"), (150, "2.5 min"), (10800, "3 h"), (172800, "2 d"), (100, "1.7 min")]
)
def test_span(seconds: float, want: str) -> None:
    assert charts.span(seconds) == want


@pytest.mark.parametrize(
    ("value", "want"),
    [(0, "0"), (0.31415, "0.3141"), (12288, "12,288"), (0.00001, "1.00e-05"), (2.5e7, "2.50e+07"), (-5, "-5")],
)
def test_number(value: float, want: str) -> None:
    assert charts.number(value) == want


def test_axis_begins_at_zero_if_values_are_near_it() -> None:
    assert charts.bounds(0.2, 2.0)[0] == 0
    assert charts.bounds(100, 101)[0] == pytest.approx(99.92)
    assert charts.bounds(3, 3) == (1.5, 4.5)


def test_curve_goes_from_corner_to_corner() -> None:
    svg = charts.curve("Loss", [Dot(0, 0.0, "a"), Dot(50, 10.0, "b")], 100)
    points = re.search(r'points="([^"]*)"', svg)
    assert points is not None
    first, last = points[1].split()
    assert first == f"0.00,{charts.HEIGHT}.0"
    assert last.startswith("50.00,")
    assert 0 < float(last.split(",")[1]) < 20
    assert "from 0 to 10 in 50 s; lowest 0, highest 10" in svg


@pytest.mark.parametrize("dots", [[], [Dot(1, 1.0, "x")]])
def test_one_value_is_no_curve(dots: list[Dot]) -> None:
    assert charts.curve("Loss", dots, 10) == ""


def test_timeline_shows_each_size_for_its_time_and_nothing_where_it_is_unknown() -> None:
    svg = charts.timeline([Size(0, None), Size(25, 4), Size(75, 2)], 100, [])
    rects = re.findall(r'class="size" x="([\d.]+)%" y="([\d.]+)" width="([\d.]+)%"', svg)
    assert rects == [("25.00", "0.0", "50.00"), ("75.00", f"{charts.SIZES_HEIGHT / 2}", "25.00")]
    assert "now 2, most 4" in svg
    assert charts.timeline([Size(0, None)], 100, []) == ""


def test_numbers_of_incidents_do_not_overlap() -> None:
    marks = [Mark(50, "2", "a", True), Mark(51, "3", "b", True), Mark(52, "4", "c", False), Mark(90, "5", "d", True)]
    svg = charts.timeline([Size(0, 4)], 100, marks)
    assert re.findall(r'x="10" y="4">(\d)<', svg) == ["2", "5", "4"]
    assert svg.count('class="mark') == 4


@pytest.mark.parametrize(
    "svg",
    [
        charts.curve(HOSTILE, [Dot(0, 1.0, HOSTILE), Dot(1, 2.0, HOSTILE)], 1, [Mark(0.5, HOSTILE, HOSTILE, True)]),
        charts.timeline([Size(0, 3)], 10, [Mark(5, HOSTILE, HOSTILE, False), Mark(6, HOSTILE, HOSTILE, True)]),
        charts.shares(HOSTILE, [(HOSTILE, 40.0), ("rest", 60.0)]),
    ],
)
def test_texts_stay_texts(svg: str) -> None:
    tree = ElementTree.fromstring(svg)
    assert {element.tag for element in tree.iter()} <= {
        "svg",
        "line",
        "text",
        "title",
        "polyline",
        "circle",
        "rect",
        "path",
    }
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on") or name == "style"]


def test_shares_end_with_the_bar() -> None:
    svg = charts.shares("A step", [("backward", 61.0), ("waits", 50.0)])
    assert re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', svg) == [("0", "61"), ("61", "39")]
