"""Names the frameworks of `spec.framework`, and the environment variables that each of them reads.

The agent writes these variables for each process of a script, in every generation anew. So the operator refuses them in a job's
template. Where an agent needs the list of members for that, all members get the document and not only the store's host.
"""

PYTORCH = "PyTorch"
DEEPSPEED = "DeepSpeed"
HOROVOD = "Horovod"
TENSORFLOW = "TensorFlow"
JAX = "JAX"
XGBOOST = "XGBoost"
NONE = "None"
ALL = (PYTORCH, DEEPSPEED, HOROVOD, TENSORFLOW, JAX, XGBOOST, NONE)

ON_TORCH = frozenset({PYTORCH, DEEPSPEED, HOROVOD})
"""Frameworks whose processes form a group of torch.distributed. A zygote imports torch for them."""
LISTS_MEMBERS = frozenset({TENSORFLOW})
"""Frameworks that want the address of every process in every process, with a port for each."""
MOST_LISTED = 256
"""Most workers of such a job: each of them is sent the list of all, so the bytes of a change grow with the square."""

RESERVED = {
    PYTORCH: (),
    DEEPSPEED: ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    HOROVOD: (
        "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE",
        "REGROUP_HOROVOD",
    ),
    TENSORFLOW: ("TF_CONFIG",),
    JAX: (
        "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri",
    ),
    XGBOOST: ("DMLC_NUM_WORKER", "DMLC_TASK_ID", "DMLC_TRACKER_URI", "DMLC_TRACKER_PORT"),
    NONE: (),
}  # fmt: skip
"""Variables that the agent writes for a framework, beside those that all frameworks but None have (env.RESERVED)."""
