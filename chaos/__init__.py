"""`make chaos`: random faults at random moments over a real job, and a verdict.

- `plan` makes the job and its faults from the seed (pure).
- `kinds` has for each kind of fault the time within which a job must commit again, and the reason for it.
- `drive` injects one fault after the other and waits for the next commit after each. It does not know where the job
  runs.
- `local` runs the job under `regroup run` with real processes, `cluster_job` in the one-machine cluster.
- `verdict` judges by the traces that the trained processes write (pure), `totals` adds verdicts up.

Nothing here belongs to the product.
"""
