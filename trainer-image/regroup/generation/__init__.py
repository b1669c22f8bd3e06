"""How this process gets from one generation into the next: hear of it, form its groups, adopt its state.

`watcher` the thread that listens to the agent, `stacks` where its main thread is; `groups` store and process groups of one
generation, on `sockets`; `team` some of its ranks; `adoption` whose state wins (pure); `transfer` the bytes; `regrouper` the
order of all this. Belongs here: everything that knows what a generation is. Does not: what is computed in a step.
"""
