"""A real Kubernetes on one Linux machine, for the tour and the end-to-end tests.

The package owns everything below `.cache/cluster/`: binaries built from one pinned Go module (`go/`), and the control
plane as plain processes. A node is a set of namespaces with a containerd and a kubelet of its own, so that switching it
off is real. The package knows nothing of Regroup's resource. `binaries` and `apiserver` need no root and serve
`tests/api` too. Start reading at `__main__.py`; the addresses are in `addresses.py`.
"""
