"""The fields that a user may write under `spec`, with the rules that the API server holds them to.

Each rule is written twice, side by side: as CEL for the API server, and as a validator for `regroup run`, which has no API server.
A test in tests/api holds that both say the same sentence. The templates of pods are in template.py. Rules that compare with the
stored object (immutability) are in changes.py, the one about metadata in crd.py; those beyond CEL's means are in job.py.
"""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regroup.protocol.progress_log import MAX_PATTERN
from regroup_operator.api.base import SpecModel, cel, with_rules
from regroup_operator.api.frameworks import (
    LISTED_COUNTS,
    MANY_LISTED,
    MOST_LISTED,
    NO_ROLE,
    NOT_ROLES,
    TENSORFLOW,
    Framework,
)
from regroup_operator.api.names import ROLE_PATTERN, ROLE_WORKER
from regroup_operator.api.template import PodTemplate, Role

MAX_REPLICAS = 5000
CHECKPOINT_DIR = "/regroup/checkpoint"
"""Directory where spec.checkpoint.volumeClaim is mounted."""

_ROLE_NAME = "Use at most 12 characters of a-z and 0-9, first a letter, and another word than worker."
_ALLOWS_NAME = f"r.name != '{ROLE_WORKER}' && r.name.matches('{ROLE_PATTERN}')"
"""CEL, of a role r."""


_TWO_LISTS = "spec.elasticPolicy has both sizes and sizeMultipleOf. Keep the one that says with how many workers the script trains."
_ONE_OF_SIZES = "Choose one of them."
_MULTIPLE_OF_SIZE = "Choose a multiple."


