"""An unmodified torch.distributed script that traces its steps like traced.py.

It does not know Regroup's generation, so it counts how often its group has formed. Environment:

- TRACE: directory of the traces and of its checkpoint;
- STEPS: number of steps; without it the script runs until TRACE has a file `end`;
- STEP_SECONDS: extra time of a step; a file `pace` in TRACE replaces it.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

started = time.time()
directory = Path(os.environ["TRACE"])
trace_file = os.open(
    directory / f"{os.environ['HOSTNAME']}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
)


def trace(event: str, **what: object) -> None:
    line = {"event": event, "t": time.time(), "pod": os.environ["HOSTNAME"], "pid": os.getpid(), **what}
    os.write(trace_file, json.dumps(line).encode() + b"\n")


def pace_s() -> float:
    try:
        return float((directory / "pace").read_text())
    except FileNotFoundError:
        return float(os.environ.get("STEP_SECONDS", "0.05"))


def load() -> tuple[int, int]:
    path = directory / "plain.json"
    return tuple(json.loads(path.read_text())) if path.exists() else (0, 0)


def save(step: int, formed: int) -> None:
    aside = directory / "plain.new"
    aside.write_text(json.dumps([step, formed]))
    aside.replace(directory / "plain.json")


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
trace("built", started=started)
saved = torch.tensor(load())
dist.broadcast(saved, 0)
first, formed = int(saved[0]), int(saved[1]) + 1
for step in range(first, int(os.environ.get("STEPS", "500"))):
    time.sleep(pace_s())
    end = torch.tensor([float(rank == 0 and (directory / "end").exists())])
    dist.all_reduce(end)
    if end.item():
        break
    trace("commit", step=step, generation=formed, rank=rank)
    if rank == 0:
        save(step + 1, formed)
trace("done", generation=formed, world_size=world_size, parameters="none")
dist.destroy_process_group()
