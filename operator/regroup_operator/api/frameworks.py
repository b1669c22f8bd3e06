"""The frameworks of `spec.framework`, and the rules for other fields that follow from them.

A test holds the names to those of regroup.protocol.frameworks.
"""

from __future__ import annotations

from typing import Literal

Framework = Literal["PyTorch", "DeepSpeed", "Horovod", "TensorFlow", "JAX", "XGBoost", "None"]
PYTORCH: Framework = "PyTorch"
TENSORFLOW: Framework = "TensorFlow"

RESERVED_ENV: dict[Framework, tuple[str, ...]] = {
    "DeepSpeed": ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    "Horovod": (
        "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE",
        "REGROUP_HOROVOD",
    ),
    "TensorFlow": ("TF_CONFIG",),
    "JAX": (
        "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri",
    ),
    "XGBoost": ("DMLC_NUM_WORKER", "DMLC_TASK_ID", "DMLC_TRACKER_URI", "DMLC_TRACKER_PORT"),
}  # fmt: skip
"""Variables that the agent writes for a framework. The template of a job with this framework must not set them."""

MOST_LISTED = 256
"""Most workers of a job whose processes are told of all others: TensorFlow's."""
LISTED_COUNTS = ("spec.replicas", "spec.elasticPolicy.maxReplicas")
"""The fields that this bounds."""
MANY_LISTED = (
    f"is more than the {MOST_LISTED} workers that spec.framework TensorFlow allows, since each process is told of all others. "
    f"Lower it to {MOST_LISTED} or less."
)
NOT_ROLES = ("chief", "ps")
"""Tasks of TensorFlow that no role can be: a role's pod does not know the workers, which change with each generation."""
NO_ROLE = (
    "but in spec.framework TensorFlow the first worker is the chief, and there are no parameter servers. "
    "Remove the role, or choose another name."
)
EVALUATOR = "evaluator"
"""The role whose pods get a TF_CONFIG that names this task."""
