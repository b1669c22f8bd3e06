"""The judge of the end-to-end test of kubectl's columns: what it must call false, and what it must let pass."""

from dataclasses import replace

import pytest

from harness.trace import Commit, Done, Trace
from regroup_operator.api.crd import COLUMNS
from tests.e2e.columns import cells
from tests.e2e.truth import Asked, Fault, Row, Run, holes, judge, seconds, story, unwritten

ASKED = [Asked(100.0, 2)]
SCRIPT = {"STEP": "", "PROGRESS": "", "LOSS": "", "ETA": "", "SAMPLES/S": ""}
RUN = Run(ASKED, total_steps=500, global_batch=80)


def trained(*, kill_at: float | None = None, pause_s: float = 0.3, until: float = 130.0) -> Trace:
    """Two pods step every 0.1 s from 105 on; at `kill_at` pod b dies, and a goes on alone after a pause in generation 2."""
    commits = []
    for n in range(round((until - 105) / 0.1)):
        t = 105 + n / 10
        if kill_at is not None and kill_at <= t < kill_at + pause_s:
            continue
        late = kill_at is not None and t >= kill_at
        for rank, pod in enumerate("a" if late else "ab"):
            commits.append(Commit(t, pod, 7, rank, 2 if late else 1, n))
    built = tuple({"event": "built", "t": 104.0, "pod": pod, "pid": 7} for pod in "ab")
    last, left = (2, "a") if kill_at is not None else (1, "ab")
    done = tuple(Done(until, pod, 7, last, len(left), "digest") for pod in left)
    return Trace(tuple(commits), built, done)


def row(
    at: float,
    state: str = "Running",
    ready: str = "2/2",
    step: int | None = None,
    generation: int = 1,
    cells: dict[str, str] | None = None,
) -> Row:
    """A line that is true in all columns that are not given."""
    shown = round((at - 105) / 0.1) if step is None else step
    line = {
        "STATE": state, "READY": ready, "STEP": str(shown), "GENERATION": str(generation), "PROGRESS": f"{shown // 5}%",
        "LOSS": "0.5" if shown else "", "RESTARTS": "", "ETA": "", "AGE": f"{int(at - 100)}s", "SEEN": "3s", "SAMPLES/S": "800",
    }  # fmt: skip
    return Row(at, at + 0.1, line | (cells or {}))


@pytest.mark.parametrize(
    "true",
    [
        row(115),
        row(104.6, generation=1, step=0),  # in the middle of the first step
        row(115, step=10),  # 9 s old
        row(105.5, "Starting", "0/2", generation=1),
        row(121, "Recovering", "1/2"),
        row(121, "Running", "2/2"),  # the kill was a second ago
        row(124, "Running", "1/2", generation=2),
        row(130, "Succeeded", "", generation=2, step=250),
        row(133, "Succeeded", "", generation=2, step=250),
        row(134, "Finishing", "", generation=2, step=250),  # the processes are on their way out
    ],
    ids=lambda r: f"{r.before} {r.cells['STATE']} {r.cells['READY']}",
)
def test_true_lines_pass(true: Row) -> None:
    assert judge(true, trained(kill_at=120.0), RUN) == []


