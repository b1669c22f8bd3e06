"""A whole job in one process and no time at all, and walks of random faults through it.

`world` and `trainers` are the job: the real controller, registry, agent core and adoption rule; the tests of the controller
use them, too. Here belongs what plays the cluster, the network and the trainers. Real processes are in tests/trainer, a real
API server in tests/api.
"""
