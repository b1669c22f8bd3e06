"""Names of the environment variables that pass between operator, agent and trainer, and the reserved ones.

The operator's render writes the agent's part into the pod; the agent writes the trainer's part for each process.
"""

# --- pod -> agent (render writes, agent reads) ---------------------------------------------------------------------
OPERATOR_URL = "REGROUP_OPERATOR_URL"
"""https://regroup.<operator namespace>.svc:8443; its host is the name that the certificate must carry."""
NAMESPACE = "REGROUP_NAMESPACE"
POD_NAME = "REGROUP_POD_NAME"
POD_UID = "REGROUP_POD_UID"
POD_IP = "REGROUP_POD_IP"
"""Address at which other members reach this worker; never a DNS name. 127.0.0.1 in `regroup run`."""
JOB_NAME = "REGROUP_JOB_NAME"
"""For the user's script, say in its logs; neither agent nor library reads it."""
JOB_UID = "REGROUP_JOB_UID"
PROCESSES = "REGROUP_PROCESSES"
"""Trainer processes that this agent runs (local world size)."""
WORKERS_PER_GROUP = "REGROUP_WORKERS_PER_GROUP"
"""spec.workersPerGroup: how many workers hold one copy of the model together (absent: 1). Trainers read it too."""
GROUP_POSITION = "REGROUP_GROUP_POSITION"
"""The worker's position in its group, 0 .. workersPerGroup - 1: slot mod workersPerGroup, for the pod's life (absent: 0)."""
MAX_WORLD_SIZE = "REGROUP_MAX_WORLD_SIZE"
"""maxReplicas x processes per worker: the session refuses a global batch with fewer microbatches. Trainers read it too."""
FRAMEWORK = "REGROUP_FRAMEWORK"
"""spec.framework: whose variables a script's processes get (absent: PyTorch). One of frameworks.ALL."""
CA_FILE = "REGROUP_CA_FILE"
TOKEN_FILE = "REGROUP_TOKEN_FILE"
STATE_DIR = "REGROUP_STATE_DIR"
"""Directory on disk that outlives a container restart: the agent's {entered, adopted, incarnation} file."""
MAX_RESTARTS = "REGROUP_MAX_RESTARTS"
GRACE_SECONDS = "REGROUP_GRACE_SECONDS"
"""Seconds between SIGTERM to the agent and SIGKILL, a little less than the pod's grace period (absent: 25)."""
ELASTIC = "REGROUP_ELASTIC"
"""1: the job has a spec.elasticPolicy, so its agents look for completed checkpoints of a script (absent: they look for none)."""
PROGRESS_LOG = "REGROUP_PROGRESS_LOG"
"""spec.progress.log: the agent applies this pattern to the lines of its processes (absent: it reads none)."""
STOP_SECONDS = "REGROUP_STOP_SECONDS"
"""spec.recovery.gracefulStop.seconds: how long a planned end of a script may take before SIGTERM (absent: 60)."""
STOP_SIGNAL = "REGROUP_STOP_SIGNAL"
"""spec.recovery.gracefulStop.signal, such as SIGUSR1: tells a script to end by itself (absent: its processes hold instead)."""

# --- agent -> trainer ----------------------------------------------------------------------------------------------
SOCKET = "REGROUP_SOCKET"
"""Path of the agent's Unix socket. Absent: plain `python`, a world of one."""
INCARNATION = "REGROUP_INCARNATION"
GROUP_PLACE = "REGROUP_GROUP_PLACE"
"""The process's place among those of its group of workers: position x processes per worker + local rank, for the life of the pod.
In every generation it is rank mod (workersPerGroup x processes per worker)."""
CHECKPOINT_DIR = "REGROUP_CHECKPOINT_DIR"
CHECKPOINT_EVERY_SECONDS = "REGROUP_CHECKPOINT_EVERY_SECONDS"
RESUME_FROM = "REGROUP_RESUME_FROM"
"""Absolute path of the checkpoint that the job begins with: spec.checkpoint.resumeFrom. Absent: it begins at step 0."""
CHECKPOINT_WAIT_SECONDS = "REGROUP_CHECKPOINT_WAIT_SECONDS"
"""The operator's setting checkpointSeconds: a script waits no longer for one checkpoint."""
SNAPSHOT_DIR = "REGROUP_SNAPSHOT_DIR"
"""Directory in memory, the pod's, for the memory snapshot. Absent: none is taken. The agent reads it, too."""
SNAPSHOT_BYTES = "REGROUP_SNAPSHOT_BYTES"
"""Bytes of it that may be used: spec.memorySnapshot.sizeLimit."""
SNAPSHOT_EVERY_SECONDS = "REGROUP_SNAPSHOT_EVERY_SECONDS"
HOROVOD = "REGROUP_HOROVOD"
"""1: `import horovod.torch` gives `regroup.horovod`, whatever is installed. spec.framework Horovod and horovodrun set it."""

# --- the user's ----------------------------------------------------------------------------------------------------
PRELOAD = "REGROUP_PRELOAD"
"""Comma-separated modules that the zygote imports before it forks trainers (default: DEFAULT_PRELOAD; empty: no zygote)."""
DEFAULT_PRELOAD = "torch,torch._dynamo,torch.distributed.checkpoint"
"""Modules beside torch, since building the first optimizer imports torch._dynamo (sympy and all): 4 s in a restarted process on
two busy cores. With it in the zygote, fork to first optimizer step is 46 ms (torch 2.13)."""
NCCL_ENDING = "REGROUP_NCCL_ENDING"
"""Number of NCCL communicators that may still be ending while the next one forms (default 2; 0: none, the next one waits)."""

# --- `regroup run` -> agent -----------------------------------------------------------------------------------------
LOG_NAME = "REGROUP_LOG_NAME"
"""The beginning of each line of the agent's own, after "regroup: ". `regroup run` sets it, because all workers write to its log."""
ENDS_ON_SIGINT = "REGROUP_ENDS_ON_SIGINT"
"""Set by `regroup run`: SIGINT says that it ends, and does not come back. In a pod SIGINT is a drain, as SIGTERM is: images choose
the signal that ends them (STOPSIGNAL)."""

# --- torchrun's names, written by the agent ------------------------------------------------------------------------
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
TORCHELASTIC_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
TORCHELASTIC_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"

RESERVED = (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT)
"""Refused in a job's template, together with RESERVED_PREFIXES."""
RESERVED_PREFIXES = ("TORCHELASTIC_", "REGROUP_")
ALLOWED = (PRELOAD, NCCL_ENDING)
"""Exceptions to RESERVED_PREFIXES."""
