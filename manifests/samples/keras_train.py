"""`Model.fit` of Keras under MultiWorkerMirroredStrategy, as TensorFlow's documentation has it, with BackupAndRestore.

It knows nothing of Regroup: TF_CONFIG says who the workers are. With several workers `fit` of Keras 3 raises an error, so the
script asks for Keras 2: the package is tf_keras.
"""

import argparse
import json
import os
import tempfile
import time

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # before the import of tensorflow

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="keras-backup", help="directory, shared by all workers")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=10, help="steps of an epoch; each of them ends with a backup")
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


class Report(tf.keras.callbacks.Callback):
    begun = False

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002
        if not self.begun:
            print(f"process {me} of {n} begins at step {epoch * args.every}", flush=True)
        self.begun = True

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        time.sleep(args.pace)

    def on_epoch_end(self, epoch, logs=None):
        if me == 0:
            print(f"step {(epoch + 1) * args.every}  loss {logs['loss']:.6f}", flush=True)


with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((20,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.05), loss="mse")
model.fit(
    samples,
    epochs=args.steps // args.every,
    steps_per_epoch=args.every,
    verbose=0,
    # By default the backup is deleted once `fit` returns, and a failure after that would train everything again.
    callbacks=[tf.keras.callbacks.BackupAndRestore(args.checkpoint, delete_checkpoint=False), Report()],
)
# All workers save, as TensorFlow's documentation asks, and only the chief's file stays.
saved = os.path.join(args.checkpoint, "model.keras")
if me == 0:
    model.save(saved + ".tmp.keras")
    os.replace(saved + ".tmp.keras", saved)
else:
    with tempfile.TemporaryDirectory() as aside:
        model.save(os.path.join(aside, "model.keras"))
print(f"process {me} of {n} ends with optimizer step {int(model.optimizer.iterations.numpy())}", flush=True)
