"""A job as the rest of the operator reads it, and the rules that only Python can check.

The API server has applied the CRD's rules to whatever is stored. `parse_job` applies them again: `regroup run` has no API server,
and a rule may be newer than a stored job. Beyond the CRD it holds the template to what render/ adds to it: names and places under
/regroup are ours.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from regroup.protocol.progress_log import PatternError, compile_pattern
from regroup.protocol.text import shorten
from regroup_operator.api.conditions import COMPLETE, FAILED
from regroup_operator.api.errors import SpecError, StatusError
from regroup_operator.api.frameworks import EVALUATOR, PYTORCH, RESERVED_ENV, TENSORFLOW
from regroup_operator.api.launcher import contradictions, launcher_of, processes_of, trainer_of, with_range
from regroup_operator.api.members import parse_members
from regroup_operator.api.names import MAX_JOB_NAME
from regroup_operator.api.spec import MANAGER, JobSpec, largest_size, size_bytes
from regroup_operator.api.status import JobStatus

OUR_PATHS = ("/regroup", "/var/run/secrets/regroup")

GPU_RESOURCE = re.compile(
    r"nvidia\.com/(gpu(\.shared)?|mig-[a-z0-9.]+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)|habana\.ai/gaudi"
)
"""Resource names that the vendors' device plugins give to whole devices, or to slices of them, that torch can use."""
_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class Job:
    """One DistributedTrainingJob at one resourceVersion.

    `spec_generation` is metadata.generation; the word generation alone means a membership. `raw` is the object as the
    API server gave it: do not change it.
    """

    name: str
    namespace: str
    uid: str
    resource_version: str
    spec_generation: int
    spec: JobSpec
    status: JobStatus
    deleting: bool = False
    refusal: SpecError | None = field(default=None, compare=False)
    """The reason why the job runs by an earlier spec than the stored one, or before its start not at all. None: there is none."""
    template_changed: bool = field(default=False, compare=False)
    """The job has started, and its template or that of a role is another one than then: no pod may be made from it."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def created(self) -> str | None:
        """metadata.creationTimestamp, None where there is no API server."""
        found: str | None = self.raw["metadata"].get("creationTimestamp")
        return found

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name): the key of the work queue."""
        return self.namespace, self.name

    @property
    def min_replicas(self) -> int:
        """The fewest workers that may train; equals `max_replicas` and replicas for a job of fixed size."""
        policy = self.spec.elastic_policy
        return policy.min_replicas if policy else self.spec.replicas

    @property
    def max_replicas(self) -> int:
        """The most workers that may be asked for."""
        policy = self.spec.elastic_policy
        return policy.max_replicas if policy else self.spec.replicas

    @property
    def wanted(self) -> int:
        """Workers that the job should train with: the largest permitted number that is at most spec.replicas."""
        policy = self.spec.elastic_policy
        if policy is None:
            return self.spec.replicas
        # An accepted spec of an older version may break a rule, so that no size is permitted.
        return largest_size(policy.permitted, self.spec.replicas) or policy.min_replicas

    @property
    def elastic(self) -> bool:
        """True if the number of workers may change while the job runs."""
        return self.spec.elastic_policy is not None

    @property
    def progress_log(self) -> str | None:
        """spec.progress.log, None if no lines are read."""
        return None if self.spec.progress is None else self.spec.progress.log

    @property
    def has_ended(self) -> bool:
        """True if the status says that it is complete, or has failed: then it stays so."""
        said = self.status.conditions or ()
        return any(c.type in (COMPLETE, FAILED) and c.status == "True" for c in said)

    def position(self, slot: int) -> int:
        """Return the position of a slot's worker in its group of workers: the same for every pod of the slot."""
        return slot % self.spec.workers_per_group

    def role_template(self, name: str) -> dict[str, Any]:
        """Return a copy of a role's template as the user wrote it, for the caller to change."""
        found = next(role for role in self.raw["spec"]["roles"] if role["name"] == name)
        return copy.deepcopy(dict(found["template"]))

    def pod_template(self) -> dict[str, Any]:
        """Return a copy of spec.template as the user wrote it, for the caller to change."""
        return copy.deepcopy(dict(self.raw["spec"]["template"]))


MAX_QUOTED_PATTERN = 80
"""Characters of a pattern that are repeated in the sentence on it."""
NOT_REPEATED = ("template", "roles")
"""Fields of the spec that status.acceptedSpec leaves out: they cannot change once the job has started, and are long. What their
pods are made from is held by status.templateDigest."""

