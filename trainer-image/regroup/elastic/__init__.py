"""Generations inside the trainer: hear of one, form its groups, adopt its state, redo the step in flight.

Belongs here: everything that knows what a generation is. Does not: where samples come from (`regroup.data`), what a
checkpoint on disk looks like (`regroup.checkpoint`), who is a member (the operator's plan).

`session` the page to begin with; `step` one step and `commit` its end; `regrouper` interrupt -> form -> adopt; `watcher` the
thread that listens to the agent; `groups` store and process groups of one generation; `adoption` whose state wins (pure);
`transfer` the bytes; `state` model, optimizer and `state` as a tree; `reducer` gradients, `buffers` running statistics;
`header` what ranks tell each other once a step (pure); `collective` the user's own collectives; `durable` when checkpoints
are written and read; `reporter` what the agent is told, `pace` how fast it goes.
"""
