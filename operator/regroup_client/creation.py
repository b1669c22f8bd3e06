"""Puts the objects of a job into a cluster, so that a failure leaves nothing behind, and a crash nothing that is hidden.

First the API server checks every object in a dry run. Then come the job, and the ConfigMap with its files, which the job owns. New
claims come last. Nobody owns them, because a model must outlive its job.

If a step fails, the job is deleted if this command has created it, and the ConfigMap goes with it. A crash between two steps leaves
a job whose pods wait. `list` shows it, and `delete` or the same command ends that.
"""

from __future__ import annotations

import copy

from regroup_client import views
from regroup_client.api import CLAIMS, CONFIG_MAPS, JOBS, Api, Object
from regroup_client.errors import ApiError, ClientError, SubmitError
from regroup_client.submission import KIND, LABEL_CODE_OF, Objects

KINDS = {KIND: JOBS, "ConfigMap": CONFIG_MAPS, "PersistentVolumeClaim": CLAIMS}
"""Kinds of objects that can be submitted."""


def of_documents(documents: list[Object], where: str) -> Objects:
    """Return the objects of a manifest, such as `--save` writes. Raises SubmitError if it is not one job and what it needs."""
    for number, one in enumerate(documents, 1):
        name = one.get("metadata", {}).get("name") if isinstance(one.get("metadata"), dict) else None
        if one.get("kind") not in KINDS or not isinstance(name, str):
            raise SubmitError(
                f"{where}: document {number} ({one.get('kind')}) is no {', '.join(KINDS)} with a metadata.name. Use kubectl apply "
                "for other objects."
            )
    jobs = [one for one in documents if one["kind"] == KIND]
    if len(jobs) != 1:
        raise SubmitError(f"{where} has {views.counted(len(jobs), KIND)}. Give a file that has one.")
    code = [one for one in documents if _label(one) == jobs[0]["metadata"]["name"]]
    return Objects(jobs[0], tuple(code), tuple(one for one in documents if one not in (jobs[0], *code)))


def _label(item: Object) -> str | None:
    found: str | None = (item["metadata"].get("labels") or {}).get(LABEL_CODE_OF)
    return found if item["kind"] == "ConfigMap" else None


def check(api: Api, objects: Objects) -> Object | None:
    """Let the API server check every object, and store nothing. Return the job that is there already, if there is one.

    Raises ClientError.
    """
    name, namespace = _place(objects.job)
    there = _find_job(api, name, namespace)
    claim = api.find(CLAIMS, objects.new_claim, namespace) if objects.new_claim and there is None else None
    if claim is not None:
        raise SubmitError(
            f"The claim {objects.new_claim} exists already, perhaps with checkpoints of an earlier job. To go on with them give "
            f"--checkpoint {objects.new_claim}; to begin anew give another --name."
        )
    if there is not None and views.state(there) in views.ENDED:
        raise SubmitError(
            f"The job {name} exists and has ended ({views.state(there)}). Delete it, or give another --name."
        )
    for item in (*objects.code, *objects.others):
        _apply(api, item, dry_run=True)
    checked = _apply(api, objects.job, dry_run=True)
    if there is not None and checked["spec"]["template"] != there["spec"]["template"]:
        raise SubmitError(
            f"The job {name} exists, and its files, image and other parts of its pods cannot change any more. Delete it, or give "
            "another --name."
        )
    return there


def _find_job(api: Api, name: str, namespace: str | None) -> Object | None:
    try:
        return api.find(JOBS, name, namespace)
    except ApiError as error:
        if error.status != 404:
            raise
        raise ApiError(
            404, "NoKind", "The cluster does not know DistributedTrainingJobs. Install Regroup's operator there first."
        ) from None


def create(api: Api, objects: Objects) -> Object:
    """Create the objects, or apply them to the job that is there, and return the job as stored. Raises ClientError."""
    there = check(api, objects)
    if there is not None:
        _apply_all(api, objects, there)
        return _apply(api, objects.job)
    job, is_ours = api.applied(JOBS, objects.job)  # another command may have created it since the check
    try:
        _apply_all(api, objects, job)
    except BaseException as error:  # Ctrl-C, too
        if is_ours:
            _undo(api, job, error)
        raise
    return job


def _apply_all(api: Api, objects: Objects, job: Object) -> None:
    for item in objects.code:
        _apply(api, _owned(item, job))
    for item in objects.others:
        _apply(api, item)


def _undo(api: Api, job: Object, error: BaseException) -> None:
    """Delete a job that was just created. Raises ApiError if that cannot be done, either."""
    name, namespace = _place(job)
    try:
        api.delete(JOBS, name, namespace, uid=job["metadata"]["uid"])
    except ClientError as second:
        raise ApiError(
            0, "NotUndone", f"{error} The job {name} was created before, and cannot be deleted ({second}). Delete it."
        ) from None


def _owned(item: Object, job: Object) -> Object:
    owned = copy.deepcopy(item)
    owned["metadata"]["ownerReferences"] = [
        {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
        }
    ]
    return owned


def _apply(api: Api, item: Object, *, dry_run: bool = False) -> Object:
    return api.apply(KINDS[item["kind"]], item, dry_run=dry_run)


def _place(item: Object) -> tuple[str, str | None]:
    return item["metadata"]["name"], item["metadata"].get("namespace")
