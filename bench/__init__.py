"""Benchmarks: each prints a table and writes JSON under bench/out. None is a timed test.

`python -m bench.recovery` (`make bench-recovery`) measures the time from SIGKILL of a rank to the next committed step.
`python -m bench.goodput` (`make bench-goodput`) measures the share of the time that goes into steps that stay. Both
compare Regroup with torchft and torchrun:

- `peers` starts the three systems. `torchft_peer` installs torchft and has its settings, `torchft_launcher` starts it.
- `commits` writes and reads the log of the trained processes.
- `trials` kills a process and waits for the next commits.
- `recovery_report` and `goodput_report` make the tables and JSON files, `goodput_figure` draws both.
- `tiny` is the model that all systems train.
- `recovery_script` (Regroup), `torchrun_script` and `torchft_script` train it.

`quotas` compares shares by speed with equal ones. The package `gpu` measures on GPUs and judges the figures.
"""
