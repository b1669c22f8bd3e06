"""What a person types: `regroup` for jobs on this machine, `kubectl regroup` for those of a cluster. Parsing, local processes and
words; every decision is the operator's.

`local.py` implements the controller's ports for processes on this machine, `run.py` is `regroup run`; `regroup scale` and
`regroup status`, in `__main__.py`, read and change the file of a running local job. `plugin.py` is `kubectl regroup`, and
`explain.py` its words. `streams.py` is how every command ends when its terminal does.
"""
