"""Benchmarks: each prints a table and writes JSON under bench/out. None is a timed test.

`python -m bench.recovery` (`make bench-recovery`): SIGKILL of a rank to the next committed step, Regroup beside torchft and
torchrun. `python -m bench.goodput` (`make bench-goodput`): the share of the time that goes into steps that stay, for the same
systems. `peers` starts them. `commits` is what the trained processes log and how it is read; `trials` the loop of killing and
waiting; `recovery_report` and `goodput_report` make tables and JSON, `goodput_figure` a picture of both. `tiny` is the model that
all train, in `recovery_script` (Regroup), `torchrun_script` and `torchft_script`. `torchft_peer` installs torchft and has its
settings, `torchft_launcher` starts it.
`quotas` is shares by speed beside equal ones. `gpu` is a package of its own: all of it on GPUs, with verdicts.
"""