class ElasticPolicy(SpecModel):
    """The range in which the number of workers may change while the job runs."""

    model_config = with_rules(
        cel(
            "self.minReplicas <= self.maxReplicas",
            "spec.elasticPolicy.minReplicas is greater than spec.elasticPolicy.maxReplicas. "
            "Lower minReplicas or raise maxReplicas.",
            "'spec.elasticPolicy.minReplicas (%d) is greater than spec.elasticPolicy.maxReplicas (%d). "
            "Lower minReplicas or raise maxReplicas.'.format([self.minReplicas, self.maxReplicas])",
        ),
        cel("!has(self.sizes) || !has(self.sizeMultipleOf)", _TWO_LISTS),
        cel(
            "!has(self.sizes) || self.minReplicas in self.sizes",
            f"spec.elasticPolicy.minReplicas is not one of spec.elasticPolicy.sizes. {_ONE_OF_SIZES}",
            "'spec.elasticPolicy.minReplicas (%d) is not one of spec.elasticPolicy.sizes (%s). "
            f"{_ONE_OF_SIZES}'.format([self.minReplicas, self.sizes])",
        ),
        cel(
            "!has(self.sizeMultipleOf) || self.minReplicas % self.sizeMultipleOf == 0",
            f"spec.elasticPolicy.minReplicas is not a multiple of spec.elasticPolicy.sizeMultipleOf. {_MULTIPLE_OF_SIZE}",
            "'spec.elasticPolicy.minReplicas (%d) is not a multiple of spec.elasticPolicy.sizeMultipleOf (%d). "
            f"{_MULTIPLE_OF_SIZE}'.format([self.minReplicas, self.sizeMultipleOf])",
        ),
    )

    min_replicas: int = Field(ge=1, le=MAX_REPLICAS)
    """Fewest workers to train with. With fewer, the remaining workers wait; with the library they keep their state."""

    max_replicas: int = Field(ge=1, le=MAX_REPLICAS)
    """Highest value for spec.replicas. It reserves no resources. Immutable once the job has started, because workers check
    the batch size against this limit at startup."""

    growth_cooldown_seconds: int = Field(default=0, ge=0, le=86_400)
    """Seconds after a change of spec.replicas took effect during which the job does not grow. It shrinks at once, and replaces
    lost workers at once. Use it with an autoscaler: each growth interrupts training for a moment."""

    pending_timeout_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Seconds that a worker pod may be unschedulable while at least minReplicas other workers, by whole groups, have a node. The
    pod is then deleted. It is tried again after 60 s, later after up to 30 minutes, or once another one finds room. Meanwhile the
    job trains with the workers that it has. Absent: the pod waits as long as it takes."""

    sizes: list[Annotated[int, Field(ge=1, le=MAX_REPLICAS)]] | None = Field(
        default=None, min_length=1, max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Numbers of workers that the job may train with, for a script that does not run with every number. The job wants the largest
    of them that is at most spec.replicas. While fewer workers are ready, it trains with the largest of them that they make. An
    autoscaler may write any spec.replicas from minReplicas to maxReplicas. No pods are made beyond the wanted size. Each size must
    be a multiple of workersPerGroup, and minReplicas must be one of them. Absent: every number, unless sizeMultipleOf is set."""

    size_multiple_of: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    """The job trains only with multiples of this number of workers, as if sizes had all of them. It must be a multiple of
    workersPerGroup, and minReplicas must be a multiple of it. At most one of sizes and sizeMultipleOf may be set."""

    grow_at: Literal["Now", "Checkpoint"] = "Now"
    """Moment at which a script without the library grows. Now: at once. Checkpoint: within seconds after its next checkpoint. The
    script continues from it, so that nothing is lost. A checkpoint is complete when a file in the directory of spec.checkpoint was
    renamed or closed, and none has changed for a second. Only growth waits: losses and smaller sizes do not. It needs
    spec.checkpoint. With the library a job grows at once in both cases."""

    @model_validator(mode="after")
    def _ordered(self) -> ElasticPolicy:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"spec.elasticPolicy.minReplicas ({self.min_replicas}) is greater than "
                f"spec.elasticPolicy.maxReplicas ({self.max_replicas}). Lower minReplicas or raise maxReplicas."
            )
        return self

    @model_validator(mode="after")
    def _smallest_size(self) -> ElasticPolicy:
        if self.sizes is not None and self.size_multiple_of is not None:
            raise ValueError(_TWO_LISTS)
        if self.sizes is not None and self.min_replicas not in self.sizes:
            raise ValueError(
                f"spec.elasticPolicy.minReplicas ({self.min_replicas}) is not one of spec.elasticPolicy.sizes "
                f"({self.sizes}). {_ONE_OF_SIZES}"
            )
        if self.size_multiple_of is not None and self.min_replicas % self.size_multiple_of:
            raise ValueError(
                f"spec.elasticPolicy.minReplicas ({self.min_replicas}) is not a multiple of "
                f"spec.elasticPolicy.sizeMultipleOf ({self.size_multiple_of}). {_MULTIPLE_OF_SIZE}"
            )
        return self

    @property
    def permitted(self) -> Sequence[int] | None:
        """Numbers of workers that the job may train with, ascending; None: every number."""
        if self.sizes is not None:
            return sorted(self.sizes)
        step = self.size_multiple_of
        return None if step is None else range(step, self.max_replicas + 1, step)


def largest_size(permitted: Sequence[int] | None, count: int) -> int:
    """Return the largest of the `permitted` numbers that is at most `count`; 0: there is none. `permitted` is ascending, and None
    permits every number."""
    if permitted is None:
        return count
    index = bisect_right(permitted, count)
    return permitted[index - 1] if index else 0


_CHECKPOINT = "^(/(.*/)?)?step-[0-9]{1,18}[.]g[0-9]{1,18}-[0-9A-Za-z]{1,8}$"
_NAME_A_CHECKPOINT = (
    "Give what status.checkpoint.directory of the earlier job says, or the absolute path of such a directory."
)


