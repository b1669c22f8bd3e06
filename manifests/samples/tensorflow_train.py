"""MultiWorkerMirroredStrategy with an own loop, as TensorFlow's documentation has it, and a checkpoint by the chief.

It knows nothing of Regroup: TF_CONFIG says who the workers are.
"""

import argparse
import json
import os
import time

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="tf-checkpoints", help="directory, shared by all workers")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
args = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
config = json.loads(os.environ["TF_CONFIG"])
me, n = config["task"]["index"], len(config["cluster"]["worker"])

rng = np.random.default_rng(0)
x = rng.normal(size=(960, 20)).astype("float32")
y = x @ rng.normal(size=(20, 1)).astype("float32")
BATCH = 48  # of all workers together
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
samples = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(960, seed=1).repeat().batch(BATCH).with_options(options)

with strategy.scope():
    weights = tf.Variable(tf.zeros((20, 1)))
    step = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
checkpoint = tf.train.Checkpoint(weights=weights, step=step)
# All workers must save, but only the chief's checkpoint is read.
own = args.checkpoint if me == 0 else f"{args.checkpoint}-worker-{me}"
manager = tf.train.CheckpointManager(checkpoint, own, max_to_keep=2)
newest = tf.train.latest_checkpoint(args.checkpoint)
if newest:
    checkpoint.restore(newest)


@tf.function
def train_step(batches):
    def of_one(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((batch[0] @ weights - batch[1]) ** 2) / BATCH
        gradient = tape.gradient(loss, weights)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradient)
        weights.assign_sub(0.05 * total)
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(of_one, args=(next(batches),)), axis=None)


batches = iter(strategy.experimental_distribute_dataset(samples))
done = int(step.numpy())
print(f"process {me} of {n} begins at step {done}", flush=True)
while done < args.steps:
    loss = train_step(batches)
    step.assign_add(1)
    done += 1
    if done % args.every == 0:
        manager.save()
        if me == 0:
            print(f"step {done}  loss {float(loss):.6f}", flush=True)
    time.sleep(args.pace)
print(f"process {me} of {n} ends at step {done}", flush=True)
