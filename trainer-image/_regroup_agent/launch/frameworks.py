"""The environment by which the processes of each framework find each other: one pure function for each `spec.framework`.

Every generation has new processes with a new environment, since a script's processes cannot change their group. Nothing here
starts anything: a coordinator or a tracker runs in the script's own rank 0, as the documentation of its framework has it
(docs/design/adr/0082-frameworks.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from regroup.protocol import env, frameworks, wire
from regroup.protocol.document import Member


@dataclass(frozen=True)
class Place:
    """The place of one process in a generation."""

    generation: wire.Generation
    local_rank: int
    processes: int
    """Processes of each worker."""
    members: Sequence[Member] = ()
    """All members in the order of ranks. Empty for a framework that does not list them."""
    num_gpus: int = 0
    """NVIDIA GPUs of the worker."""
    on_cpu: bool = False
    """The worker has certainly no GPU."""

    @property
    def rank(self) -> int:
        return self.generation.rank_offset + self.local_rank

    @property
    def num_workers(self) -> int:
        return self.generation.world_size // self.processes


def common(place: Place) -> dict[str, str]:
    """Return the names that torchrun gives its processes. Scripts of many frameworks read them, Kubeflow's for XGBoost among them.

    MASTER_ADDR and MASTER_PORT are the address of rank 0's pod and a port there that nobody uses.
    """
    generation = place.generation
    return {
        env.RANK: str(place.rank),
        env.WORLD_SIZE: str(generation.world_size),
        env.LOCAL_RANK: str(place.local_rank),
        env.LOCAL_WORLD_SIZE: str(place.processes),
        env.GROUP_RANK: str(generation.group_rank),
        env.MASTER_ADDR: generation.store_host,
        env.MASTER_PORT: str(generation.store_port),
    }


def pytorch(place: Place) -> dict[str, str]:
    """Return the environment of torchrun, and what Accelerate and Lightning do not read from it.

    On CPUs Accelerate has a switch, without which each process would train alone. Lightning's Trainer takes the numbers of
    nodes and of devices for each from these variables, unless the script passes them. Its Fabric has such variables, too.
    They would win over what the script passes, so a process that works alone would wait for the others.
    """
    lightning = {"PL_TRAINER_NUM_NODES": str(place.num_workers), "PL_TRAINER_DEVICES": str(place.processes)}
    return {**common(place), **lightning, **({"ACCELERATE_USE_CPU": "true"} if place.on_cpu else {})}


def deepspeed(place: Place) -> dict[str, str]:
    """Return the environment of DeepSpeed's launcher. On CPUs DeepSpeed reads LOCAL_SIZE to share the cores."""
    return {
        **pytorch(place),
        "LOCAL_SIZE": str(place.processes),
        "CROSS_RANK": str(place.generation.group_rank),
        "CROSS_SIZE": str(place.num_workers),
    }


def horovod(place: Place) -> dict[str, str]:
    """Return the ranks by Horovod's names, and the switch that makes `import horovod.torch` give the library's API of Horovod.

    The rendezvous of an installed Horovod is missing, because no horovodrun serves it. So the library takes its name.
    """
    names = {
        "RANK": place.rank,
        "SIZE": place.generation.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.processes,
        "CROSS_RANK": place.generation.group_rank,
        "CROSS_SIZE": place.num_workers,
    }
    return {
        **pytorch(place),
        env.HOROVOD: "1",
        **{f"HOROVOD_{name}": str(value) for name, value in names.items()},
    }


def tensorflow(place: Place) -> dict[str, str]:
    """Return TF_CONFIG: every process is a worker, and the one with rank 0 is the chief."""
    workers = [address(member.host, port) for member in place.members for port in member.ports or ()]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}}
    return {**common(place), "TF_CONFIG": json.dumps(config)}


def jax(place: Place) -> dict[str, str]:
    """Return what `jax.distributed.initialize()` needs to work without arguments.

    JAX reads the coordinator's address from its own variable, but the number of processes only from a cluster that it knows. So
    the variables are those of Open MPI. `orte_hnp_uri` must be there, but JAX does not use its address. JAX_NUM_PROCESSES and
    JAX_PROCESS_ID are for scripts that pass them on, as Kubeflow's do. In a known cluster JAX gives each process the one GPU with
    its local rank. JAX_LOCAL_DEVICE_IDS names all GPUs of a process that has several.
    """
    generation = place.generation
    each = place.num_gpus // place.processes
    mine = range(place.local_rank * each, (place.local_rank + 1) * each)
    return {
        **({"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, mine))} if each > 1 else {}),
        **common(place),
        "JAX_COORDINATOR_ADDRESS": address(generation.store_host, generation.store_port),
        "JAX_NUM_PROCESSES": str(generation.world_size),
        "JAX_PROCESS_ID": str(place.rank),
        "OMPI_COMM_WORLD_SIZE": str(generation.world_size),
        "OMPI_COMM_WORLD_RANK": str(place.rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(place.local_rank),
        "OMPI_MCA_orte_hnp_uri": "0.0;tcp://127.0.0.1:1",
    }


def xgboost(place: Place) -> dict[str, str]:
    """Return the address of the tracker, which the script starts in the process with DMLC_TASK_ID 0."""
    generation = place.generation
    return {
        **common(place),
        "DMLC_NUM_WORKER": str(generation.world_size),
        "DMLC_TASK_ID": str(place.rank),
        "DMLC_TRACKER_URI": generation.store_host,
        "DMLC_TRACKER_PORT": str(generation.store_port),
    }


def none(place: Place) -> dict[str, str]:
    """Return the place under names that no framework reads, so that no library takes the processes for a group."""
    return {f"REGROUP_{name}": value for name, value in common(place).items()}


_ENVIRONMENTS: Mapping[str, Callable[[Place], dict[str, str]]] = {
    frameworks.PYTORCH: pytorch,
    frameworks.DEEPSPEED: deepspeed,
    frameworks.HOROVOD: horovod,
    frameworks.TENSORFLOW: tensorflow,
    frameworks.JAX: jax,
    frameworks.XGBOOST: xgboost,
    frameworks.NONE: none,
}


def environment(framework: str, place: Place) -> dict[str, str]:
    """Return the variables of a process of this framework. A framework of a newer operator counts as PyTorch."""
    return _ENVIRONMENTS.get(framework, pytorch)(place)


def address(host: str, port: int) -> str:
    """Return host:port; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
