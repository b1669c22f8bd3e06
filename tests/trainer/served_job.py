"""A script that trains with a parameter server. Beyond training it does what TEST_* variables say:

TEST_SERVER STALENESS:SHARES:COMPUTES  of the strategy; none for None, 0 or 1
TEST_PACE   seconds that a microbatch takes until the file TEST_GO is there
TEST_HOLD   G:FILE  in generation G, once FILE is there, stay in a block until a newer generation was heard
TEST_SLOW   seconds that a microbatch takes on this worker, in any case
TEST_BREAK  N  break out of the loop after version N
TEST_LOG    file for what this process applies: a line for each version

Its last line is JSON: a hash of parameters and optimizer, one of the parameters, and how many blocks it has done.
"""

import json
import os
import time
from pathlib import Path

import replay  # type: ignore[import-not-found]  # it lies beside this script
import torch

import regroup
from regroup.strategies import ParameterServer

staleness, shares, computes = os.environ["TEST_SERVER"].split(":")
strategy = ParameterServer(
    staleness=None if staleness == "none" else int(staleness),
    shares_per_version=None if shares == "none" else int(shares),
    computes=computes == "1",
)
model, optimizer, schedule = replay.make()
blocks = 0


def goes() -> bool:
    return Path(os.environ["TEST_GO"]).exists()


def holds() -> bool:
    generation, _, path = os.environ.get("TEST_HOLD", "0:").partition(":")
    return job.generation == int(generation) and Path(path).exists() and not job.knows_newer()


with regroup.session(
    model=model,
    optimizer=optimizer,
    data=replay.make_data(),
    global_batch=48,
    microbatch=4,
    state={"schedule": schedule},
    strategy=strategy,
) as job:
    for step in job.steps(int(os.environ["TEST_STEPS"])):
        with step:
            for x, y in step.microbatches():
                if not goes():
                    time.sleep(float(os.environ["TEST_PACE"]))
                time.sleep(float(os.environ.get("TEST_SLOW", 0)))
                while holds():
                    Path(os.environ["TEST_HELD"]).touch()
                    time.sleep(0.01)
                step.backward(mean=torch.nn.functional.cross_entropy(model(x), y), weight=len(y))
            step.commit(after=[schedule.step], max_norm=replay.MAX_NORM)
            blocks += 1
        with open(os.environ["TEST_LOG"], "a") as log:
            for generation, entry in step.applied:
                now = replay.hash_of(model) if entry is step.applied[-1].entry else ""
                log.write(json.dumps([generation, entry.version, entry.pushes, now]) + "\n")
        if job.step >= int(os.environ.get("TEST_BREAK", 1 << 30)):
            break

print(
    json.dumps(
        {
            "state": replay.hash_of(model, optimizer),
            "parameters": replay.hash_of(model),
            "blocks": blocks,
            "rank": job.rank,
            "samples": job.plan.samples(job.step),
            "digest": job.plan.digest(job.step),
            "version": job.step,
        }
    ),
    flush=True,
)
