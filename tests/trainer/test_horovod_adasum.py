"""Adasum over real processes: an all-reduce, a group of tensors, and the optimizer, against the formula in float64."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.polling import until
from harness.processes import alive
from tests.trainer.zygote import Zygote

SCRIPT = """
import json, sys
import torch
import regroup.horovod as hvd

def combined(parts):
    parts = [part.double() for part in parts]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2])
        parts = [
            (1 - (a * b).sum() / (2 * (a * a).sum())) * a + (1 - (a * b).sum() / (2 * (b * b).sum())) * b for a, b in pairs
        ]
    return parts[0]

hvd.init()
told = {}
everybody = [[torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(2)]
             for rank in range(hvd.size())]
mine = everybody[hvd.rank()]
try:
    one = hvd.allreduce(mine[0], op=hvd.Adasum)
except NotImplementedError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
told["one"] = float((one - combined([each[0] for each in everybody])).abs().max())
group = hvd.grouped_allreduce(mine, op=hvd.Adasum)
told["group"] = max(float((got - combined([each[i] for each in everybody])).abs().max()) for i, got in enumerate(group))

def network():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)

def change(inputs, momentum=0.9):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(inputs).pow(2).sum().backward()
    optimizer.step()
    return [after.detach() - before.detach() for after, before in zip(model.parameters(), network().parameters())]

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum)
model(mine[0]).pow(2).sum().backward()
optimizer.step()
changes = [change(each[0]) for each in everybody]
want = [before.detach() + combined(parts) for before, parts in zip(network().parameters(), zip(*changes))]
told["optimizer"] = max(float((got.detach() - each).abs().max()) for got, each in zip(model.parameters(), want))
optimizer.zero_grad()
model(mine[1]).pow(2).sum().backward()
optimizer.step()
everywhere = hvd.allgather(torch.cat([p.detach().reshape(1, -1) for p in model.parameters()], 1))
told["equal"] = bool((everywhere == everywhere[0]).all())
print(json.dumps(told))
"""


def run(zygote: Zygote, size: int, directory: Path) -> list[dict[str, Any]]:
    """Run the script in this number of processes, and return what each has printed."""
    script = directory / "adasum.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outputs = [directory / f"rank-{rank}" for rank in range(size)]
    pids = [zygote.start(script, {**common, "RANK": str(rank)}, output) for rank, output in enumerate(outputs)]
    until(lambda: not any(alive(pid) for pid in pids), "the end of all ranks", timeout_s=100)
    return [json.loads(output.read_text().splitlines()[-1]) for output in outputs]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 4])
def test_adasum_of_processes_is_the_formulas(zygote: Zygote, tmp_path: Path, size: int) -> None:
    for told in run(zygote, size, tmp_path):
        assert told["equal"]
        assert max(told["one"], told["group"], told["optimizer"]) < 1e-6, told


@pytest.mark.timeout(120)
def test_three_processes_are_told_why_they_cannot(zygote: Zygote, tmp_path: Path) -> None:
    for told in run(zygote, 3, tmp_path):
        assert "with 3 ranks" in told["refused"]