@pytest.mark.parametrize(
    ("false", "says"),
    [
        (row(104.2, step=0), "nobody committed"),
        (row(115, "Starting"), "committed all the time"),
        (row(115, "Recovering"), "committed all the time"),
        (row(115, "Succeeded"), "not every process had finished"),
        (row(115, "Waiting"), "never too few"),
        (row(133, "Running", step=250, generation=2), "nobody committed"),
        (row(133, "Recovering", step=250, generation=2), "had ended"),
        (row(137, "Finishing", "", step=250, generation=2), "had ended"),
        (row(115, ready="1/2"), "the trace says 2 to 2"),
        (row(115, "Recovering", ready="1/2"), "the trace says 2 to 2"),
        (row(115, ready="2/3"), "the user asked for [2]"),
        (row(124, ready="2/2", generation=2), "the trace says 1 to 1"),
        (row(119, step=10), "lags behind"),
        (row(115, step=120), "not yet committed"),
        (row(124, ready="1/2", generation=1), "lags behind 2"),
        (row(115, generation=3), "nobody trains in it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_false_lines_are_caught(false: Row, says: str) -> None:
    assert any(says in problem for problem in judge(false, trained(kill_at=120.0), RUN))


@pytest.mark.parametrize(
    ("at", "shown", "says"),
    [
        pytest.param(121.5, "Running 2/2", None, id="Running may be shown for two seconds"),
        pytest.param(123.0, "Running 1/2", "nobody committed", id="and no longer"),
        pytest.param(125.2, "Running 1/2", "nobody committed", id="nor long before the next step"),
        pytest.param(123.0, "Recovering 1/2", None, id="Recovering is true"),
        pytest.param(123.0, "Recovering 2/2", "trace says 1 to 1", id="but the dead are not ready"),
        pytest.param(123.0, "Starting 1/2", "committed long ago", id="Starting is not true"),
        pytest.param(130.0, "Running 1/2", None, id="Running again"),
    ],
)
def test_while_nobody_commits(at: float, shown: str, says: str | None) -> None:
    trace = trained(kill_at=120.0, pause_s=6.0, until=140.0)
    state, ready = shown.split()
    generation, step = (1, 150) if at < 126.0 else (2, 250)
    problems = judge(row(at, state, ready, step=step, generation=generation), trace, RUN)
    assert any(says in problem for problem in problems) if says else problems == []


def test_succeeded_needs_the_word_of_every_process() -> None:
    trace = trained()
    shown = row(132.5, "Succeeded", "", step=250)
    assert judge(shown, trace, RUN) == []
    (problem,) = judge(shown, replace(trace, done=trace.done[:1]), RUN)
    assert "not every process had finished" in problem
    later = replace(trace.done[1], t=133.2)  # the scripts return first
    (problem,) = judge(shown, replace(trace, done=(trace.done[0], later)), RUN)
    assert "not every process had finished" in problem


def test_finishing_is_shown_once_the_last_step_is_committed() -> None:
    trace = trained()
    last = trace.commits[-1].t
    assert judge(row(last + 0.3, "Finishing", "", step=250), trace, RUN) == []
    for shown, says in (
        (row(last + 0.3, "Finishing", "2/2", step=250), "empty after the last step"),
        (row(last - 3.0, "Finishing", "", step=235), "Finishing, but steps were committed after that"),
    ):
        assert any(says in problem for problem in judge(shown, trace, RUN)), shown


def test_succeeded_is_not_shown_before_the_last_commit() -> None:
    trace = trained()
    problems = judge(row(trace.commits[-1].t - 0.2, "Succeeded", "", step=250), trace, RUN)
    assert any("not every process had finished" in problem for problem in problems)


def test_a_job_without_a_state_is_late_after_two_seconds() -> None:
    blank = {"STATE": "", "READY": "", "STEP": "", "GENERATION": ""}
    assert judge(Row(101.0, 101.1, blank), trained(), RUN) == []
    assert judge(Row(102.5, 102.6, blank), trained(), RUN) == ["no state 2.5 s after the job was made"]


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"PROGRESS": "21%"}, "progress 21%"),
        ({"PROGRESS": ""}, "progress empty"),
        ({"LOSS": ""}, "no loss"),
        ({"LOSS": "-1"}, "loss -1"),
        ({"ETA": "40s"}, None),
        ({"ETA": "9s"}, "ETA 9s, but 360 steps are left"),
        ({"ETA": "5m"}, "ETA 5m"),
        ({"STATE": "Recovering", "ETA": "40s"}, "ETA 40s, but the job is Recovering"),
        ({"SAMPLES/S": "350"}, "350 samples/s"),
        ({"SAMPLES/S": "1800"}, "1800 samples/s"),
        ({"RESTARTS": "1"}, "1 restarts, but the test broke 0 to 0"),
        ({"AGE": "15s"}, "age 15s"),
        ({"AGE": "24s"}, "age 24s"),
        ({"AGE": ""}, "age empty"),
        ({"SEEN": "17s"}, "seen 17s"),
        ({"SEEN": ""}, "seen empty"),
        ({"SEEN": "0s"}, None),
        ({"SEEN": "17s", "GENERATION": "", "STATE": "Starting"}, "committed all the time"),
    ],
    ids=str,
)
def test_each_column(cells: dict[str, str], says: str | None) -> None:
    problems = judge(row(119, cells=cells), trained(), RUN)
    assert any(says in problem for problem in problems) if says else problems == []


@pytest.mark.parametrize("tier", ["Session", "Script"])
@pytest.mark.parametrize("column", [column["name"].upper() for column in COLUMNS])
def test_every_column_that_kubectl_prints_is_judged(column: str, tier: str) -> None:
    """In both tiers: a line with a word in it that it never shows is false, whatever else is true of it."""
    true = row(119, cells=SCRIPT if tier == "Script" else {})
    run = replace(RUN, tier=tier) if tier == "Session" else Run(ASKED, tier=tier)
    assert set(true.cells) == {column["name"].upper() for column in COLUMNS}
    wrong = {"STATE": "Failed", "READY": "0/9", "AGE": "9d", "SEEN": "9d", "ETA": "9d"}.get(column, "99999")
    assert judge(true, trained(), run) == []
    if (column, tier) == ("GENERATION", "Script"):
        wrong = "0"  # it counts the groups that formed: not every generation gets so far
    assert judge(replace(true, cells={**true.cells, column: wrong}), trained(), run) != []


