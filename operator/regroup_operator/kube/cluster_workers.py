"""Workers as pods of the cluster: create, delete, dry run. Also the objects that each job has once: Service and ConfigMap.

It implements model.ports.Workers on a PodStore and a Client. `Rendering` makes the objects; the plan decides which
there should be. It also translates the API server's refusals into sentences for the user.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from regroup_operator.api import Job, NotFoundError, SpecError, UnavailableError
from regroup_operator.kube.client import CONFIG_MAPS, PODS, SERVICES, ApiConflict, ApiError, Client, Resource
from regroup_operator.kube.pods import PodStore, controller_of
from regroup_operator.model.ports import AlreadyExists
from regroup_operator.model.records import Key, Pod

PREPARED_FOR_S = 300.0
"""Time for which Service and ConfigMap are taken to be as they were last seen."""


class Rendering(Protocol):
    """Makes the objects of a job. Pure."""

    def pod(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> dict[str, Any]:
        """Return the worker's pod. May raise SpecError."""
        ...

    def trial_pod(self, job: Job) -> dict[str, Any]:
        """Return a pod for the dry run, with generateName. May raise SpecError."""
        ...

    def role_pod(self, job: Job, role: str, index: int, attempt: int) -> dict[str, Any]:
        """Return the pod of a role."""
        ...

    def service(self, job: Job) -> dict[str, Any] | None:
        """Return the headless Service; None: the job has none."""
        ...

    def config_map(self, job: Job) -> dict[str, Any]:
        """Return the ConfigMap with the present CA bundle."""
        ...


