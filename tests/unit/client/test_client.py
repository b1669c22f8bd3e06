"""The Python client: over a kubectl whose proxy answers what a cluster would, and over files of local jobs."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import regroup_client
from regroup_client import (
    Client,
    ClientError,
    JobError,
    Progress,
    TimedOut,
    access,
    api,
    client,
    local_jobs,
    local_runs,
    log_streams,
)
from regroup_client.client import is_reached
from regroup_client.submission import Choices, objects

FAKE = Path(__file__).with_name("fake_kubectl.py")
JOBS = "/apis/regroup.dev/v1alpha1/namespaces/team-a/distributedtrainingjobs"
POD = "/api/v1/namespaces/team-a/pods"
TRAINING = {"type": "Training", "status": "True", "reason": "Running", "message": "Two workers train."}
REJECTED = {"type": "Accepted", "status": "False", "reason": "InvalidSpec", "message": "spec.replicas is 9."}
FAILED = {"type": "Failed", "status": "True", "reason": "RepeatedCrash", "message": "ValueError: x"}


def job(state: str = "Running", *conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    membership = {"generation": 1, "worldSize": 2, "members": "0-1"}
    status = {"summary": {"state": state}, "membership": membership, "conditions": list(conditions), **status}
    return {"metadata": {"name": "train", "namespace": "team-a", "uid": "1"}, "status": status}


def ok(found: Any) -> list[Any]:
    return [200, found if isinstance(found, str) else json.dumps(found)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that puts a kubectl with these answers first on the PATH, and returns its directory."""
    monkeypatch.setattr(client, "POLL_S", 0.01)

    def put(**answers: Any) -> Path:
        shutil.copy(FAKE, tmp_path / "kubectl")
        made = {"namespace": "team-a"} | {name.replace("_", " ", 1): found for name, found in answers.items()}
        (tmp_path / "answers.json").write_text(json.dumps(made))
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return put


def asked(directory: Path, verb: str) -> list[tuple[str, Any]]:
    lines = (json.loads(line) for line in (directory / "asked").read_text().splitlines())
    return [(path, json.loads(body or "null")) for one, path, _, body in lines if one == verb]


@pytest.mark.parametrize(
    ("found", "until", "want"),
    [
        pytest.param(job("Starting"), "training", False, id="it starts"),
        pytest.param(job("Running", TRAINING), "training", True, id="it trains"),
        pytest.param(job("Recovering"), "training", False, id="it recovers"),
        pytest.param(job("Finishing"), "training", True, id="it has trained between two looks"),
        pytest.param(job("Succeeded"), "training", True, id="it trained and succeeded between two looks"),
        pytest.param(job("Failed", FAILED), "training", "ValueError: x", id="it failed before it trained"),
        pytest.param(job("Running", TRAINING), "succeeded", False, id="it goes on"),
        pytest.param(job("Suspended"), "succeeded", False, id="a suspended job may be resumed"),
        pytest.param(job("Succeeded"), "succeeded", True, id="it succeeded"),
        pytest.param(job("Failed", FAILED), "succeeded", "ValueError: x", id="it failed"),
        pytest.param(job("Killed"), "succeeded", "Killed", id="its run was killed"),
        pytest.param(job("InvalidSpec", REJECTED), "succeeded", "spec.replicas is 9.", id="a rejected job never ends"),
        pytest.param(job("Failed", FAILED), "ended", True, id="a failure is an end"),
        pytest.param(job("Killed"), "ended", True, id="so is a kill"),
        pytest.param(job("Suspended"), "suspended", True, id="it is suspended"),
        pytest.param(job("Succeeded"), "suspended", "is Succeeded", id="it ended before it was suspended"),
    ],
)
def test_what_ends_a_wait(found: dict[str, Any], until: client.Until, want: bool | str) -> None:
    if isinstance(want, bool):
        assert is_reached(found, until) is want
        return
    with pytest.raises(JobError, match=want):
        is_reached(found, until)


