"""The operator: observe -> plan (pure) -> act, for DistributedTrainingJobs.

Rooms, from the bottom: `api` the resource; `model` records and ports that the rooms share; `plan` and `render` decide,
without I/O; `kube` and `endpoint` talk to the cluster and to the agents and decide nothing; `controller` holds the order of
writes; `handlers` is the kopf edge. Layers are held by import-linter (pyproject.toml).
"""