TEMPLATE_CHANGED = (
    "spec.template, or the template of a role, is not the one that the job was started with. Change it back, or delete the job and "
    "create it anew. Until then no pod is made."
)


def is_ours(raw: Mapping[str, Any]) -> bool:
    """Return whether this operator looks after a job (spec.runPolicy.managedBy), by the object as the API server has it."""
    return ((raw.get("spec") or {}).get("runPolicy") or {}).get("managedBy") in (None, MANAGER)


def parse_job(raw: Mapping[str, Any]) -> Job:
    """Return the job in `raw`, a DistributedTrainingJob as the API server gives it.

    Raises SpecError with one sentence when the user's part breaks a rule, StatusError when our part cannot be read.
    """
    metadata = raw["metadata"]
    name = metadata["name"]
    if len(name) > MAX_JOB_NAME or _JOB_NAME.fullmatch(name) is None:
        raise SpecError(
            f"metadata.name ({name}) must have at most {MAX_JOB_NAME} characters, start with a letter and contain "
            "only a-z, 0-9 and -. Choose another name."
        )
    spec_raw = raw.get("spec")
    if not isinstance(spec_raw, Mapping):
        raise SpecError("spec is missing. Give at least spec.template.")
    spec = _spec_of(spec_raw)
    for problem in (*_template_problems(spec_raw, spec), *_progress_problems(spec)):
        raise SpecError(problem)
    job = _job_of(raw, spec)
    processes = processes_per_worker(job)
    launcher = launcher_of(spec_raw)
    for problem in contradictions(launcher, spec, processes) if launcher is not None else ():
        raise SpecError(problem)
    return job


def _spec_of(spec_raw: Any) -> JobSpec:
    try:
        spec = JobSpec.model_validate(spec_raw)
    except ValidationError as error:
        raise SpecError(_sentence(error, "spec")) from None
    return with_range(spec, launcher_of(spec_raw))


def _job_of(raw: Mapping[str, Any], spec: JobSpec) -> Job:
    metadata, status = raw["metadata"], parse_status(raw)
    return Job(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        uid=metadata.get("uid", ""),
        resource_version=metadata.get("resourceVersion", ""),
        spec_generation=metadata.get("generation", 0),
        spec=spec,
        status=status,
        deleting="deletionTimestamp" in metadata,
        template_changed=status.template_digest not in (None, template_digest(raw)),
        raw=raw,
    )


def parse_stored(raw: Mapping[str, Any]) -> Job:
    """Return the job in `raw`, as the API server has it. One whose spec breaks a rule says why (`refusal`).

    A started job goes on by the spec that was accepted last (status.acceptedSpec). Its workers must not be left alone because of an
    edit that cannot be, or of a rule that is newer than the job. The rules of the template are not applied to it: its pods are
    there. No further pod is made from a template that is not the one of the start (`template_changed`). The accepted spec, too, may
    break a newer rule. It stays valid for its job.

    Before the start nothing is made, but runPolicy holds, and pods may be there of the spec before an edit. Raises SpecError where
    such a spec has not even the right fields (the API server has another schema then), and StatusError.
    """
    try:
        job = parse_job(raw)
        if job.template_changed:
            raise SpecError(TEMPLATE_CHANGED)
        return job
    except SpecError as error:
        status = parse_status(raw)
        if status.start_time is None:
            return replace(_job_of(raw, _spec_of(raw.get("spec"))), refusal=error)
        spec = {**(status.accepted_spec or {}), **{f: raw["spec"][f] for f in NOT_REPEATED if f in raw["spec"]}}
        try:
            accepted = _spec_of(spec)
        except SpecError:
            accepted = JobSpec.without_rules(spec)
        return replace(_job_of({**raw, "spec": spec}, accepted), refusal=error)


def parse_status(raw: Mapping[str, Any]) -> JobStatus:
    """Return the status in `raw`, empty when there is none; raises StatusError. Usable when the spec is not."""
    try:
        return JobStatus.model_validate(raw.get("status") or {})
    except ValidationError as error:
        raise StatusError(_sentence(error, "status")) from None


