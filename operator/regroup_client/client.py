"""The Python client: `from regroup_client import Client`. It submits scripts as jobs, and looks at jobs and changes them.

A script is submitted, never a function: a pickled function works only with the Python and the packages that made it.

The methods block, and may be called by several threads. They need no event loop, so that they work in a notebook, which runs one.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, Unpack, cast

from regroup_client import arguments, bundle, creation, packages, submission, views
from regroup_client.access import Target, connect
from regroup_client.api import Api
from regroup_client.arguments import in_words_of_python
from regroup_client.cluster_jobs import ClusterJobs
from regroup_client.errors import ApiError, ClientError, JobError, SubmitError, TimedOut
from regroup_client.jobs import Jobs, Verb, Wanted, change
from regroup_client.log_lines import Line, duration
from regroup_client.log_streams import Choice, Follower, Patience, read
from regroup_client.place import How, Options, Place
from regroup_client.views import JobView, Point

Until = Literal["training", "suspended", "succeeded", "ended"]
POLL_S = 1.0
"""Time between two looks at a job that is waited for."""
_log = logging.getLogger("regroup_client")


@dataclass(frozen=True)
class Progress:
    """The progress of a job, as its members last reported it. None: not known."""

    step: int | None
    """Last step that every member has committed."""

    total_steps: int | None
    """Number of steps of the job."""

    percent: float | None
    """Share of the work that is done."""

    loss: float | None
    """Loss of this step."""

    samples_per_second: float | None
    """Committed samples per second."""

    optimizer_steps: int | None
    """Optimizer steps since the processes started, of a script that says no step itself."""

    eta: str
    """Estimated time left, such as "1h12m". Empty unless the job is Running."""

    goodput_percent: float | None
    """Share of the job's time that was spent in steps that stay."""

    curve: tuple[Point, ...]
    """The loss so far: at most 64 points, oldest first."""