@pytest.mark.parametrize(
    ("at", "restarts", "true"),
    [
        (121.0, "", True),
        (121.0, "1", True),
        (121.0, "2", False),
        (119.0, "1", False),
        (190.0, "1", True),
        (190.0, "", False),
    ],
)
def test_restarts_follow_what_was_broken(at: float, restarts: str, true: bool) -> None:
    run = Run(ASKED, [Fault(120.0, 1)], total_steps=500, global_batch=80)
    problems = judge(
        row(at, cells={"RESTARTS": restarts, "AGE": "21s" if at < 180 else "90s"}), trained(until=200.0), run
    )
    assert any("restarts, but" in problem for problem in problems) is not true


@pytest.mark.parametrize(("deleted", "true"), [("b", True), ("", False)], ids=["deleted", "killed"])
def test_worker_of_a_deleted_pod_may_hand_over_and_is_no_restart(deleted: str, true: bool) -> None:
    run = Run(ASKED, [Fault(120.0, 1, deleted=deleted)], total_steps=500, global_batch=80)
    problems = judge(row(190, cells={"RESTARTS": "", "AGE": "90s"}), trained(until=200.0), run)
    assert any("restarts, but" in problem for problem in problems) is not true


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        pytest.param(row(115, cells=SCRIPT), None, id="it trains"),
        pytest.param(row(123, "Starting", "1/2", cells=SCRIPT), None, id="its processes start again"),
        pytest.param(row(123, "Recovering", "2/2", cells=SCRIPT), None, id="a worker is ready without a process"),
        pytest.param(row(123, "Running", "1/2", cells=SCRIPT), "nobody committed", id="Running while nothing trains"),
        pytest.param(
            row(119.5, "Starting", "2/2", cells=SCRIPT), None, id="a change is written before the processes end"
        ),
        pytest.param(row(115, "Starting", cells=SCRIPT), "committed all the time", id="Starting while epochs pass"),
        pytest.param(row(115, cells=SCRIPT | {"STEP": "100"}), "STEP 100, but nothing is known", id="a step"),
        pytest.param(row(115, cells=SCRIPT | {"ETA": "40s"}), "ETA 40s, but nothing is known", id="an ETA"),
        pytest.param(row(115, ready="1/2", cells=SCRIPT), "the trace says 2 to 2", id="who trains is ready"),
        pytest.param(row(115, generation=3, cells=SCRIPT), None, id="a generation that did not form is counted"),
        pytest.param(row(129, generation=1, cells=SCRIPT), "lags behind 2", id="an old generation"),
    ],
)
def test_lines_of_a_script(shown: Row, says: str | None) -> None:
    run = Run(ASKED, tier="Script")
    problems = judge(shown, trained(kill_at=120.0, pause_s=6.0, until=140.0), run)
    assert any(says in problem for problem in problems) if says else problems == []


@pytest.mark.parametrize(("at", "silent", "true"), [(123.0, False, False), (123.0, True, True), (129.5, True, False)])
def test_silence_of_a_script_shows_after_disconnect_seconds(at: float, silent: bool, true: bool) -> None:
    run = Run(ASKED, [Fault(120.0, 0, silent=silent)], tier="Script")
    problems = judge(row(at, "Running", "1/2", cells=SCRIPT), trained(kill_at=120.0, pause_s=15.0, until=140.0), run)
    assert any("nobody committed" in problem for problem in problems) is not true


def test_container_that_is_started_again_gives_out_the_same_process_id() -> None:
    """Its second process is no reason to deny that the first was ready."""
    seen = trained()
    again = {"event": "built", "t": 131.0, "pod": "b", "pid": 7}
    assert list(judge(row(110.0), replace(seen, built=(*seen.built, again)), RUN)) == []


@pytest.mark.parametrize(
    ("deleted", "ready", "true"),
    [("b", "1/2", True), ("b", "2/2", True), ("", "1/2", False), ("a", "1/2", True), ("b", "0/2", False)],
)
def test_pod_that_was_deleted_may_train_on_and_need_not_be_ready(deleted: str, ready: str, true: bool) -> None:
    run = replace(RUN, faults=[Fault(114.0, 1, deleted=deleted)])
    assert (judge(row(115, ready=ready), trained(), run) == []) is true
    assert judge(row(113.8, ready="1/2"), trained(), replace(run, faults=[Fault(114.0, 1)])) != []


