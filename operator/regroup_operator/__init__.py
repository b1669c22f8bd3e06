"""The operator: observe -> plan (pure) -> act, for DistributedTrainingJobs.

The rooms, from the bottom:

- `api` is the resource.
- `model` has records and ports that the rooms share.
- `plan` and `render` decide, without I/O.
- `kube` talks to the cluster and `endpoint` to the agents. They decide nothing.
- `controller` has the order of writes that makes them safe.
- `handlers` is the kopf edge.

import-linter enforces the layers (pyproject.toml).
"""