def test_script_is_submitted_as_the_command_does_it(cluster: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hi')\n")
    config = "PATCH_/api/v1/namespaces/team-a/configmaps/train-code-"
    wanted = objects(
        Choices(name="train", image="torch", script="train.py", arguments=("1",), workers=2, most=4),
        {"train.py": b"print('hi')\n"},
    )
    name = wanted.code[0]["metadata"]["name"]
    directory = cluster(
        **{
            f"PATCH_{JOBS}/train": ok({**job(), "apiVersion": "a", "kind": "k", "spec": {"template": {}}}),
            f"{config}{name.removeprefix('train-code-')}": ok({}),
        }
    )
    with Client() as jobs:
        made = jobs.submit(tmp_path / "train.py", [1], image="torch", workers=2, max=4)
    assert made.name == "train"
    patched = [body for path, body in asked(directory, "PATCH") if "dryRun" not in path]
    assert patched[0] == wanted.job
    assert patched[1]["data"] == {"train.py": "print('hi')\n"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({}, "image is missing. Give an image with python3", id="no image"),
        pytest.param({"image": "x", "workers": 0}, "workers (0) is less than 1. Give at least 1.", id="no workers"),
        pytest.param({"image": "x", "workers": 3, "max": 2}, "workers (3) is more than max (2).", id="too many"),
        pytest.param(
            {"image": "x", "replicas": 3}, "replicas is no argument of submit. Further arguments are ", id="unknown"
        ),
        pytest.param({"image": "x", "data": ["d"]}, "data (d) is not CLAIM:PATH.", id="data"),
    ],
)
def test_wrong_arguments_are_one_sentence_in_words_of_python(
    cluster: Callable[..., Path], tmp_path: Path, arguments: dict[str, Any], sentence: str
) -> None:
    cluster()
    (tmp_path / "train.py").write_text("")
    with Client() as jobs, pytest.raises(ClientError) as refused:
        jobs.submit(tmp_path / "train.py", **arguments)
    assert sentence in str(refused.value)
    assert "--" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [("train.sh", "does not end in .py"), ("gone.py", "cannot be read (No such file or directory)")],
)
def test_script_that_cannot_travel_is_one_sentence(
    cluster: Callable[..., Path], tmp_path: Path, script: str, sentence: str
) -> None:
    cluster()
    with Client() as jobs, pytest.raises(ClientError) as refused:
        jobs.submit(tmp_path / script, image="x")
    assert sentence in str(refused.value)


def test_jobs_are_found_changed_and_deleted(cluster: Callable[..., Path]) -> None:
    progress = {"step": 40, "totalSteps": 100, "loss": 0.5, "samplesPerSecond": 12.5, "curve": ["1 0 4", "40 9 0.5"]}
    running = job(progress=progress, goodput={"percent": 97.5})
    directory = cluster(
        **{
            f"GET_{JOBS}": ok({"items": [running]}),
            f"GET_{JOBS}/train": [ok(running)] * 6 + [[404, json.dumps({"reason": "NotFound", "message": "gone"})]],
            f"GET_{POD}": ok({"items": []}),
            "GET_/api/v1/namespaces/team-a/events": ok({"items": []}),
            f"PATCH_{JOBS}/train/scale": ok({}),
            f"PATCH_{JOBS}/train": ok({}),
            f"DELETE_{JOBS}/train": ok({}),
        }
    )
    with Client() as jobs:
        (found,) = jobs.jobs()
        assert found.name == "train"
        point = regroup_client.Point
        assert found.progress() == Progress(
            step=40, total_steps=100, percent=40.0, loss=0.5, samples_per_second=12.5, optimizer_steps=None, eta="",
            goodput_percent=97.5, curve=(point(1, 0, 4.0), point(40, 9, 0.5)),
        )  # fmt: skip
        assert found.status().workers[1].ranks == (1,)
        found.scale(3)
        found.suspend()
        found.resume()
        found.delete()
        with pytest.raises(ClientError, match="gone"):
            jobs.job("train")
    changes = [body["spec"] for _, body in asked(directory, "PATCH")]
    assert changes == [{"replicas": 3}, {"runPolicy": {"suspend": True}}, {"runPolicy": {"suspend": False}}]


def test_job_that_has_ended_is_not_changed(cluster: Callable[..., Path]) -> None:
    directory = cluster(**{f"GET_{JOBS}/train": ok(job("Succeeded"))})
    with Client() as jobs:
        with pytest.raises(JobError, match=r"The job train has ended \(Succeeded\): it cannot be resized\."):
            jobs.job("train").scale(3)
    assert asked(directory, "PATCH") == []


