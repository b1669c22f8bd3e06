"""`make bench-gpu` (`python -m bench.gpu`): does Regroup hold on this machine's GPUs, and how fast is it?

- `__main__` runs the parts one after the other and prints the table.
- `parts/` has a module for each part: a name, a bound in seconds and a function that measures and judges.
- `part` has the records of a part, and the context that a part works with. `machine` describes the machine.
- `bounded` ends a part at its bound.
- `report` makes the table and the JSON file, `judge` has the aims of the figures.
- `scripts/` has the scripts of the ranks.
- `prepare` fetches an NCCL that lets several ranks share one GPU.

Nothing here needs more than torch, the standard library and the packages that `regroup run` imports.
"""
