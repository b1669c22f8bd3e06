"""A small controller runtime: API client, informer, lease, events, and the cluster's side of model.ports.

Everything that talks to a kube-apiserver belongs here. Decisions about membership do not (plan/), nor does the endpoint for
agents (endpoint/). The order of observe, plan and act is in controller.py, and queue.py chooses the next job.
The caller passes the objects of a pod in (cluster_workers.Rendering), so this package does not import render/ either.

Read `client.py` first. `informer.py` and `pods.py` observe, `cluster_workers.py` and `jobs.py` act. `lease.py` elects
the leader, in the thread of `lease_thread.py`. `authenticator.py` checks the tokens of agents.
"""