@pytest.mark.parametrize(("deleted", "true"), [("b", True), ("", False)])
def test_generation_without_a_deleted_pod_may_begin_once_the_kubelet_has_ended_its_process(
    deleted: str, true: bool
) -> None:
    """The new generation is shown 2.3 s before its first commit, and the old one trains until then."""
    run = replace(RUN, faults=[Fault(117.9, 1, deleted=deleted)])
    problems = judge(row(117.9, generation=2), trained(kill_at=120.0), run)
    assert any("nobody trains in it" in problem for problem in problems) is not true


@pytest.mark.parametrize(
    ("at", "shown", "says"),
    [
        pytest.param(109.0, "Starting 0/2", None, id="a start is told of late"),
        pytest.param(113.0, "Starting 0/2", "the trace says 2 to 2", id="but not so late"),
        pytest.param(109.0, "Running 0/2", "the trace says 2 to 2", id="and only a start"),
        pytest.param(103.0, "Starting 1/2", "the trace says 0 to 0", id="nor ahead of time"),
    ],
)
def test_ready_of_a_job_that_starts_may_be_older(at: float, shown: str, says: str | None) -> None:
    state, ready = shown.split()
    problems = [p for p in judge(row(at, state, ready, step=0 if at < 106 else None), trained(), RUN) if "ready" in p]
    assert any(says in problem for problem in problems) if says else problems == []


def test_story_of_a_failure_is_told_in_order_of_time() -> None:
    run = Run(ASKED, [Fault(120.0, 1)])
    assert story(trained(kill_at=120.0), run).splitlines() == [
        "100.00 asked for 2 replicas",
        "104.00 a built; commits from 105.00 to 129.90",
        "104.00 b built; commits from 105.00 to 119.90",
        "105.00 generation 1 of 2: steps 0 to 149, until 119.90",
        "120.00 fault: 1 to start again",
        "120.30 generation 2 of 1: steps 153 to 249, until 129.90",
    ]


def test_seconds_of_kubectls_times() -> None:
    assert [seconds(text) for text in ("", "45s", "3m20s", "2h5m", "3d")] == [0, 45, 200, 7500, 259200]


def test_cells_of_kubectls_table() -> None:
    text = (
        "NAME     STATE     READY   STEP   PROGRESS   LOSS    RESTARTS   ETA   AGE   GENERATION   SAMPLES/S\n"
        "digits   Running   3/3     120    7%         0.052              12s   41s   3            1393.965\n"
    )
    seen = cells(text)
    assert (seen["STATE"], seen["READY"], seen["STEP"], seen["RESTARTS"]) == ("Running", "3/3", "120", "")
    assert (seen["AGE"], seen["GENERATION"], seen["SAMPLES/S"]) == ("41s", "3", "1393.965")


def lines(*seen: tuple[float, str]) -> list[Row]:
    return [Row(at, at + 0.2, {"SEEN": shown}) for at, shown in seen]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        pytest.param([(101, "4s"), (105, "8s"), (111, "14s")], None, id="the age grows"),
        pytest.param([(101, "0s"), (105, "3s"), (111, "9s")], None, id="kubectl and a write on its way cost a second each"),
        pytest.param([(101, "4s"), (105, "8s"), (111, "2s")], "nobody has written for 11.0 s", id="a young line"),
        pytest.param([(101, "4s"), (105, "8s"), (111, "8s")], "nobody has written for 11.0 s", id="an age that stands still"),
        pytest.param([(101, "4s"), (105, ""), (111, "14s")], "seen empty", id="no age"),
        pytest.param([(90, "4s"), (113, "0s")], "no line for 12.0 s", id="no line at all"),
    ],
)  # fmt: skip
def test_while_nobody_writes_each_line_carries_its_age(rows: list[tuple[float, str]], says: str | None) -> None:
    problems = unwritten(lines(*rows), since=100.0, until=112.0)
    assert any(says in problem for problem in problems) if says else problems == []


@pytest.mark.parametrize(
    ("at", "says"),
    [
        pytest.param([104, 112, 119], None, id="often enough"),
        pytest.param([104, 115, 119], "no line for 11.0 s, from 104.20 to 115.20", id="a hole"),
        pytest.param([111, 119], "no line for 11.2 s, from 100.00", id="a late beginning"),
        pytest.param([104, 109], "no line for 10.8 s, from 109.20 to 120.00", id="an early end"),
        pytest.param([], "no line for 20.0 s", id="nothing"),
    ],
)
def test_times_without_a_line_are_found(at: list[float], says: str | None) -> None:
    problems = holes(lines(*((t, "3s") for t in at)), 100.0, 120.0)
    assert any(says in problem for problem in problems) if says else problems == []
