"""PID 1 of a worker pod: runs the trainer processes and speaks for them to the operator.

Belongs here: supervision of processes, the connections to the operator (TLS) and to the trainers (a Unix socket), the state file.
Does not: decisions about membership, which the operator makes, and anything beyond the standard library of Python 3.9.

| modules | what they do |
| --- | --- |
| `core`, `session`, `script` | decide without I/O: (event, now) -> effects; the last two are the tiers |
| `worker`, `aggregate`, `events` | state of the worker, its processes as one condition, events and effects |
| `progress`, `ending`, `faults`, `hangs`, `observing` | decide about reports, the end, repeated faults, stacks, silent members |
| `main` | feeds events to the core and executes its effects |
| `link`, `http` | connect to the operator |
| `local_server`, `group_hook` | hear the trainer processes |
| `trainers`, `zygote`, `zygote_child`, `orphans` | start, signal and reap processes |
| `statefile`, `store_socket`, `prober`, `memory`, `kernel_view`, `output` | files, sockets, cgroup, /proc, the log |
| `library`, `library_hook` | bring the library to the trainer processes |
| `launch/`, `script_settings`, `gpus` | read the command, the script's text and the container's GPUs |
| `build` | makes the zipapp |
"""