class Job:
    """A job. It is a name: each method asks the cluster, or reads the file of a local job, and raises ClientError."""

    def __init__(self, client: Client, name: str) -> None:
        """Made by `Client.job`, `Client.jobs` and `Client.submit`."""
        self._client = client  # else the connection would end with the last reference to the client
        self._jobs: Jobs = client._place.jobs
        self.name = name
        """Name of the job. A job of this machine is named by its directory."""

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    @in_words_of_python()
    def status(self) -> JobView:
        """Return all that is known of the job: state, numbers, workers with their ranks, incidents, and sentences on why."""
        return self._jobs.look(self.name)

    @in_words_of_python()
    def why(self) -> tuple[str, ...]:
        """Return sentences on why the job is in its state, the most important first."""
        return self.status().why

    @in_words_of_python()
    def progress(self) -> Progress:
        """Return how far the job is. It is up to ten seconds old, because the operator writes it so often."""
        return _progress(self._jobs.read(self.name))

    @in_words_of_python()
    def wait(self, until: Until = "succeeded", *, timeout: float | None = None) -> JobView:
        """Wait until the job is training, suspended, succeeded or ended, and return its record.

        Without `timeout` (seconds) the wait is endless, and a suspended job is waited for. Raises TimedOut after that time, and
        JobError if the job has ended otherwise, or was rejected. A cluster that is out of reach is asked again for 60 s.

        A script that reports no progress counts as training 30 s after its processes started. If it succeeds before, the wait for
        "training" ends then.
        """
        if until not in list(_REACHED):
            raise JobError(f"until ({until!r}) is none of {', '.join(_REACHED)}. Give one of them.")
        deadline_s = None if timeout is None else time.monotonic() + arguments.seconds("timeout", timeout)
        patience, why = Patience(), ""
        while True:
            try:
                job = self._jobs.read(self.name)
            except ApiError as error:
                if error.is_final or patience.ends(time.monotonic()):
                    raise
            else:
                patience.succeeded()
                if is_reached(job, until):
                    return views.job_view(job)
                why = " ".join(views.why(job, (), ()))
            left_s = POLL_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimedOut(f"The job is not {until} after {timeout:g} s. {why}".strip())
            time.sleep(min(POLL_S, left_s))

    @in_words_of_python()
    def logs(
        self,
        *,
        rank: int | None = None,
        slot: int | None = None,
        since: str | timedelta | None = None,
        grep: str | None = None,
        follow: bool = False,
        tail: int | None = None,
        all_attempts: bool = False,
    ) -> Generator[Line, None, None]:
        """Yield the lines that the workers wrote, by time. `str` of a line is the text with [slot.rank] in front.

        Choose lines by `rank`, `slot`, `since` ("10m") and `grep`, a regular expression. `tail` is a number of last lines of each
        worker; None means all. `all_attempts` adds the replaced pods of each slot. With `follow` the lines go on until the job
        ends: the wait is endless. `close()` of what is returned ends it.
        """
        for name, number in (("rank", rank), ("slot", slot), ("tail", tail)):
            if number is not None:
                arguments.whole(name, number, least=0)
        choice = Choice(rank, 0, None if grep is None else _pattern(grep))
        since_s = None
        if since is not None:
            seconds = _duration(since).total_seconds()
            since_s = max(1, round(seconds))
            choice = Choice(rank, time.time_ns() - int(seconds * 10**9), choice.pattern)
        reader = self._jobs.logs(self.name, Wanted(slot, rank, all_attempts), since_s)
        return self._yielded(
            Follower(reader, choice, tail, _log.warning).lines() if follow else read(reader, choice, tail)
        )

    def _yielded(self, lines: Generator[Line, None, None]) -> Generator[Line, None, None]:
        """Yield lines while this job, and so its connection, is referred to."""
        with in_words_of_python():
            yield from lines

    def scale(self, workers: int) -> None:
        """Change the number of workers. Raises JobError for a job that has ended."""
        self._change("scale", arguments.whole("workers", workers))

    def suspend(self) -> None:
        """Give the workers back. The job's state is saved if it writes checkpoints. `wait("suspended")` waits for it."""
        self._change("suspend")

    def resume(self) -> None:
        """Go on with a suspended job."""
        self._change("resume")

    @in_words_of_python()
    def delete(self) -> None:
        """Delete the job and its workers. Checkpoints stay. Returns when the job is gone, or raises JobError after 60 s."""
        self._jobs.delete(self.name)

    @in_words_of_python()
    def _change(self, verb: Verb, workers: int = 0) -> None:
        change(self._jobs, self.name, verb, workers)


