"""Benchmarks: each prints a table and writes JSON under bench/out. None is a timed test.

`python -m bench.recovery` (`make bench-recovery`): SIGKILL of a rank to the next committed step, Regroup beside
torchrun. `commits` is what the trained processes log and how it is read; `trials` the loop of killing and waiting;
`tiny` the model that both train, in `recovery_script` (Regroup) and `torchrun_script`.
"""