class CheckpointPolicy(SpecModel):
    """Place and interval of checkpoints of the whole training state. Immutable once the job has started."""

    model_config = with_rules(
        cel(
            "has(self.volumeClaim) != has(self.path)",
            "spec.checkpoint needs exactly one of volumeClaim and path. Keep the one that says where checkpoints go.",
        ),
        cel(
            "!has(self.path) || self.path.startsWith('/')",
            "spec.checkpoint.path is not absolute. Give a directory that starts with /.",
            "'spec.checkpoint.path (' + self.path + ') is not absolute. Give a directory that starts with /.'",
        ),
        cel(
            f"!has(self.resumeFrom) || self.resumeFrom.matches('{_CHECKPOINT}')",
            f"spec.checkpoint.resumeFrom is no checkpoint. {_NAME_A_CHECKPOINT}",
            f"'spec.checkpoint.resumeFrom (' + self.resumeFrom + ') is no checkpoint. {_NAME_A_CHECKPOINT}'",
        ),
    )

    volume_claim: str | None = Field(default=None, min_length=1, max_length=253)
    """Name of a PersistentVolumeClaim in the job's namespace that all workers can mount (ReadWriteMany if they run
    on several nodes). It is mounted at /regroup/checkpoint. Exactly one of volumeClaim and path is required."""

    path: str | None = Field(default=None, min_length=1, max_length=4096)
    """Absolute directory on a volume that the template mounts in the trainer's container, shared by all workers."""

    every_seconds: int = Field(default=300, ge=1, le=604800)
    """Seconds between the starts of two checkpoints. A checkpoint begins after a step, once the data of the one before is on the
    volume. A step that takes longer than the interval has one each. If the interval cannot be kept, condition CheckpointsSaved has
    the reason IntervalTooShort."""

    keep: int = Field(default=3, ge=1, le=1000)
    """Number of complete checkpoints to keep. Older ones are deleted."""

    resume_from: str | None = Field(default=None, min_length=1, max_length=4096)
    """Checkpoint of an earlier job with which this one begins instead of step 0. A name, as in `status.checkpoint.directory` of
    that job, is one in the directory of this job's own checkpoints. Else it is an absolute path on a volume that the container
    `trainer` mounts. Numbers of workers and the split of the model may be others. It is read until the job has a checkpoint of its
    own, and never deleted by this job. A job whose script opens no `regroup.session` fails, because only a session reads the
    checkpoint."""

    @model_validator(mode="after")
    def _one_place(self) -> CheckpointPolicy:
        if (self.volume_claim is None) == (self.path is None):
            raise ValueError(
                "spec.checkpoint needs exactly one of volumeClaim and path. Keep the one that says where "
                "checkpoints go."
            )
        if self.path is not None and not self.path.startswith("/"):
            raise ValueError(
                f"spec.checkpoint.path ({self.path}) is not absolute. Give a directory that starts with /."
            )
        if self.resume_from is not None and re.fullmatch(_CHECKPOINT, self.resume_from) is None:
            raise ValueError(f"spec.checkpoint.resumeFrom ({self.resume_from}) is no checkpoint. {_NAME_A_CHECKPOINT}")
        return self

    @property
    def directory(self) -> str:
        """Absolute path of the job's checkpoints in its workers."""
        return self.path or CHECKPOINT_DIR

    @property
    def resume_path(self) -> str | None:
        """Absolute path of the checkpoint that the job begins with. None: it begins at step 0."""
        return (
            None if self.resume_from is None else posixpath.normpath(posixpath.join(self.directory, self.resume_from))
        )


_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
_SIZE = r"^[1-9][0-9]*(k|M|G|T|Ki|Mi|Gi|Ti)?$"


class MemorySnapshotPolicy(SpecModel):
    """A copy of the state in each worker's memory, which outlives the worker's processes. Immutable once the job has
    started."""

    model_config = with_rules(
        cel(
            f"self.sizeLimit.matches('{_SIZE}')",
            "spec.memorySnapshot.sizeLimit is not a size. Write a whole number with a unit, such as 20Gi.",
            "'spec.memorySnapshot.sizeLimit (' + self.sizeLimit + ') is not a size. Write a whole number with a unit, such as "
            "20Gi.'",
        )
    )

    size_limit: str = Field(max_length=32)
    """Memory that the snapshot may take in each worker, for example 20Gi. It must hold the state (parameters,
    optimizer, further objects) twice; where a model is split, twice what the worker's processes hold of it. It counts against
    the memory limit of the trainer's container."""

    every_seconds: int = Field(default=10, ge=1, le=604800)
    """Seconds between the starts of two snapshots. They are further apart if training would wait for copies for more than a
    twentieth of the time. They also are if copies would run for more than half of it. If the interval cannot be kept, condition
    SnapshotsTaken has the reason IntervalTooShort."""

    @model_validator(mode="after")
    def _is_size(self) -> MemorySnapshotPolicy:
        if re.fullmatch(_SIZE, self.size_limit) is None:
            raise ValueError(
                f"spec.memorySnapshot.sizeLimit ({self.size_limit}) is not a size. Write a whole number with a unit, such as "
                "20Gi."
            )
        return self

    @property
    def size_bytes(self) -> int:
        """Return sizeLimit in bytes."""
        return size_bytes(self.size_limit)


