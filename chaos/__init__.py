"""`make chaos`: random faults at random moments over a real job, and a verdict.

The seed decides the job and the faults (`plan`, pure); `bounds` says within how long a job must commit again after each kind of
fault, and why; `drive` injects one fault after the other and looks for the next commit after every one, whatever it runs on:
`local` is `regroup run` with real processes, `cluster_job` a job in the one-machine cluster. `verdict` judges by the traces that
the trained processes write (pure), `totals` adds verdicts up. Nothing here belongs to the product.
"""
