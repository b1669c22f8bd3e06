"""A script that trains by rounds of local steps. Beyond training it does what TEST_* variables say:

TEST_WAY   INNER:RATE:MOMENTUM  inner steps, learning rate and momentum of the outer step; without momentum local SGD
TEST_HOLD  G:N:M  in generation G, round N: write the file TEST_HELD before microbatch M, and wait for a newer generation
TEST_FAULT a fault of `faults`
TEST_PACE  seconds that a round takes until the file TEST_GO is there

Its last line is JSON: a hash of all that it holds, and each round that it committed with its generation and its loss.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import rounds  # type: ignore[import-not-found]  # it lies beside this script
import torch

import regroup
from regroup.strategies import DiLoCo, LocalSGD

if os.environ.get("TEST_FAULT"):
    import faults  # type: ignore[import-not-found]

    faults.install(os.environ["TEST_FAULT"])
inner, rate, momentum = os.environ["TEST_WAY"].split(":")
strategy: LocalSGD | DiLoCo = LocalSGD(inner_steps=int(inner))
if float(momentum):
    strategy = DiLoCo(inner_steps=int(inner), outer_learning_rate=float(rate), outer_momentum=float(momentum))
model = rounds.make_model()
optimizer = rounds.make_optimizer(model)
done = []
with regroup.session(
    model=model, optimizer=optimizer, data=rounds.make_data(), global_batch=48, microbatch=4, strategy=strategy
) as job:
    for step in job.steps(int(os.environ["TEST_STEPS"])):
        with step:
            if not Path(os.environ["TEST_GO"]).exists():
                time.sleep(float(os.environ["TEST_PACE"]))
            for number, (x, y) in enumerate(step.microbatches()):
                if os.environ.get("TEST_HOLD") == f"{job.generation}:{step.index}:{number}":
                    Path(os.environ["TEST_HELD"]).touch()
                    while not job.knows_newer():
                        time.sleep(0.01)
                step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
            step.commit()
            done.append([step.index, job.generation, step.loss])

outer = job.state.extra["outer"]
held = b"".join(one.numpy().tobytes() for one in rounds.tensors_of(model, optimizer, outer))
print(json.dumps({"hash": hashlib.sha256(held).hexdigest(), "rounds": done}), flush=True)