class ClusterWorkers:
    """The workers of all jobs. Reads from memory, writes by the API."""

    def __init__(
        self, client: Client, pods: PodStore, rendering: Rendering, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._pods = pods
        self._rendering = rendering
        self._clock = clock
        self._prepared: dict[str, tuple[float, dict[str, Any] | None, dict[str, Any]]] = {}

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return a worker pod from memory, or None."""
        return self._pods.pod(namespace, name)

    def list(self, key: Key, job_uid: str) -> tuple[Pod, ...]:
        """Return the job's worker pods from memory, by slot and attempt."""
        return self._pods.list(key, job_uid)

    def roles(self, key: Key, job_uid: str) -> tuple[Pod, ...]:
        """Return the pods of the job's roles from memory, by role, index and attempt."""
        return self._pods.roles(key, job_uid)

    def on_change(self, callback: Callable[[Key], None]) -> None:
        """Have `callback(key)` called whenever a pod of that job appears, changes or vanishes."""
        self._pods.on_change(callback)

    async def prepare(self, job: Job) -> None:
        """Make sure that Service and ConfigMap exist as rendered. After that, calls within PREPARED_FOR_S cost nothing.

        Raises SpecError if an object of that name belongs to another owner.
        """
        service, config_map = self._rendering.service(job), self._rendering.config_map(job)
        known = self._prepared.get(job.uid)
        if known is not None and known[1:] == (service, config_map) and self._clock() < known[0] + PREPARED_FOR_S:
            return
        is_new = known is None and job.status.start_time is None
        if service is not None:
            await self._ensure(job, SERVICES, service, is_new=is_new)
        await self._ensure(job, CONFIG_MAPS, config_map, is_new=is_new)
        self._prepared = {
            uid: entry for uid, entry in self._prepared.items() if self._clock() < entry[0] + PREPARED_FOR_S
        }
        self._prepared[job.uid] = (self._clock(), service, config_map)

    def lost(self, job_uid: str) -> None:
        """Forget that a job is prepared, since one of its objects is gone. The next `prepare` looks again."""
        self._prepared.pop(job_uid, None)

    async def validate(self, job: Job) -> None:
        """Try the worker's pod, and one of each role, in a dry run. Raises SpecError with one sentence for a fault of a pod.

        Other refusals are ignored, such as one by a quota, or by a webhook that does not support dry runs. Raises
        UnavailableError if the API server gives no verdict.
        """
        await self._try(job, self._rendering.trial_pod(job), TEMPLATE)
        for role in job.spec.roles:
            pod = self._rendering.role_pod(job, role.name, 0, 0)
            pod["metadata"]["generateName"] = f"{job.name}-dry-run-"
            del pod["metadata"]["name"]
            await self._try(job, pod, template_of(role.name))

    async def _try(self, job: Job, pod: dict[str, Any], where: str) -> None:
        try:
            await self._client.create(PODS, job.namespace, pod, dry_run=True, strict=True)
        except ApiError as error:
            refusal = refusal_of(error, job.namespace, where)
            if refusal is not None:
                raise refusal from None
            if isinstance(error, UnavailableError):
                raise

    async def create(self, job: Job, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> bool:
        """Create the worker's pod. Return False if the job has one of that name that is not terminating.

        Raises AlreadyExists if another pod has the name, and SpecError if the pod is refused. Any other ApiError (a
        quota, a webhook, the namespace being deleted) means: try again later.
        """
        return await self._create(job, self._rendering.pod(job, slot, attempt, avoid_nodes), TEMPLATE)

    async def create_role(self, job: Job, role: str, index: int, attempt: int) -> bool:
        """Create the pod of a role, as `create` does a worker's."""
        return await self._create(job, self._rendering.role_pod(job, role, index, attempt), template_of(role))

    async def _create(self, job: Job, body: dict[str, Any], where: str) -> bool:
        try:
            made = await self._client.create(PODS, job.namespace, body)
        except ApiConflict as error:
            name = body["metadata"]["name"]
            if error.reason != "AlreadyExists":
                raise
            try:
                existing = await self._client.get(PODS, job.namespace, name)
            except NotFoundError:
                raise UnavailableError(f"Pod {name} existed a moment ago and is gone; create it again.") from None
            owner = controller_of(existing)
            if owner is None or owner["uid"] != job.uid:
                raise AlreadyExists(f"Pod {name} exists and does not belong to this job.") from None
            if "deletionTimestamp" in existing["metadata"]:
                raise AlreadyExists(f"Pod {name} is still terminating.") from None
            return False
        except ApiError as error:
            raise (refusal_of(error, job.namespace, where) or error) from None
        self._pods.made(made)
        return True

    async def delete(self, pod: Pod) -> None:
        """Delete exactly this pod with its own grace. It is no error if it is gone, or another pod has its name."""
        try:
            await self._client.delete(PODS, pod.namespace, pod.name, uid=pod.uid)
        except (NotFoundError, ApiConflict):
            pass

    async def _ensure(self, job: Job, resource: Resource, wanted: dict[str, Any], *, is_new: bool) -> None:
        """Make one object as it is wanted. With `is_new` it probably does not exist, so it is created without a look."""
        name = wanted["metadata"]["name"]
        if is_new:
            try:
                await self._client.create(resource, job.namespace, wanted)
                return
            except ApiConflict:
                pass
        try:
            found = await self._client.get(resource, job.namespace, name)
        except NotFoundError:
            try:
                await self._client.create(resource, job.namespace, wanted)
                return
            except ApiConflict:
                found = await self._client.get(resource, job.namespace, name)
        owner = controller_of(found)
        if owner is None or owner["uid"] != job.uid:
            if owner is not None and owner["name"] == job.name:
                # Left by a job of the same name that was deleted; the garbage collector is on its way.
                raise UnavailableError(f"{wanted['kind']} {name} still belongs to a deleted job of the same name.")
            raise SpecError(
                f"{wanted['kind']} {name} exists in namespace {job.namespace} and does not belong to this job. "
                "Delete it, or give the job another name.",
                reason="NameTaken",
            )
        surplus = found.get("spec", {}).get("selector", {}).keys() - wanted.get("spec", {}).get("selector", {}).keys()
        if surplus or not contains(found, wanted):
            body = copy.deepcopy(wanted)
            # A job that now has a role has a wider Service selector. A merge patch removes only keys that it names.
            body.get("spec", {}).get("selector", {}).update(dict.fromkeys(surplus))
            await self._client.patch(resource, job.namespace, name, body)


def contains(found: Any, wanted: Any) -> bool:
    """Return whether everything in `wanted` is in `found` with the same value. Lists must have the same length."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(k in found and contains(found[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        same_length = isinstance(found, list) and len(found) == len(wanted)
        return same_length and all(contains(f, w) for f, w in zip(found, wanted))
    return bool(found == wanted)


_STRICT = re.compile(r"strict decoding error: (?P<what>.*)$", re.DOTALL)
_DECODE = re.compile(r"cannot be handled as a Pod: (?P<what>.*)$", re.DOTALL)
_INVALID = re.compile(r"is invalid: (?P<what>.*)$", re.DOTALL)
_POD_SECURITY = re.compile(r'violates PodSecurity "(?P<level>[^"]+)": (?P<what>.*)$', re.DOTALL)


TEMPLATE = "spec.template"


def template_of(role: str) -> str:
    """Return the field of a role's template, as users write it."""
    return f"spec.roles[{role}].template"


def refusal_of(error: ApiError, namespace: str, where: str = TEMPLATE) -> SpecError | None:
    """Return the verdict on the job in the API server's refusal of its pod, or None if it is none.

    `where` is the field of the pod's template.
    """
    text = str(error)
    if error.status == 400 and "admission webhook" not in text:
        found = _STRICT.search(text) or _DECODE.search(text)
        what = _in_template(found["what"], where) if found else text
        return SpecError(f"{where} is not a pod: {_end(what)} Correct it.", reason="InvalidTemplate")
    if error.status == 422 and error.reason == "Invalid":
        found = _INVALID.search(text)
        what = _in_template(found["what"], where) if found else text
        return SpecError(f"{where} is refused: {_end(what)} Correct it.", reason="InvalidTemplate")
    if error.status == 403 and (found := _POD_SECURITY.search(text)):
        return SpecError(
            f"{where} breaks Pod Security {found['level']} of namespace {namespace}: {_end(found['what'])} "
            f"Set these fields in {where}, or use another namespace.",
            reason="PodSecurity",
        )
    return None


def _in_template(text: str, where: str) -> str:
    """Replace the fields of a pod by those of the job: spec.containers[0] becomes spec.template.spec.containers[0]."""
    return re.sub(r'(?<![\w.])(["\[]?)(spec|metadata)\.', lambda m: f"{m[1]}{where}.{m[2]}.", text)


def _end(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith(".") else f"{text}."
