"""Data-parallel JAX whose checkpoints are Orbax's, as its documentation has it. All processes take part in a save.

It knows nothing of Regroup. `jax.distributed.initialize()` finds coordinator and process number in the environment.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="jax-checkpoints", help="directory, shared by all workers")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
args = parser.parse_args()

jax.distributed.initialize()
me, n = jax.process_index(), jax.process_count()
mesh = Mesh(np.array(jax.devices()), ("data",))
over_all, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

rng = np.random.default_rng(0)
x = rng.normal(size=(960, 20)).astype("float32")
y = x @ rng.normal(size=(20, 1)).astype("float32")
BATCH = 48  # divided by 1, 2, 3, 4, 6 or 8 processes

weights = jax.make_array_from_process_local_data(everywhere, np.zeros((20, 1), "float32"))
# Orbax writes each checkpoint aside and renames it, so the newest step is always complete.
manager = ocp.CheckpointManager(os.path.abspath(args.checkpoint), options=ocp.CheckpointManagerOptions(max_to_keep=2))
start = manager.latest_step() or 0
if start:
    like = jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=everywhere)
    weights = manager.restore(start, args=ocp.args.StandardRestore({"weights": like}))["weights"]


@jax.jit
def train_step(weights, x, y):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
    return weights - 0.05 * gradient, loss


def mine(samples, step):
    begin, share = step * BATCH % len(samples), BATCH // n
    return jax.make_array_from_process_local_data(over_all, samples[begin + me * share : begin + (me + 1) * share])


print(f"process {me} of {n} begins at step {start}", flush=True)
for step in range(start, args.steps):
    weights, loss = train_step(weights, mine(x, step), mine(y, step))
    if (step + 1) % args.every == 0:
        manager.save(step + 1, args=ocp.args.StandardSave({"weights": weights}))
        if me == 0:
            print(f"step {step + 1}  loss {float(loss):.6f}", flush=True)
    time.sleep(args.pace)
manager.wait_until_finished()
manager.close()
print(f"process {me} of {n} ends with weights {float(jnp.sum(weights)):.4f}", flush=True)
