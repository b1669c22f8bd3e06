"""`make bench-gpu` (`python -m bench.gpu`): does Regroup hold on this machine's GPUs, and how fast is it?

`__main__` runs the parts one after the other and prints the table. `parts/` has a module for each part: a name, a bound in seconds
and a function that measures and judges. `part` has their records and what a part may ask for, `machine` what there is to run on,
`bounded` how a part is ended, `report` the table and the JSON file, `judge` what a figure is compared with. `scripts/` is what the
ranks run. `prepare` fetches an NCCL that lets several ranks share one GPU. Nothing here needs more than torch, the standard library
and what `regroup run` imports itself.
"""
