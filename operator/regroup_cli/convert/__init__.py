"""`regroup convert`: writes what other operators and Slurm run as a DistributedTrainingJob.

Each converter is a pure function from one document to a job and its findings. A finding says what became of one field.
`findings.py` walks the document afterwards and reports every field that no rule has read, so that no field vanishes in silence.

- `documents.py` reads files, finds the jobs in them, and checks each result as the operator does.
- `pytorchjob.py`, `tfjob.py`, `xgboostjob.py`, `mpijob.py`, `trainjob.py`, `jobset.py` and `sbatch.py` have the rules of one kind
  each. `runtimes.py` has Kubeflow's own runtimes for TrainJobs.
- `kubeflow.py`, `pod.py`, `launch.py` and `shell.py` have the rules that several kinds share.
- `command.py` is the command line.
"""