def processes_per_worker(job: Job) -> int:
    """Return p: spec.processesPerWorker, else the launcher's number in the command, else the container's limit of GPUs, else 1.

    Raises SpecError if the number cannot be known.

    A job that has trained keeps its number of processes. Its template may have changed since: the API server lets one kind of
    GPU take the place of another (adr/0069). No pod is made for a refused job, so its number is 1 if the limits do not say.
    """
    if job.spec.processes_per_worker is not None:
        return job.spec.processes_per_worker
    membership = job.status.membership
    if membership is not None:
        return membership.world_size // len(parse_members(membership.members))
    trainer = trainer_of(job.raw["spec"]["template"]["spec"]["containers"])
    try:
        launcher = launcher_of(job.raw["spec"])
        if launcher is not None and isinstance(launcher.counts.processes, int):
            return launcher.counts.processes
        gpus = _limit_of_gpus(trainer)
        found = None if launcher is None else processes_of(launcher, job.spec, gpus)
        return found or gpus or 1
    except SpecError:
        if job.refusal is None:
            raise
        return 1


def _limit_of_gpus(trainer: Mapping[str, Any]) -> int | None:
    """Return the container's limit of GPUs; None: it has none."""
    gpus = {name: limit for name, limit in _limits(trainer).items() if GPU_RESOURCE.fullmatch(name)}
    if len(gpus) > 1:
        raise SpecError(
            f"container {trainer['name']} has limits of several kinds of GPUs ({', '.join(sorted(gpus))}), so the number of its "
            "processes is not known. Set spec.processesPerWorker."
        )
    for name, limit in gpus.items():
        if not str(limit).isdigit():
            raise SpecError(
                f"the {name} limit of container {trainer['name']} ({limit}) is not a whole number. "
                "Write a whole number, or set spec.processesPerWorker."
            )
        return max(1, int(limit))
    return None


def template_digest(raw: Mapping[str, Any]) -> str:
    """Return a short digest of the templates of a job's pods, as the API server has them.

    The CRD's rule of equality overlooks a field that takes the place of another (adr/0069). The schema must never get a default
    inside of a template: jobs that run would seem changed."""
    spec = raw["spec"]
    made_from = [spec["template"], {role["name"]: role["template"] for role in spec.get("roles") or ()}]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]


def role_digest(job: Job, name: str) -> str:
    """Return a short digest of everything in the spec that a role's pod is made from."""
    made_from: list[Any] = [job.role_template(name), job.spec.network.pod_names]
    if name == EVALUATOR and job.spec.framework == TENSORFLOW:
        made_from.append(TENSORFLOW)
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]


def worker_digest(job: Job) -> str:
    """Return a short digest of everything in the spec that a worker's pod is made from.

    Two pods of a job differ in more than slot, attempt and nodes only if their digests differ. Recovery's times are in
    it where the pod carries them; what the operator's own installation adds (image, address) is not.
    """
    checkpoint, recovery, snapshot = job.spec.checkpoint, job.spec.recovery, job.spec.memory_snapshot
    processes, stop = processes_per_worker(job), recovery.graceful_stop
    made_from: dict[str, Any] = {
        "template": job.raw["spec"]["template"],
        "processes": processes,
        "maxWorldSize": processes * job.max_replicas,
        "checkpoint": None if checkpoint is None else checkpoint.model_dump(exclude={"keep"}),
        "recovery": [recovery.max_restarts, *([] if stop is None else [stop.model_dump()])],
        "workersPerGroup": job.spec.workers_per_group,
        "memorySnapshot": None if snapshot is None else snapshot.model_dump(),
        "podNames": job.spec.network.pod_names,
    }
    if job.elastic:
        made_from["elastic"] = True
    if job.progress_log is not None:
        made_from["progressLog"] = job.progress_log
    if job.spec.framework != PYTORCH:  # so that the default leaves a digest of before this field as it was
        made_from["framework"] = job.spec.framework
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]


def _reserved_metadata(template: Mapping[str, Any], where: str) -> Iterator[str]:
    for key in (template.get("metadata") or {}).get("labels") or {}:
        if key.startswith("regroup.dev/"):
            yield f"{where}.metadata.labels has {key}, but labels under regroup.dev/ are set by Regroup. Remove it."
    for key in (template.get("metadata") or {}).get("annotations") or {}:
        if key.startswith("regroup.dev/"):
            yield (
                f"{where}.metadata.annotations has {key}, but annotations under regroup.dev/ are set by Regroup. "
                "Remove it."
            )


