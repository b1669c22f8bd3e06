"""The resource: what a user may write, what we write back, and the words for both.

The pydantic models of `DistributedTrainingJob` are here, the only source of the CRD, of its reference page and of validation. So
are its conditions, its names and labels, and the tree of our exceptions. Decisions, I/O and pods are elsewhere. This package
imports nothing of ours.

Read `spec.py` for the fields, `job.py` for how the rest of the operator reads a job, `generate.py` for the files made
from the models.
"""

from regroup_operator.api.changes import check_change
from regroup_operator.api.conditions import Condition, set_condition
from regroup_operator.api.crd import GROUP, KIND, PLURAL, VERSION
from regroup_operator.api.errors import (
    ConflictError,
    NotFoundError,
    RegroupError,
    SpecError,
    StatusError,
    UnavailableError,
)
from regroup_operator.api.job import (
    Job,
    is_ours,
    parse_job,
    parse_status,
    parse_stored,
    processes_per_worker,
    worker_digest,
)
from regroup_operator.api.spec import JobSpec
from regroup_operator.api.status import JobStatus

__all__ = [
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "Condition",
    "ConflictError",
    "Job",
    "JobSpec",
    "JobStatus",
    "NotFoundError",
    "RegroupError",
    "SpecError",
    "StatusError",
    "UnavailableError",
    "check_change",
    "is_ours",
    "parse_job",
    "parse_status",
    "parse_stored",
    "processes_per_worker",
    "set_condition",
    "worker_digest",
]
