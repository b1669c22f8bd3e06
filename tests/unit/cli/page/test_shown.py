"""What the views of the page contain."""

from __future__ import annotations

from typing import Any

import pytest

from harness.sample_jobs import at, incident, job, many, pods_of, resnet
from regroup_cli.page import shown
from regroup_cli.page.charts import Size
from regroup_cli.page.shown import LogChoice, StepTime
from regroup_client import views
from regroup_client.log_lines import Line, Worker
from regroup_client.views import JobView


def view(**status: Any) -> JobView:
    return views.job_view(job("digits", **status))


# --- the list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("", ["b", "c", "a"], id="those that go on come first"),
        pytest.param("FAILED", ["a"], id="by state"),
        pytest.param("team-vision b", ["b"], id="each word"),
        pytest.param("nothing", [], id="none"),
    ],
)
def test_choice_of_jobs(text: str, names: list[str]) -> None:
    every = [views.job_view(job(name, state)) for name, state in (("a", "Failed"), ("c", "Pending"), ("b", "Running"))]
    chosen = shown.choose(every, text, 1)
    assert [one.name for one in chosen.views] == names
    assert (chosen.found, chosen.all, chosen.pages) == (len(names), 3, 1)


@pytest.mark.parametrize(("page", "want"), [(0, 1), (1, 1), (3, 3), (5, 5), (99, 5)])
def test_500_jobs_are_5_pages(page: int, want: int) -> None:
    every = [views.job_view(one) for one in many(500, 64)]
    chosen = shown.choose(every, "", page)
    assert (chosen.page, chosen.pages, len(chosen.views)) == (want, 5, shown.ROWS)
    everything = [one.name for number in range(1, 6) for one in shown.choose(every, "", number).views]
    assert sorted(everything) == sorted(one.name for one in every)


@pytest.mark.parametrize(
    ("text", "want"), [("37%", 37.0), ("", None), ("101%", 100.0), ("-3%", 0.0), ("12.5%", 12.5), ("x%", None)]
)
def test_percent(text: str, want: float | None) -> None:
    assert shown.percent(view(summary={"state": "Running", "progress": text})) == want


# --- the timeline


@pytest.mark.parametrize(
    ("incidents", "want"),
    [
        pytest.param([], [Size(0, 3)], id="one generation has the size of today"),
        pytest.param(
            [incident(2, 100, "ProcessExited", "d", (4, 3))], [Size(0, 4), Size(100, 3)], id="the first size is known"
        ),
        pytest.param(
            [incident(9, 100, "ProcessExited", "d", (4, 3))],
            [Size(0, None), Size(100, 3)],
            id="older incidents are gone, so the first size is unknown",
        ),
        pytest.param(
            [{"generation": 7, "at": at(50), "decision": "d"}],
            [Size(0, None), Size(50, 3)],
            id="an old operator wrote no sizes",
        ),
        pytest.param(
            [{"generation": 2, "at": "?", "decision": "d", "workersBefore": 4, "workers": 3}],
            [Size(0, 4)],
            id="no time",
        ),
    ],
)
def test_sizes(incidents: list[Any], want: list[Size]) -> None:
    membership = {"generation": 7, "worldSize": 3, "members": "0-2"}
    assert shown.sizes(view(incidents=incidents, membership=membership)) == want


@pytest.mark.parametrize(
    ("status", "want"),
    [
        pytest.param({"observedAt": at(60)}, 60.0, id="until the operator's last word"),
        pytest.param({"observedAt": at(60), "completionTime": at(50)}, 50.0, id="until its end"),
        pytest.param({"observedAt": at(60), "progress": {"curve": ["9 70 1"]}}, 70.0, id="the curve is newer"),
        pytest.param({"startTime": None}, 0.0, id="not started"),
        pytest.param({"observedAt": at(-60)}, 0.0, id="a clock that was set back"),
    ],
)
def test_end_of_the_time_axis(status: dict[str, Any], want: float) -> None:
    assert shown.end_s(view(**status)) == want


def test_marks_tell_failures_from_plans() -> None:
    marks = shown.marks(views.job_view(resnet()))
    assert [(one.label, one.is_failure) for one in marks] == [
        ("2", True),
        ("3", False),
        ("4", True),
        ("5", False),
        ("6", False),
    ]


def test_an_incident_without_a_sentence_is_drawn() -> None:
    (mark,) = shown.marks(view(startedAt=at(0), incidents=[incident(2, 9, "PodFailed", "", (2, 1))]))
    assert mark.text == "Generation 2, PodFailed: "


def test_a_loss_without_a_place_on_an_axis_is_left_out() -> None:
    curve = ["0 0 nan", "10 1 inf", "20 2 1e308", "30 3 -1e308", "40 4 0.5", "50 5 0.25"]
    drawn = shown.loss(view(startedAt=at(0), progress={"curve": curve}))
    assert "from 0.5 to 0.25" in drawn
    assert "nan" not in drawn


