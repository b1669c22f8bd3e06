"""`regroup` and `kubectl regroup`: what a person types. Parsing, local processes and words; every decision is the operator's.

`local.py` implements the controller's ports for processes on this machine, `run.py` is `regroup run`, `scale.py` changes a
running local job.
"""
