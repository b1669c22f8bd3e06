"""ParameterServerStrategy with a coordinator and an own loop, as TensorFlow's documentation has it.

It knows nothing of Regroup, whose TF_CONFIG lists workers only. The first lines give them their tasks: the first process is the
chief, the next one holds the parameters, all others are workers.
"""

import argparse
import json
import os
import socket
import sys
import time

os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # before the import of tensorflow, as its documentation asks

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="ps-checkpoints", help="directory, shared by all workers")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
parser.add_argument("--servers", type=int, default=1, help="processes that hold parameters")
parser.add_argument("--wait", type=float, default=300.0, help="seconds that a server waits for the chief")
args = parser.parse_args()

config = json.loads(os.environ["TF_CONFIG"])
processes, me = config["cluster"]["worker"], config["task"]["index"]
n = len(processes)
if "chief" not in config["cluster"]:  # elsewhere TF_CONFIG may have it
    if n < args.servers + 2:
        sys.exit(
            f"{n} processes are too few: a chief, {args.servers} parameter servers and a worker are {args.servers + 2}."
        )
    first = 1 + args.servers
    config["cluster"] = {"chief": processes[:1], "ps": processes[1:first], "worker": processes[first:]}
    tasks = [(kind, index) for kind, addresses in config["cluster"].items() for index in range(len(addresses))]
    config["task"] = dict(zip(("type", "index"), tasks[me], strict=True))
    os.environ["TF_CONFIG"] = json.dumps(config)
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()


if resolver.task_type in ("ps", "worker"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    )
    print(f"process {me} of {n} serves as {resolver.task_type} {resolver.task_id}", flush=True)
    # `server.join()` never returns. The chief listens on its port while it trains, so the servers end once nobody does.
    host, _, port = config["cluster"]["chief"][0].rpartition(":")
    # A server that has not seen the chief within the wait ends with an error, since the chief may have come and gone.
    seen, failed, until = False, 0, time.monotonic() + args.wait
    while failed < 10:
        if not seen and time.monotonic() > until:
            print(f"process {me} of {n} has not reached the chief for {args.wait:.0f} s and ends", flush=True)
            os._exit(1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            seen, failed = True, 0
        except ConnectionRefusedError:
            failed = 10 if seen else 0
        except OSError:
            failed += seen
        time.sleep(0.5)
    print(f"process {me} of {n} ends as {resolver.task_type} {resolver.task_id}", flush=True)
    os._exit(0)  # a server has no end of its own

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros((20, 1)))
    step = tf.Variable(0, dtype=tf.int64)
true = tf.constant(np.random.default_rng(0).normal(size=(20, 1)).astype("float32"))


@tf.function
def train_step():
    def of_one():
        x = tf.random.normal((48, 20))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - x @ true) ** 2)
        weights.assign_sub(0.05 * tape.gradient(loss, weights))
        return loss

    return strategy.run(of_one)


manager = tf.train.CheckpointManager(tf.train.Checkpoint(weights=weights, step=step), args.checkpoint, max_to_keep=2)
manager.restore_or_initialize()
done = int(step.numpy())
print(f"process {me} of {n} begins at step {done}", flush=True)
while done < args.steps:
    steps = min(args.every, args.steps - done)
    losses = [coordinator.schedule(train_step) for _ in range(steps)]
    coordinator.join()
    done += steps
    step.assign(done)
    manager.save()
    print(f"step {done}  loss {float(losses[-1].fetch()):.6f}", flush=True)
    time.sleep(args.pace * steps)
print(f"process {me} of {n} ends at step {done}", flush=True)
os._exit(0)  # the coordinator's threads have no end of their own