def size_bytes(size: str) -> int:
    """Return a whole quantity of Kubernetes in bytes. Raises ValueError for text that is none."""
    found = re.fullmatch(_SIZE, size)
    if found is None:
        raise ValueError(size)
    unit = found[1] or ""
    return int(size.removesuffix(unit)) * _UNITS[unit]


class ProgressPolicy(SpecModel):
    """The place of the job's progress in the output of a program that does not use the library. Immutable once the job has
    started."""

    log: str | None = Field(default=None, min_length=1, max_length=MAX_PATTERN)
    """Regular expression of Python that is looked for in each line of the processes' output, for example
    `^iter (?P<step>[0-9]+): loss (?P<loss>[0-9.]+)`. Its named groups are numbers: step, total (the number of steps), percent and
    loss. At least one of step, percent and loss is needed. These numbers take the place of those that the program reports in
    another way. A line counts up to its 1000th character."""


Action = Literal["Fail", "Restart", "Ignore"]
Signal = Literal[
    "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGUSR1", "SIGSEGV",
    "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGXCPU", "SIGXFSZ", "SIGSYS",
]  # fmt: skip
"""Signals that can end a process, by Linux' names. plan/failures/on_exit.py has their numbers."""
EndReason = Literal["OOMKilled", "Evicted", "Preempted", "ImagePullBackOff", "CreateContainerError", "Unschedulable"]
_ONE_MATCHER = "Give each rule exactly one of them, and write several rules for several."
_NUM_MATCHERS = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in ("exitCodes", "signals", "reasons"))


