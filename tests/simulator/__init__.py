"""A whole job in one process and no time at all, and walks of random faults through it.

`world` is the job: the real controller, registry, agent core and adoption rule; the tests of the controller use it, too.
What it plays is in `operators`, `cluster` (the job's object, pods, nodes), `agents`, `trainers`, `script`, `network` and `disk`;
`pace` says how long each thing takes. `ledger` holds what must be true at every turn. `faults` are data, `strikes` what each does
to a world, `hazards` what happens to nodes, links and operators then. `policies` is what a spec says of the job's end, with its
judge. `walk` runs a list of faults and judges after each, and `bound` is the promise that it judges by.
`python -m tests.simulator --help` runs walks and replays one. Real processes are in tests/trainer, a real API server in tests/api.
"""