class Client:
    """Jobs of a cluster, through your kubeconfig or the service account of a pod, or jobs of this machine (`Client.local`).

    A cluster is reached through `kubectl proxy`, which ends with `close`, with the `with` block, or with this process. It also
    ends when your program has neither the client nor one of its jobs any more.
    """

    def __init__(
        self, namespace: str | None = None, *, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        """Connect to a cluster. Without arguments it is the one that kubectl would choose. Raises ClientError."""
        with in_words_of_python(), contextlib.ExitStack() as opened:
            api = opened.enter_context(connect(Target(namespace, context, kubeconfig)))
            self._opened = opened.pop_all()
        self._place: Place = _Cluster(api)

    @classmethod
    def local(cls) -> Self:
        """Return a client for jobs of this machine: those of `regroup run`, too. Needs the extra `cli`."""
        from regroup_client.local_runs import LocalRuns  # Linux only

        client = cls.__new__(cls)
        client._opened, client._place = contextlib.ExitStack(), LocalRuns()
        return client

    @in_words_of_python()
    def submit(
        self,
        script: str | Path,
        args: Sequence[str | float] = (),
        *,
        image: str = "",
        workers: int = 1,
        gpus: int = 0,
        **options: Unpack[Options],
    ) -> Job:
        """Run a script as a job, and return the job. Raises ClientError, and then nothing was created.

        `args` are arguments for the script. `image` has python3 and what the script imports; a cluster needs it, and this machine
        runs the script with the Python of this process. `gpus` is a number for each worker: each GPU gets a process.
        """
        if unknown := sorted(set(options) - set(Options.__annotations__)):
            known = ", ".join(sorted(Options.__annotations__))
            raise SubmitError(f"{unknown[0]} is no argument of submit. Further arguments are {known}.")
        how = How(
            arguments.text("image", image), arguments.whole("workers", workers), arguments.whole("gpus", gpus, least=0)
        )
        given = cast("Options", arguments.options(options))
        name = self._place.submit(Path(arguments.text("script", script)), arguments.texts("args", args), how, given)
        return Job(self, name)

    @in_words_of_python()
    def jobs(self) -> list[Job]:
        """Return the jobs of the namespace, or of this machine, by name."""
        found = sorted(self._place.jobs.all(), key=lambda view: (view.name, view.directory))
        return [Job(self, view.directory or view.name) for view in found]

    @in_words_of_python()
    def job(self, name: str) -> Job:
        """Return a job. One of this machine is named by its name or its directory. Raises ClientError if there is none."""
        name = arguments.text("name", name)
        if not name:
            raise JobError("name is empty. Give the name of a job.")
        self._place.jobs.read(name)
        return Job(self, name)

    def close(self) -> None:
        """End the connection. Jobs go on. Jobs of a cluster that this client returned cannot be asked any more."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Cluster:
    """Implements Place."""

    def __init__(self, api: Api) -> None:
        self._api, self.jobs = api, ClusterJobs(api)

    def submit(self, script: Path, args: Sequence[str], how: How, options: Options) -> str:
        path, files = bundle.travelling(script, options.get("directory"))
        choices = submission.Choices(
            name=options.get("name", submission.job_name(script.stem)),
            image=how.image,
            script=path,
            arguments=args,
            workers=how.workers,
            least=options.get("min"),
            most=options.get("max"),
            gpus=how.gpus,
            cpu=options.get("cpu", ""),
            memory=options.get("memory", ""),
            framework=options.get("framework", ""),
            env=options.get("env", {}),
            env_from=options.get("env_from", ()),
            data=options.get("data", ()),
            checkpoint=options.get("checkpoint", ""),
            user=options.get("user"),
            packages=packages.resolve(options.get("pip", ()), options.get("index_url", ""), env=options.get("env", {})),
        )
        return str(creation.create(self._api, submission.objects(choices, files))["metadata"]["name"])


_REACHED: dict[str, tuple[str, ...]] = {
    "training": (views.FINISHING, views.COMPLETING, views.SUCCEEDED),  # it has trained between two looks
    "suspended": ("Suspended",),
    "succeeded": (views.SUCCEEDED,),
    "ended": views.OVER,
}
"""States in which each wait is over. A job is training by its condition."""


def is_reached(job: views.Object, until: Until) -> bool:
    """Return whether a job is as wanted. Raises JobError if it will not be: it has ended otherwise, or was rejected. Pure."""
    state = views.state(job)
    if state in _REACHED[until] or (until == "training" and views.trains(job)):
        return True
    if state in views.OVER or views.condition(job, "Accepted") == "False":
        raise JobError(" ".join(views.why(job, (), ())))
    return False


def _progress(job: views.Object) -> Progress:
    status = job.get("status") or {}
    found = status.get("progress") or {}
    step, total, percent = found.get("step"), found.get("totalSteps"), found.get("percent")
    if percent is None and step is not None and total:
        percent = 100 * step / total
    return Progress(
        step=step,
        total_steps=total,
        percent=percent,
        loss=found.get("loss"),
        samples_per_second=found.get("samplesPerSecond"),
        optimizer_steps=found.get("optimizerSteps"),
        eta=(status.get("summary") or {}).get("eta") or "",
        goodput_percent=(status.get("goodput") or {}).get("percent"),
        curve=views.curve(found),
    )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ClientError(f"grep ({text}) is not a regular expression ({error}). Correct it.") from None


def _duration(given: str | timedelta) -> timedelta:
    if isinstance(given, timedelta):
        return given
    try:
        return duration(given)
    except (ValueError, TypeError) as error:
        raise ClientError(f"since: {error}.") from None
