"""The command lines: `regroup` for jobs on this machine, `kubectl regroup` for those of a cluster.

The package parses arguments, starts local processes and prints; the operator's packages decide.

- `__main__.py` parses `regroup`. `regroup scale` and `regroup status` there read and change the file of a running local
  job.
- `run.py` is `regroup run`. `local.py` implements the controller's ports for processes on this machine.
- `plugin.py` is `kubectl regroup`. `explain.py` makes the texts of both commands from the views of `regroup_client`.
- `logs.py` is `logs` of both. `local_logs.py` keeps what local workers write.
- `convert/` is `regroup convert`, which writes the jobs of other operators as ours.
- `verbs.py` has the commands that both share, `screen.py` draws one job on a terminal, and `live_run.py` is the terminal of
  `regroup run`.
- `streams.py` ends every command properly when its terminal or pipe closes.
"""
