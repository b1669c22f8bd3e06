"""PID 1 of a worker pod: runs the trainer processes and speaks for them to the operator.

Belongs here: process supervision, the two protocols' edges (operator over TLS, trainers over a Unix socket), the state file.
Does not: decisions about membership (the operator's), anything that imports more than Python 3.9's standard library.

`core` decides, purely: (event, now) -> effects; `session` and `script` are its two tiers, `worker` its state, `aggregate`
makes one condition of p processes, `progress` and `ending` keep the times. `main` executes the effects; `link` is the way
to the operator, `http` the little HTTP it needs; `local_server` the way to the trainers; `trainers`, `zygote` and
`zygote_child` start and reap processes, `orphans` finds what they leave; `statefile` is what a container restart must not
lose; `launch` reads the command and writes environments, `script_settings` the variables that a script sets by itself;
`build` makes the zipapp.
"""