def _template_problems(spec_raw: Mapping[str, Any], spec: JobSpec) -> Iterator[str]:
    """Yield a sentence for each thing in the templates that collides with what render/ adds."""
    for role in spec_raw.get("roles") or ():
        yield from _reserved_metadata(role["template"], f"spec.roles[{role['name']}].template")
    where = "spec.template"
    template = spec_raw["template"]
    yield from _reserved_metadata(template, where)
    pod = template["spec"]
    for volume in _mappings(pod.get("volumes")):
        if str(volume.get("name", "")).startswith("regroup-") or volume.get("name") == "regroup":
            yield (
                f"{where}.spec.volumes has {volume['name']}, but volume names that begin with regroup are reserved. "
                "Choose another name."
            )
    for kind in ("containers", "initContainers"):
        for container in _mappings(pod.get(kind)):
            if container.get("name") == "regroup-agent":
                yield f"{where}.spec.{kind} has regroup-agent, which Regroup adds itself. Choose another name."
            for mount in _mappings(container.get("volumeMounts")):
                if any(_inside(str(mount.get("mountPath", "")), ours) for ours in OUR_PATHS):
                    yield (
                        f"{where}.spec.{kind} mounts {mount.get('mountPath')}, but /regroup and "
                        "/var/run/secrets/regroup are reserved. Choose another mountPath."
                    )
    trainer = trainer_of(pod["containers"])
    name = trainer["name"]
    for variable in (str(entry.get("name")) for entry in _mappings(trainer.get("env"))):
        if variable in RESERVED_ENV.get(spec.framework, ()):
            yield (
                f"env name {variable} is reserved, because Regroup sets it for every process with spec.framework {spec.framework}. "
                "Remove it from spec.template."
            )
    snapshot = spec.memory_snapshot
    limit = str(_limits(trainer).get("memory", ""))
    if snapshot is not None and _is_less(limit, snapshot.size_bytes):
        yield (
            f"spec.memorySnapshot.sizeLimit ({snapshot.size_limit}) does not fit into the memory limit of container {name} "
            f"({limit}), against which it counts. Raise the limit, or lower sizeLimit."
        )
    path = spec.checkpoint.path if spec.checkpoint else None
    if path is not None:
        mounts = [str(mount.get("mountPath", "")) for mount in _mappings(trainer.get("volumeMounts"))]
        if not any(mount and _inside(path, mount) for mount in mounts):
            yield (
                f"spec.checkpoint.path ({path}) is not on a volume that container {name} mounts, so it would be lost "
                "with the pod. Mount a volume there, or use spec.checkpoint.volumeClaim."
            )
    resumed = spec.checkpoint.resume_path if spec.checkpoint else None
    if spec.checkpoint is not None and resumed is not None:
        mounts = [str(mount.get("mountPath", "")) for mount in _mappings(trainer.get("volumeMounts"))]
        if not any(mount and _inside(resumed, mount) for mount in [*mounts, spec.checkpoint.directory]):
            yield (
                f"spec.checkpoint.resumeFrom ({resumed}) is not on a volume that container {name} mounts. Mount the volume of "
                "that checkpoint there."
            )


def _progress_problems(spec: JobSpec) -> Iterator[str]:
    """Yield what is wrong with spec.progress.log."""
    pattern = None if spec.progress is None else spec.progress.log
    if pattern is None:
        return
    try:
        compile_pattern(pattern)
    except PatternError as error:
        yield f"spec.progress.log ({shorten(pattern, MAX_QUOTED_PATTERN)}) {error}"


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the container's resource limits; empty where there are none."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    return limits if isinstance(limits, Mapping) else {}


def _is_less(size: str, num_bytes: int) -> bool:
    """Return whether a quantity is less than so many bytes; what is no whole quantity is for the dry-run to judge."""
    try:
        return size_bytes(size) < num_bytes
    except ValueError:
        return False


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings of a list; what is not one is for the dry-run to refuse."""
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, Mapping))


def _inside(path: str, directory: str) -> bool:
    return path == directory.rstrip("/") or path.startswith(directory.rstrip("/") + "/")


def _sentence(error: ValidationError, root: str) -> str:
    """Return one sentence for the first problem of `error`: field path, value, rule."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    path = root
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    if first["type"] == "extra_forbidden":
        return f"{path} is not a field of the resource. Remove it or correct its spelling."
    if first["type"] == "missing":
        return f"{path} is missing. Add it."
    found = first["input"]
    shown = f" ({found})" if isinstance(found, str | int | float) else ""
    rule = first["msg"][0].lower() + first["msg"][1:]
    return f"{path}{shown} is refused: {rule.removeprefix('input ')}. Correct the value."
