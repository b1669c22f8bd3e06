"""A real Kubernetes on one Linux machine, for the tour and the end-to-end tests.

Owns everything below `.cache/cluster/`: binaries built from one pinned Go module (`go/`), the control plane as plain
processes, and nodes that are namespaces with a containerd and a kubelet each, so that switching one off is real.
Knows nothing of Regroup's resource. `binaries` and `apiserver` need no root and serve `tests/api` too.
Start reading at `__main__.py`; the addresses are in `addresses.py`.
"""
