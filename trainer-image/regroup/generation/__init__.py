"""The way of this process from one generation into the next: hear of it, form its groups, adopt its state.

- `regrouper`: the order of all this. `membership`: its interface for the rest of a session.
- `watcher`: the thread that listens to the agent. `stacks`: the place where the main thread is. `outbox`: messages to the agent.
- `groups`: store and process groups of one generation, on `sockets` and `backends`. `team`: groups of some of its ranks.
- `living`: torch's process groups inside a model group. `edges`: the connections between stages of a pipeline.
- `adoption`: the state that a generation continues from. `parts`: the same for split models. Both are pure.
- `transfer`: the bytes of a state. `rows`: the bytes that decide a step.
- `peers`, `reach`, `origins`: the rank that was lost, and the origin of an error. `nccl`: what is particular to NCCL.

The room has everything that knows what a generation is. It has nothing of what is computed in a step.
"""
