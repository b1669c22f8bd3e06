"""A whole job in one process and no time at all, and walks of random faults through it.

`world` is the job: the real controller, registry, agent core and adoption rule; the tests of the controller use it, too.
What it plays is in `cluster` (the job's object, pods, nodes), `agents`, `trainers` and `disk`. `faults` are data, `hazards` what
they do to nodes, links and operators, `walk` runs a list of them and judges after each, `bound` is the promise that it judges
by. `python -m tests.simulator --help` runs walks and replays one. Real processes are in tests/trainer, a real API server in
tests/api.
"""
