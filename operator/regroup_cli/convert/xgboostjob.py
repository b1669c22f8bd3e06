"""The rules for an XGBoostJob of kubeflow.org/v1."""

from __future__ import annotations

from regroup_cli.convert.draft import Draft, take_metadata
from regroup_cli.convert.findings import Field
from regroup_cli.convert.kubeflow import replicas_of, take_priority, take_run_policy, take_workers
from regroup_cli.convert.launch import take_launch
from regroup_operator.api import SpecError


def convert(document: Field, draft: Draft) -> None:
    """Convert an XGBoostJob."""
    draft.framework = "XGBoost"
    take_metadata(document, draft)
    spec = document.at("spec")
    types = replicas_of(spec.at("xgbReplicaSpecs"), ("Master", "Worker"))
    if not types:
        raise SpecError("spec.xgbReplicaSpecs has neither a Master nor a Worker. Add one.")
    take_workers(list(types.values()), draft, ("xgboost",), default="Never")
    spec.at("xgbReplicaSpecs").note(
        "The program starts the tracker in the process with DMLC_TASK_ID 0, at DMLC_TRACKER_URI and DMLC_TRACKER_PORT. RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT are there, too; WORKER_ADDRS and WORKER_PORT are not."
    )
    take_run_policy(spec.at("runPolicy"), draft)
    take_priority(spec.at("runPolicy"), draft)
    take_launch(draft, next(iter(types.values())).source.at("template", "spec", "containers"))
