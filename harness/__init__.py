"""What the tour, the tests and the benchmarks share: watch a job, break it for real, read what its trainers did, and judge it.

`installation` puts the operator into a cluster through its chart, `job` and `traced_job` read one job, `steps` and `trace` read
what its trainers wrote, `faults` breaks things for real, `polling` waits. Imports neither the tests nor the tour nor the
benchmarks, and nothing here belongs to the product.
"""
