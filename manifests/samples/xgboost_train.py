"""Distributed XGBoost as its documentation has it: the process with DMLC_TASK_ID 0 starts the tracker, and saves the model.

It knows nothing of Regroup.
"""

import argparse
import os
import time

import numpy as np
import xgboost
from xgboost import collective
from xgboost.tracker import RabitTracker

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="model.json")
parser.add_argument("--steps", type=int, default=100, help="trees of the model")
parser.add_argument("--every", type=int, default=10, help="trees between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="seconds that a tree takes at least")
args = parser.parse_args()

me, n = int(os.environ["DMLC_TASK_ID"]), int(os.environ["DMLC_NUM_WORKER"])
host, port = os.environ["DMLC_TRACKER_URI"], int(os.environ["DMLC_TRACKER_PORT"])
if me == 0:
    tracker = RabitTracker(n_workers=n, host_ip=host, port=port, sortby="task")
    tracker.start()

rng = np.random.default_rng(0)
x = rng.normal(size=(2000, 10))
y = x.sum(axis=1)


class Save(xgboost.callback.TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):  # noqa: ARG002
        trees = model.num_boosted_rounds()
        if (trees % args.every == 0 or trees == args.steps) and collective.get_rank() == 0:
            model.save_model(args.checkpoint + ".tmp.json")
            os.replace(args.checkpoint + ".tmp.json", args.checkpoint)
            print(f"step {trees}  rmse {evals_log['train']['rmse'][-1]:.6f}", flush=True)
        time.sleep(args.pace)
        return False


# The tracker may begin later than this process: it imports as long.
communicator = {"dmlc_tracker_uri": host, "dmlc_tracker_port": port, "dmlc_task_id": str(me), "dmlc_retry": 10}
with collective.CommunicatorContext(**communicator):
    data = xgboost.DMatrix(x[me::n], y[me::n])
    before = xgboost.Booster(model_file=args.checkpoint) if os.path.exists(args.checkpoint) else None
    start = before.num_boosted_rounds() if before is not None else 0
    print(f"process {me} of {n} begins at step {start}", flush=True)
    model = xgboost.train(
        {"tree_method": "hist", "nthread": 1},
        data,
        args.steps - start,
        evals=[(data, "train")],
        verbose_eval=False,
        xgb_model=before,
        callbacks=[Save()],
    )
    print(f"process {me} of {n} ends with {model.num_boosted_rounds()} trees", flush=True)