def test_throughput_is_the_pace_between_points() -> None:
    svg = shown.throughput(view(progress={"curve": ["0 0 3", "100 10 2", "100 10 2", "100 20 2", "400 30 1"]}))
    assert "from 10 to 30 in 20 s; lowest 0, highest 30" in svg


@pytest.mark.parametrize(
    ("text", "mean", "parts", "note"),
    [
        pytest.param(
            "0.84 s: backward 61 %, waits 22 % (worker 3 is slowest: fetching data 0.3 s)",
            "0.84 s",
            (("backward", 61.0), ("waits", 22.0), ("other parts", 17.0)),
            "worker 3 is slowest: fetching data 0.3 s",
            id="all parts",
        ),
        pytest.param("12 ms: GPU 100 %", "12 ms", (("GPU", 100.0),), "", id="one part"),
        pytest.param(
            "12 ms: between steps 40 %", "12 ms", (("between steps", 40.0), ("other parts", 60.0)), "", id="two words"
        ),
        pytest.param("1 s: ", "1 s", (("other parts", 100.0),), "", id="no part is large"),
    ],
)
def test_step_time(text: str, mean: str, parts: tuple[tuple[str, float], ...], note: str) -> None:
    found = shown.step_time(view(progress={"stepTime": text}))
    assert isinstance(found, StepTime)
    assert (found.mean, found.parts, found.note) == (mean, parts, note)


def test_what_the_operator_says_of_a_step_is_understood() -> None:
    """The sentence is made by the operator; if its form changes, the page must follow."""
    from regroup.protocol.state import Times
    from regroup_operator.plan.report.breakdown import breakdown

    fast = Times(**{**dict.fromkeys(Times.__dataclass_fields__, 0.0), "backward": 0.6, "waits": 0.3})
    slow = Times(**{**dict.fromkeys(Times.__dataclass_fields__, 0.0), "backward": 0.6, "data": 0.3})
    found = shown.step_time(view(progress={"stepTime": breakdown({"worker 0": fast, "worker 1": slow})}))
    assert found is not None
    assert found.mean == "0.9 s"
    assert [name for name, _ in found.parts] == ["backward", "fetching data", "waits"]
    assert found.note == "worker 1 is slowest: fetching data 0.3 s"


def test_no_step_was_measured() -> None:
    assert shown.step_time(view()) is None


def test_workers_by_node() -> None:
    one = resnet()
    found = shown.nodes(views.job_view(one, pods_of(one)[:-1]))
    assert [(node.name, [worker.slot for worker in node.workers]) for node in found] == [
        ("", [11]),
        ("gpu-a", [0, 1, 2, 3]),
        ("gpu-b", [4, 5, 6, 7]),
        ("gpu-c", [8, 9, 10]),
    ]


# --- logs


def lines(*texts: str, rank: int | None = 0) -> list[Line]:
    return [Line(index, Worker(0), rank, text) for index, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("of", "want"),
    [
        ("", LogChoice()),
        ("slot-3", LogChoice(slot=3)),
        ("rank-5", LogChoice(slot=2, rank=5)),
        ("rank-99", LogChoice(rank=99)),
        ("slot-²", LogChoice()),
        ("slot--1", LogChoice()),
        ("slot-12345678", LogChoice()),
        ("../../etc", LogChoice()),
    ],
)
def test_choice_of_a_log(of: str, want: LogChoice) -> None:
    two_each = views.job_view(job("digits", membership={"generation": 1, "worldSize": 8, "members": "0-3"}))
    found = shown.log_choice(of, "", two_each)
    assert found == want
    assert found.of in (of, "")


def test_options_name_each_rank_of_a_worker_that_has_several() -> None:
    one = views.job_view(job("digits", membership={"generation": 1, "worldSize": 4, "members": "0-1"}))
    assert shown.log_options(one) == [
        ("", "All workers"),
        ("slot-0", "Worker 0 (ranks 0 to 1)"),
        ("rank-0", "Rank 0, of worker 0"),
        ("rank-1", "Rank 1, of worker 0"),
        ("slot-1", "Worker 1 (ranks 2 to 3)"),
        ("rank-2", "Rank 2, of worker 1"),
        ("rank-3", "Rank 3, of worker 1"),
    ]


def test_lines_with_a_text_and_of_a_rank() -> None:
    some = [*lines("step 1 LOSS 2", "other"), *lines("agent's loss", rank=None), *lines("loss", rank=1)]
    assert [line.text for line in shown.log_lines(some, LogChoice(rank=0, text="loss"))] == [
        "step 1 LOSS 2",
        "agent's loss",
    ]


def test_a_log_is_bounded_and_its_end_is_kept() -> None:
    found = shown.log_lines(lines(*("x" * 5000 for _ in range(1000)), "last"), LogChoice())
    assert found[-1].text == "last"
    assert sum(len(line.text) for line in found) <= shown.MAX_LOG
    assert "(4000 more characters)" in found[0].text


def test_texts_are_harmless() -> None:
    assert shown.harmless("a\x1b[31mb\x1b]0;t\x07c\n\u202ed\x00") == "abc\n\\x202ed\\x00"
    assert len(shown.harmless("x" * 10**6)) < 5000