class ExitCodes(SpecModel):
    """A set of exit codes. A process that ended by signal n has the code 128 + n, as in Kubernetes."""

    operator: Literal["In", "NotIn"] = "In"
    """The comparison with values. In: the exit code is one of them. NotIn: it is none of them. A pod that was evicted or preempted
    has no exit code and matches neither."""

    values: list[Annotated[int, Field(ge=0, le=255)]] = Field(
        min_length=1, max_length=255, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Exit codes, 0 to 255. 0 is a process that ended before its last step was committed."""


class ExitRule(SpecModel):
    """The action that one kind of failure leads to. It has exactly one of exitCodes, signals and reasons."""

    model_config = with_rules(
        cel(
            f"{_NUM_MATCHERS} == 1",
            f"A rule of spec.recovery.onExit has none or several of exitCodes, signals and reasons. {_ONE_MATCHER}",
            "'A rule of spec.recovery.onExit (action ' + self.action + ') has ' + "
            "(has(self.exitCodes) || has(self.signals) || has(self.reasons) ? 'several' : 'none') + "
            f"' of exitCodes, signals and reasons. {_ONE_MATCHER}'",
        )
    )

    action: Action = Field(json_schema_extra={"maxLength": 7})  # CEL estimates the cost of the sentence above from it
    """Fail: the job fails at once. Restart: what ended starts again, and counts against maxRestarts. Ignore: what ended starts
    again, and counts nothing. A pod that has not started waits on with Restart and Ignore, as without a rule."""

    exit_codes: ExitCodes | None = None
    """Matches training processes, trainer containers and init containers by their exit code."""

    signals: list[Signal] | None = Field(
        default=None, min_length=1, max_length=18, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Matches training processes, trainer containers and init containers that ended by one of these signals, or with the exit code
    128 + n. The names are `SIGHUP, SIGINT, SIGQUIT, SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGUSR1, SIGSEGV, SIGUSR2,
    SIGPIPE, SIGALRM, SIGTERM, SIGXCPU, SIGXFSZ, SIGSYS`."""

    reasons: list[EndReason] | None = Field(
        default=None, min_length=1, max_length=6, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """OOMKilled: a process or container was killed for lack of memory. Evicted: the pod was evicted by its kubelet, a drain or a
    taint. Preempted: the pod had to make room for another one. ImagePullBackOff, CreateContainerError and Unschedulable: the pod
    cannot start; InvalidImageName, ErrImageNeverPull, CreateContainerConfigError and RunContainerError count with them."""

    @model_validator(mode="after")
    def _one_matcher(self) -> ExitRule:
        count = sum(matcher is not None for matcher in (self.exit_codes, self.signals, self.reasons))
        if count != 1:
            raise ValueError(
                f"A rule of spec.recovery.onExit (action {self.action}) has {'several' if count else 'none'} of exitCodes, "
                "signals and reasons. "
                f"{_ONE_MATCHER}"
            )
        return self


StopSignal = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"]


class GracefulStop(SpecModel):
    """The end of a script's processes in a planned change: another number of workers, a drain, suspension, the end of the job.
    Only for scripts that do not use the library."""

    signal: StopSignal | None = None
    """Signal that tells the script to save and to end by itself. Any exit code is right then. After `seconds` it gets SIGTERM, and
    10 seconds later SIGKILL. Absent: the script is not told. Each process is held after its next optimizer step, and files that
    are being written are waited for. Then it gets SIGTERM."""

    seconds: int = Field(default=60, ge=1, le=300)
    """Seconds that this may take before SIGTERM. A pod that is deleted has at most three fifths of its
    terminationGracePeriodSeconds for it."""


class RecoveryPolicy(SpecModel):
    """Bounds for failures: how many the job survives, and when a silent or hanging worker counts as failed."""

    max_restarts: int = Field(default=10, ge=0, le=1_000_000)
    """Failures allowed within windowSeconds; the next one fails the job. A failure is a training process that ends by itself
    with a non-zero code or a signal, or a container that fails. Deleted pods, drains, and lost or restarted nodes do not count.
    Rules in onExit change what counts."""

    window_seconds: int = Field(default=3600, ge=1, le=31_536_000)
    """Length of the window in which maxRestarts counts, in seconds."""

    disconnect_seconds: int = Field(default=5, ge=1, le=3600)
    """Seconds without a connection and without progress after which a worker counts as lost. Independent of it, a worker is
    lost when workers on two other nodes, and the operator, have heard nothing of it for 1.5 seconds."""

    spares: int = Field(default=0, ge=0, le=MAX_REPLICAS)
    """Workers beyond spec.replicas that are started and wait. When a worker is lost or drained, a spare takes its place at
    once, and the replacement becomes the next spare. A multiple of workersPerGroup. Spares hold GPUs."""

    rejoin_seconds: int = Field(default=0, ge=0, le=3600)
    """Seconds that the other workers wait for a crashed process to restart in place, before they continue without its worker.
    0: they continue at once. Fixed-size jobs always wait."""

    hang_seconds: int | None = Field(default=None, ge=1, le=604800)
    """Seconds without a committed step after which the job counts as hung. The processes outside any collective are then
    killed and restarted in place, which counts as restarts. At least three times the median step time applies. Absent: the
    longest of 300 s, 20 times the median step time, and 3 times the longest time between two steps so far. The first step
    of a process may take 1800 s, and a job.pause() block its max_s. A script without the library is restarted as a whole, from its
    own checkpoint, once its progress has stood still for so long. Absent: only condition Degraded says so, because an evaluation
    looks the same."""

    graceful_stop: GracefulStop | None = None
    """The end of a script's processes in a planned change. Absent: the script is not told, and the end may take 60 seconds. A
    change applies to pods that are made later."""

    on_exit: list[ExitRule] = Field(
        default_factory=list, max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Rules for failures. The first rule that matches applies. Only the first failure of a generation can fail the job by a rule,
    because its peers may fail as a consequence. A process that was started again and has been in no generation since counts as
    first. A failure that no rule matches is treated as without rules. A change applies to later failures, and at once to pods that
    cannot start."""


MANAGER = "regroup.dev/operator"
"""Value of runPolicy.managedBy by which this operator looks after the job."""
_MANAGER_RULE = "Write a domain, a slash and a name, such as kueue.x-k8s.io/multikueue."
_MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"


class Network(SpecModel):
    """The names of the job's pods in the cluster's DNS."""

    pod_names: bool = True
    """Each pod has a name in the DNS, `<pod>.<job>` for a worker, by a headless Service of the job. False: there is no Service, and
    each pod costs the API server fewer requests. Workers reach each other by IP address in both cases. A script or role that uses
    the names needs them. Immutable once the job has started."""


class RunPolicy(SpecModel):
    """When the job runs, how long it may, and what is left of it. The words are those of Kubeflow's runPolicy."""

    model_config = with_rules(
        cel(
            f"!has(self.managedBy) || self.managedBy.matches('{_MANAGER_PATTERN}')",
            f"spec.runPolicy.managedBy is no name of a controller. {_MANAGER_RULE}",
            f"'spec.runPolicy.managedBy (' + self.managedBy + ') is no name of a controller. {_MANAGER_RULE}'",
        )
    )

    suspend: bool = False
    """True: the job gives its pods back. Its processes stop together after a step, and save a checkpoint if spec.checkpoint is
    set; without one training begins anew. False again: the job continues. A job may be created suspended."""

    active_deadline_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Seconds after which the job fails (reason DeadlineExceeded), from its start, or from the last time it was resumed."""

    start_deadline_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Seconds after which a job that has not begun to train fails (reason StartDeadlineExceeded) and gives its pods back. They
    count from its creation, or from the last time it was resumed. Absent: it waits for its pods as long as it takes."""

    finish_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """The job fails (reason FinishDeadlineExceeded) if its script has not returned 0 in every worker after this many seconds. They
    count from the commit of the last step, or from the last time the job was resumed. Without the library they count from the first
    worker whose script returned 0. If all workers have to run their end again, they count on, unless that trains steps again.
    Absent: no limit."""

    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=31_536_000)
    """Seconds after its end at which the job is deleted, with its pods. Absent: it stays."""

    clean_pod_policy: Literal["None", "Running", "All"] = "None"
    """Pods that are deleted once the job has ended. Training processes are stopped in any case, and a pod that does not end is
    deleted. None, Running: pods that have ended stay, for their logs. None: the pod that a failure's message names stays for an
    hour even if a sidecar still runs in it, and keeps its GPUs. All: no pod stays."""

    managed_by: str | None = Field(default=None, min_length=1, max_length=63)
    """Name of the controller that looks after the job. Absent or regroup.dev/operator: this one. Any other: the operator leaves the
    job alone. Immutable."""

    @model_validator(mode="after")
    def _is_name(self) -> RunPolicy:
        if self.managed_by is not None and re.fullmatch(_MANAGER_PATTERN, self.managed_by) is None:
            raise ValueError(
                f"spec.runPolicy.managedBy ({self.managed_by}) is no name of a controller. {_MANAGER_RULE}"
            )
        return self


COUNTS_OF_WORKERS = (
    ("spec.replicas", ""),
    ("spec.elasticPolicy.minReplicas", "!has(self.elasticPolicy) || "),
    ("spec.elasticPolicy.maxReplicas", "!has(self.elasticPolicy) || "),
    ("spec.elasticPolicy.sizeMultipleOf", "!has(self.elasticPolicy) || !has(self.elasticPolicy.sizeMultipleOf) || "),
    ("spec.recovery.spares", "!has(self.recovery) || "),
)
"""The fields that count workers, and where each is given: all are multiples of workersPerGroup."""
_MULTIPLE = "Choose a multiple of workersPerGroup."
_NO_DIRECTORY = (
    "spec.elasticPolicy.growAt is Checkpoint, but spec.checkpoint is missing. "
    "Set spec.checkpoint to the directory where the script saves, or growAt to Now."
)
_MULTIPLES = "Choose multiples of workersPerGroup."


def _whole_groups(name: str, unless: str) -> dict[str, str]:
    count = name.replace("spec.", "self.", 1)
    return cel(
        f"{unless}{count} % self.workersPerGroup == 0",
        f"{name} is not a multiple of spec.workersPerGroup. {_MULTIPLE}",
        f"'{name} (%d) is not a multiple of spec.workersPerGroup (%d). {_MULTIPLE}'"
        f".format([{count}, self.workersPerGroup])",
    )


def _few_listed(name: str) -> dict[str, str]:
    count = name.replace("spec.", "self.", 1)
    unless = "!has(self.elasticPolicy) || " if "elasticPolicy" in name else ""
    return cel(
        f"self.framework != '{TENSORFLOW}' || {unless}{count} <= {MOST_LISTED}",
        f"{name} {MANY_LISTED}",
        f"'{name} (%d) {MANY_LISTED}'.format([{count}])",
    )


_IS_TASK = " || ".join(f"r.name == '{name}'" for name in NOT_ROLES)
"""CEL, of a role r."""


class JobSpec(SpecModel):
    """The job that the user wants."""

    model_config = with_rules(
        cel(
            "!has(self.elasticPolicy) || self.elasticPolicy.minReplicas > self.elasticPolicy.maxReplicas || "
            "(self.replicas >= self.elasticPolicy.minReplicas && self.replicas <= self.elasticPolicy.maxReplicas)",
            "spec.replicas is outside spec.elasticPolicy. Choose a number inside, or change minReplicas or maxReplicas.",
            "'spec.replicas (%d) is outside spec.elasticPolicy (%d to %d). Choose a number inside, or change "
            "minReplicas or maxReplicas.'.format([self.replicas, self.elasticPolicy.minReplicas, "
            "self.elasticPolicy.maxReplicas])",
        ),
        *(_whole_groups(field, given) for field, given in COUNTS_OF_WORKERS),
        *(_few_listed(field) for field in LISTED_COUNTS),
        cel(
            f"self.framework != '{TENSORFLOW}' || !has(self.roles) || !self.roles.exists(r, {_IS_TASK})",
            f"spec.roles has a chief or parameter servers, {NO_ROLE}",
            f"'spec.roles has %s, {NO_ROLE}'.format([self.roles.filter(r, {_IS_TASK})[0].name])",
        ),
        cel(
            "!has(self.elasticPolicy) || !has(self.elasticPolicy.sizes) || "
            "self.elasticPolicy.sizes.all(s, s % self.workersPerGroup == 0)",
            f"spec.elasticPolicy.sizes has a number that is not a multiple of spec.workersPerGroup. {_MULTIPLES}",
            "'spec.elasticPolicy.sizes (%s) has a number that is not a multiple of spec.workersPerGroup (%d). "
            f"{_MULTIPLES}'.format([self.elasticPolicy.sizes, self.workersPerGroup])",
        ),
        cel(
            "!has(self.elasticPolicy) || self.elasticPolicy.growAt != 'Checkpoint' || has(self.checkpoint)",
            _NO_DIRECTORY,
        ),
        cel(
            f"!has(self.roles) || self.roles.all(r, {_ALLOWS_NAME})",
            f"A name in spec.roles is not allowed. {_ROLE_NAME}",
            f"'spec.roles has the name %s, which is not allowed. {_ROLE_NAME}'"
            f".format([self.roles.filter(r, !({_ALLOWS_NAME}))[0].name])",
        ),
    )

    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Number of workers (pods) wanted now; kubectl scale, an autoscaler or a patch changes it. Immutable once the job has
    started, unless elasticPolicy is set."""

    elastic_policy: ElasticPolicy | None = None
    """The range in which replicas may change while the job runs. Absent: the size is fixed, and the job trains only with
    all replicas. It cannot be added or removed once the job has started."""

    processes_per_worker: int | None = Field(default=None, ge=1, le=256)
    """Training processes in each worker. Absent: what a launcher in the command says, else the container's limit of GPUs, else 1.
    GPUs are nvidia.com/gpu, nvidia.com/gpu.shared, nvidia.com/mig-*, amd.com/gpu, gpu.intel.com/i915 or xe, and habana.ai/gaudi.
    Immutable once the job has started."""

    workers_per_group: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Workers that hold one copy of the model together. Members of a generation are chosen in whole groups of this many. replicas,
    minReplicas, maxReplicas and recovery.spares must be multiples of it. Workers without a whole group are spares. Immutable once
    the job has started."""

    framework: Framework = "PyTorch"
    """The framework of a script without the library. In each generation its processes get the variables by which this framework
    finds them. TensorFlow reads `TF_CONFIG`. JAX reads `JAX_COORDINATOR_ADDRESS` and Open MPI's names. XGBoost reads `DMLC_*`. All
    but None have torchrun's names, too. None has only `REGROUP_RANK` and the like. Immutable once the job has started."""

    template: PodTemplate
    """The pod template of every worker. Immutable once the job has started."""

    roles: list[Role] = Field(
        default_factory=list,
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Further pods beside the workers, such as an evaluator or TensorBoard. Immutable once the job has started."""

    checkpoint: CheckpointPolicy | None = None
    """Place and interval of checkpoints of the whole training state. It is read only if all workers are lost at once. Absent: the
    state lives in the workers only. Immutable once the job has started."""

    memory_snapshot: MemorySnapshotPolicy | None = None
    """A copy of the state in each worker's memory: if all processes end at once, training continues from it and not from
    the last checkpoint. Absent: none is kept. Immutable once the job has started. Tier Session only."""

    progress: ProgressPolicy | None = None
    """The place of the job's progress in the output of a program that does not use the library. Absent: the job shows what the
    program reports by itself, or the optimizer steps that are counted in its processes. Immutable once the job has started."""

    recovery: RecoveryPolicy = Field(default_factory=RecoveryPolicy, json_schema_extra={"default": {}})
    """Bounds for failures: how many the job survives, and when a silent or hanging worker counts as failed."""

    network: Network = Field(default_factory=Network, json_schema_extra={"default": {}})
    """The names of the job's pods in the cluster's DNS."""

    run_policy: RunPolicy = Field(default_factory=RunPolicy, json_schema_extra={"default": {}})
    """When the job runs, how long it may, and what is left of it."""

    @model_validator(mode="after")
    def _role_names(self) -> JobSpec:
        names = [role.name for role in self.roles]
        for name in names:
            if name == ROLE_WORKER or re.fullmatch(ROLE_PATTERN.strip("^$"), name) is None:
                raise ValueError(f"spec.roles has the name {name}, which is not allowed. {_ROLE_NAME}")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"spec.roles has {twice} twice. Give each role a name of its own.")
        return self

    @model_validator(mode="after")
    def _replicas_inside(self) -> JobSpec:
        policy = self.elastic_policy
        if policy is not None and not policy.min_replicas <= self.replicas <= policy.max_replicas:
            raise ValueError(
                f"spec.replicas ({self.replicas}) is outside spec.elasticPolicy ({policy.min_replicas} to "
                f"{policy.max_replicas}). Choose a number inside, or change minReplicas or maxReplicas."
            )
        return self

    @model_validator(mode="after")
    def _grows_where_it_saves(self) -> JobSpec:
        if self.elastic_policy is not None and self.elastic_policy.grow_at == "Checkpoint" and self.checkpoint is None:
            raise ValueError(_NO_DIRECTORY)
        return self

    @model_validator(mode="after")
    def _of_framework(self) -> JobSpec:
        if self.framework != TENSORFLOW:
            return self
        most = self.elastic_policy.max_replicas if self.elastic_policy is not None else 0
        for name, count in zip(LISTED_COUNTS, (self.replicas, most), strict=True):
            if count > MOST_LISTED:
                raise ValueError(f"{name} ({count}) {MANY_LISTED}")
        task = next((role.name for role in self.roles if role.name in NOT_ROLES), None)
        if task is not None:
            raise ValueError(f"spec.roles has {task}, {NO_ROLE}")
        return self

    @model_validator(mode="after")
    def _in_whole_groups(self) -> JobSpec:
        policy, size = self.elastic_policy, self.workers_per_group
        limits = (0, 0, 0)
        if policy is not None:
            limits = (policy.min_replicas, policy.max_replicas, policy.size_multiple_of or 0)
        counts = (self.replicas, *limits, self.recovery.spares)
        for (name, _), count in zip(COUNTS_OF_WORKERS, counts, strict=True):
            if count % size:
                raise ValueError(f"{name} ({count}) is not a multiple of spec.workersPerGroup ({size}). {_MULTIPLE}")
        sizes = policy.sizes if policy is not None else None
        if any(one % size for one in sizes or ()):
            raise ValueError(
                f"spec.elasticPolicy.sizes ({sizes}) has a number that is not a multiple of spec.workersPerGroup ({size}). "
                f"{_MULTIPLES}"
            )
        return self