def test_wait_ends_with_the_job_and_bears_an_api_server_that_restarts(cluster: Callable[..., Path]) -> None:
    looks = [ok(job("Starting")), [0, ""], ok(job("Running", TRAINING)), ok(job("Succeeded"))]
    cluster(**{f"GET_{JOBS}/train": [ok(job("Starting")), *looks]})
    with Client() as jobs:
        made = jobs.job("train")
        assert made.wait("training").state == "Running"
        assert made.wait(timeout=10).state == "Succeeded"


def test_wait_has_an_end(cluster: Callable[..., Path]) -> None:
    cluster(**{f"GET_{JOBS}/train": ok(job("Running", TRAINING))})
    with Client() as jobs:
        with pytest.raises(TimedOut, match=r"The job is not succeeded after 0\.1 s\. train is Running\."):
            jobs.job("train").wait(timeout=0.1)
        with pytest.raises(ClientError, match=r"until \('done'\) is none of training, suspended, succeeded, ended\."):
            jobs.job("train").wait("done")  # type: ignore[arg-type]


def test_wait_gives_up_where_nobody_answers(cluster: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_streams, "PATIENCE_S", 0.1)
    cluster(**{f"GET_{JOBS}/train": [ok(job()), [0, ""]]})
    with Client() as jobs, pytest.raises(ClientError, match="gave no answer"):
        jobs.job("train").wait()


@pytest.fixture
def logged(cluster: Callable[..., Path]) -> Path:
    pods = [
        {"metadata": {"name": f"train-worker-{slot}-0"}, "spec": {"containers": [{"name": "trainer"}]}}
        for slot in range(2)
    ]
    now = time.strftime("%Y-%m-%dT%H:%M:", time.gmtime())
    return cluster(
        **{
            f"GET_{JOBS}/train": ok(job("Succeeded")),
            f"GET_{POD}": ok({"items": pods}),
            f"GET_{POD}/train-worker-0-0/log": ok(f"{now}00.5Z step 1\n2020-01-01T00:00:00Z old\r\n"),
            f"GET_{POD}/train-worker-1-0/log": ok(f"{now}00.1Z \x1b[31mstep 1\x1b[0m of the other\n"),
        }
    )


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        pytest.param({}, ["[1.1] step 1 of the other", "[0.0] step 1", "[0.0] old"], id="all, by time"),
        pytest.param({"rank": 1}, ["[1.1] step 1 of the other"], id="of a rank"),
        pytest.param({"grep": "1$"}, ["[0.0] step 1"], id="that match"),
        pytest.param({"since": "1h", "slot": 0}, ["[0.0] step 1"], id="not older"),
        pytest.param({"since": timedelta(hours=1), "slot": 0}, ["[0.0] step 1"], id="not older than a timedelta"),
        pytest.param({"follow": True, "rank": 1}, ["[1.1] step 1 of the other"], id="followed to the end"),
    ],
)
@pytest.mark.usefixtures("logged")
def test_logs(arguments: dict[str, Any], lines: list[str]) -> None:
    with Client() as jobs:
        assert [str(line) for line in jobs.job("train").logs(**arguments)] == lines


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"grep": "("}, r"grep \(\(\) is not a regular expression"),
        ({"since": "yesterday"}, "'yesterday' is not a duration"),
        ({"rank": 7}, "Rank 7 is not in the newest generation"),
    ],
)
@pytest.mark.usefixtures("logged")
def test_logs_that_cannot_be(arguments: dict[str, Any], sentence: str) -> None:
    with Client() as jobs, pytest.raises(ClientError, match=sentence):
        list(jobs.job("train").logs(**arguments))


