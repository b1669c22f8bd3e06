"""The page on launchers, made from the table of their options: docs/reference/launchers.md."""

from __future__ import annotations

from regroup.protocol.launchers import OPTIONS, Option

_HEAD = """\
# Launchers

After this page you can give a job the launcher's command that you have. Regroup translates it and starts the program itself. The
page says which commands are translated, where the counts come from, and what becomes of each option.

```yaml
spec:
  replicas: 2
  template:
    spec:
      containers:
        - name: main
          image: example/trainer:1
          command: [torchrun, --nnodes, "2", --nproc-per-node, "4", train.py, --lr, "0.1"]
```

On one machine: `regroup run torchrun --nproc-per-node 4 train.py --lr 0.1`.

**Commands.** `torchrun`, `python -m torch.distributed.run`, `python -m torch.distributed.launch`, `accelerate launch`,
`python -m accelerate.commands.launch`, `deepspeed`, `horovodrun`, `mpirun` and `mpiexec`, with or without a path or
`env NAME=VALUE` in front. A launcher in a shell (`sh -c "torchrun ..."`) or behind another command (`numactl torchrun ...`) is
refused, and the sentence shows what to write. `mpirun` and `horovodrun` need not be in the image.

**What runs.** The launcher's own parser reads the command once in each worker, so that files and variables of the pod count, too.
Then Regroup's agent starts the program as often as the launcher would, with the variables that the launcher sets, and with the
rank and the address of each [generation](../concepts/terms.md). The launcher itself does not run: a failure restarts what failed,
and the job can be resized.

**Counts.**

| In the command | Means |
| --- | --- |
| processes of each worker: `--nproc-per-node 4`, `PET_NPROC_PER_NODE`, `--num_gpus 4`, `-N 4` | `spec.processesPerWorker` |
| all processes: `horovodrun -np 8`, `mpirun -np 8` | `spec.replicas` times `spec.processesPerWorker` |
| `accelerate launch --num_processes 8 --num_machines 2` | 2 workers of 4 processes |
| `--nproc-per-node gpu` or `auto` | the container's limit of GPUs |
| `--nproc-per-node cpu` | refused, unless `spec.processesPerWorker` says the number |
| `--nnodes 4`, `--num_machines 4`, `--num_nodes 4` | must be `spec.replicas`; leave it out of a job with `spec.elasticPolicy` |
| `--nnodes 1:4` | `spec.elasticPolicy` with minReplicas 1 and maxReplicas 4; `spec.replicas` is the number now |
| nothing | `spec.processesPerWorker`, else the container's limit of GPUs, else 1 |

A count that the spec contradicts refuses the job, with both values in the sentence. A count that only the pod knows (accelerate's
configuration file, variables from a ConfigMap) is compared there, and the job then fails with a sentence. To change
`spec.replicas` of a running job, write `spec.elasticPolicy` itself: the API server does not read the command.

**Limits.** Programs that import mpi4py find their peers only through MPI. A job of several processes with such a program ends
with a sentence. Under horovodrun and mpirun `horovod.torch` is [the library's](../how-to/frameworks.md#horovod). An option that
is not in these tables is refused.
Condition Accepted names the ignored options of a job's command, and the pod's log says why each changes nothing.
"""
_OF = {
    "torchrun": "torchrun, torch.distributed.run, torch.distributed.launch",
    "accelerate": "accelerate launch",
    "deepspeed": "deepspeed",
    "horovodrun": "horovodrun",
    "mpirun": "mpirun, mpiexec",
}
_ORDER = {"mapped": 0, "ignored": 1, "refused": 2}


def launchers_page() -> str:
    """Return the page: what is translated, and every option of every launcher."""
    parts = [_HEAD]
    for launcher, options in OPTIONS.items():
        rows = [_row(option) for option in sorted(options, key=lambda one: _ORDER[one.effect])]
        parts.append(
            "\n".join([f"\n## {_OF[launcher]}\n", "| Option | Effect | |", "| --- | --- | --- |", *rows]) + "\n"
        )
    return "".join(parts)


def _row(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.names if "_" not in name or name == option.names[0])
    return f"| {names} | {option.effect} | {option.says} |"
