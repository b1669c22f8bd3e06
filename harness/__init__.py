"""Shared parts of the tour, the tests and the benchmarks: they watch a job, break it, read its trainers' traces, and judge it.

- `installation` puts the operator into a cluster through its chart.
- `job`, `traced_job` and `local_run` read one job. `steps` and `trace` read the lines that its trainers wrote.
- `faults` breaks things for real, `judge` decides whether training kept its promises.
- `polling` waits.

It imports neither the tests nor the tour nor the benchmarks, and nothing here belongs to the product.
"""