@pytest.mark.usefixtures("logged")
def test_client_works_from_threads_and_beside_a_running_event_loop() -> None:
    async def notebook() -> str:
        with Client() as jobs:
            return jobs.job("train").wait().state

    assert asyncio.run(notebook()) == "Succeeded"
    found: list[int] = []
    with Client() as jobs:
        made = jobs.job("train")
        threads = [threading.Thread(target=lambda: found.append(len(list(made.logs())))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert found == [3] * 8


def test_closed_client_ends_its_proxy_and_says_so(cluster: Callable[..., Path]) -> None:
    directory = cluster(**{f"GET_{JOBS}/train": ok(job())})
    jobs = Client(namespace="team-a")
    made = jobs.job("train")
    jobs.close()
    assert not Path((directory / "home").read_text()).exists()
    for ask in (made.progress, made.wait, lambda: list(made.logs(follow=True))):
        with pytest.raises(ClientError, match=r"The connection to the cluster is closed\. Make a new client\."):
            ask()


def test_wait_and_followed_logs_end_soon_after_the_client_is_closed(
    cluster: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_streams.Follower.__init__, "__defaults__", (0.05,))
    cluster(**{f"GET_{JOBS}/train": ok(job()), f"GET_{POD}": ok({"items": []})})
    jobs = Client(namespace="team-a")
    made = jobs.job("train")
    errors: list[ClientError] = []

    def noted(ask: Callable[[], object]) -> None:
        try:
            ask()
        except ClientError as error:
            errors.append(error)

    asks: list[Callable[[], object]] = [made.wait, lambda: list(made.logs(follow=True))]
    threads = [threading.Thread(target=noted, args=(ask,), daemon=True) for ask in asks]
    for thread in threads:
        thread.start()
    jobs.close()
    for thread in threads:
        thread.join(20)
    assert ["is closed" in str(error) for error in errors] == [True, True]


def test_job_and_its_logs_keep_the_connection_of_a_client_that_nobody_refers_to(logged: Path) -> None:
    made = Client().job("train")
    gc.collect()
    assert made.wait().state == "Succeeded"
    lines = made.logs()
    del made
    gc.collect()
    assert len(list(lines)) == 3
    del lines
    gc.collect()
    assert not Path((logged / "home").read_text()).exists()


# --- jobs of this machine --------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with Client.local() as jobs:
        yield jobs
    left = tmp_path / "home/regroup/runs"
    assert not left.exists() or not list(left.iterdir()), "a refused job leaves nothing"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({"cpu": "2"}, "cpu is for jobs of a cluster. Leave it out for a job of this machine.", id="cpu"),
        pytest.param({"data": ["d:/x"]}, "data is for jobs of a cluster.", id="data"),
        pytest.param({"pip": ["x"]}, "pip is for jobs of a cluster.", id="pip"),
        pytest.param({"script": "gone.py"}, "script (gone.py) is not a file.", id="no script"),
        pytest.param({"framework": "Cobol"}, "argument framework: invalid choice", id="a framework that there is not"),
        pytest.param({"name": "../x"}, "name (../x) is no name for a job.", id="a name that leaves the directory"),
        pytest.param({"workers": 0}, "workers (0) is less than 1.", id="no workers"),
        pytest.param({"min": 0}, "min (0) is less than 1.", id="min is 0"),
        pytest.param({"max": 0}, "max (0) is less than 1.", id="max is 0"),
        pytest.param({"gpus": -1}, "gpus (-1) is less than 0.", id="fewer GPUs than none"),
        pytest.param({"args": "10"}, "args ('10') is no list. Give a list, such as ['10'].", id="args are one text"),
        pytest.param({"args": ["a\0"]}, "args ('a\\x00') has a NUL character.", id="NUL in args"),
        pytest.param({"script": "a\0.py"}, "script ('a\\x00.py') has a NUL character.", id="NUL in the script"),
        pytest.param({"env": {"A": None}}, "env['A'] (None) is no text.", id="a variable without a text"),
        pytest.param({"env": {"A=B": "1"}}, "env ('A=B') is no name of a variable.", id="a name of a variable"),
        pytest.param({"workers": "2"}, "workers ('2') is no whole number.", id="workers as text"),
        pytest.param({"min": 1.5}, "min (1.5) is no whole number.", id="half a worker"),
    ],
)
def test_local_job_that_cannot_be_is_one_sentence(local: Client, arguments: dict[str, Any], sentence: str) -> None:
    Path("train.py").write_text("")
    with pytest.raises(ClientError) as refused:
        local.submit(**{"script": "train.py", **arguments})
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


def test_local_job_that_has_ended_is_not_changed(local: Client, tmp_path: Path) -> None:
    ended = job("Succeeded")
    ended["metadata"] |= {"resourceVersion": "1", "generation": 1}
    (tmp_path / "job").mkdir()
    (tmp_path / "job/job.json").write_text(json.dumps({**ended, "spec": {}}))
    made = local.job("job")
    assert made.wait().state == "Succeeded"
    for verb in (made.suspend, made.resume, lambda: made.scale(2)):
        with pytest.raises(JobError, match=r"The job train has ended \(Succeeded\): it cannot be"):
            verb()
    with pytest.raises(ClientError, match="There is no job nowhere on this machine"):
        local.job("nowhere")


