"""What a controller runtime gives: API client, informer, lease, events, and the cluster's side of model.ports.

Belongs here: everything that talks to a kube-apiserver. Does not: decisions about membership (plan/), the endpoint for
agents (endpoint/), the order of observe, plan and act (controller.py), when to look at which job (queue.py). What a pod
looks like is handed in by the caller (cluster_workers.Rendering), so this package does not import render/ either.

Read `client.py`, then `informer.py` and `pods.py` (what is), `cluster_workers.py` and `jobs.py` (what is done), `lease.py` (who may
do it; `lease_thread.py`: where that is decided), `authenticator.py` (which agent may call).
"""
