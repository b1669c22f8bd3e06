"""The objects that a job has once, whatever its size: the headless Service and the ConfigMap with the CA bundle."""

from __future__ import annotations

from typing import Any

from regroup_operator.api import GROUP, KIND, VERSION, Job
from regroup_operator.api.names import LABEL_JOB_NAME, config_map_name, service_name, worker_labels


def service(job: Job) -> dict[str, Any] | None:
    """Return the headless Service that gives each worker a DNS name, ready or not; where the job has roles, their pods, too. None:
    the job wants no names."""
    if not job.spec.network.pod_names:
        return None
    everyone = {LABEL_JOB_NAME: job.name}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, service_name(job.name), worker_labels(job.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": everyone if job.spec.roles else worker_labels(job.name),
        },
    }


def config_map(job: Job, ca_bundle: str) -> dict[str, Any]:
    """Return the ConfigMap with the CA certificates (PEM, old and new) by which agents know the operator."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, config_map_name(job.name), worker_labels(job.name)),
        "data": {"ca.crt": ca_bundle},
    }


def metadata(job: Job, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return the metadata of an object that the job owns: it goes when the job goes."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**app_labels(job), **labels},
        "ownerReferences": [owner_reference(job)],
    }


def owner_reference(job: Job) -> dict[str, Any]:
    """Return the reference that makes an object ours; the UID in it, never a label, is the proof."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def app_labels(job: Job) -> dict[str, str]:
    """Return the labels that Kubernetes recommends for every application."""
    return {
        "app.kubernetes.io/name": "regroup",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/managed-by": "regroup",
    }


def name_in_dns(spec: dict[str, Any], job: Job, hostname: str) -> None:
    """Give a pod the name by which the headless Service makes it known, where its template gives none."""
    if job.spec.network.pod_names:
        spec.setdefault("hostname", hostname)
        spec.setdefault("subdomain", service_name(job.name))


def resolve_names(spec: dict[str, Any]) -> None:
    """Have a pod on its node's network resolve the cluster's names, where its template does not say how names are resolved."""
    # Kubernetes takes ClusterFirst on the node's network as Default, the node's own resolver, which knows no Service.
    if spec.get("hostNetwork") is True:
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