def local_job(directory: Path, **found: Any) -> None:
    """Write the file of a local job."""
    directory.mkdir()
    made = {"metadata": {"name": "train", "resourceVersion": "1", "generation": 1}, "spec": {"replicas": 2}, **found}
    (directory / "job.json").write_text(json.dumps(made))


def test_local_job_is_found_by_its_name_where_a_folder_has_the_same(local: Client, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    local_job(tmp_path / "one")
    with local_jobs.held(tmp_path / "one"):
        assert local.job("train").status().directory == str(tmp_path / "one")
        local_job(tmp_path / "two")
        with local_jobs.held(tmp_path / "two"), pytest.raises(ClientError) as refused:
            local.job("train")
    assert str(refused.value) == (
        f"2 jobs have the name train. Give the directory of one: {tmp_path / 'one'}, {tmp_path / 'two'}"
    )


def test_local_job_that_starts_names_no_cluster(local: Client, tmp_path: Path) -> None:
    local_job(tmp_path / "one")
    with pytest.raises(TimedOut) as late:
        local.job("one").wait(timeout=0)
    assert str(late.value) == "The job is not succeeded after 0 s. train is Starting."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rank": 9}, "Use slot=N."),
        ({"slot": 9}, "Slot 9 is not in the job train, whose slots are 0 to 1. Give one of them."),
        ({"slot": 9, "follow": True}, "Slot 9 is not in the job train"),
        ({"tail": -1}, r"tail \(-1\) is less than 0"),
        ({"tail": "2"}, r"tail \('2'\) is no whole number"),
        ({"since": 5}, "since: "),
        ({"grep": 5}, r"grep \(5\) is not a regular expression"),
    ],
)
def test_local_logs_that_cannot_be(local: Client, tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    local_job(tmp_path / "one")
    with pytest.raises(ClientError, match=sentence):
        list(local.job("one").logs(**arguments))


def test_times_and_sizes_of_a_wrong_type_are_one_sentence(local: Client, tmp_path: Path) -> None:
    local_job(tmp_path / "one")
    made = local.job("one")
    with pytest.raises(ClientError, match=r"timeout \('3'\) is no number of seconds"):
        made.wait(timeout="3")  # type: ignore[arg-type]
    with pytest.raises(ClientError, match=r"workers \(2.5\) is no whole number"):
        made.scale(2.5)  # type: ignore[arg-type]
    with pytest.raises(ClientError, match="name is empty"):
        local.job("")


def test_run_that_ends_while_its_job_is_deleted_is_no_error(
    local: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_job(tmp_path / "one")
    with subprocess.Popen(["true"]) as ended:
        pass
    found = iter([ended.pid])
    monkeypatch.setattr(local_jobs, "runner", lambda _: next(found, None))
    local.job("one").delete()


def test_directory_that_a_killed_client_left_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    left, new, job_dir, runs = (tmp_path / "regroup/runs" / name for name in ("left", "new", "job", "runs"))
    for directory in (left, new, runs):
        directory.mkdir(parents=True)
    local_job(job_dir)
    for directory in (left, job_dir, runs):
        os.utime(directory, (0, time.time() - local_runs.LEFT_S - 1))
    monkeypatch.setattr(local_jobs, "runner", lambda directory: 1 if directory == runs else None)
    made = local_runs._new_directory("train")
    assert set(made.parent.iterdir()) == {new, job_dir, runs, made}


@pytest.mark.usefixtures("logged")
def test_logs_that_are_left_early_close_every_connection() -> None:
    asks: list[api.Asked] = []

    def noted(self: api.Api, pod: str, namespace: str | None = None, **query: str) -> api.Asked:
        asks.append(real(self, pod, namespace, **query))
        return asks[-1]

    real = api.Api.ask_log
    with Client() as jobs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.Api, "ask_log", noted)
        lines = jobs.job("train").logs()
        next(lines)
        lines.close()
    assert [asked._connection.sock for asked in asks] == [None, None]


@pytest.mark.usefixtures("logged")
def test_request_for_a_log_that_was_not_read_is_closed() -> None:
    with access.connect(access.Target()) as cluster:
        asked = cluster.ask_log("train-worker-0-0")
        asked.close()
        assert asked._connection.sock is None
        with pytest.raises(ClientError, match="gave no answer"):
            asked.stream()
