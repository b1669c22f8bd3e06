"""The parameter server: one rank of a generation makes versions of the parameters, and the others compute gradients for it.

- `settings`: the meaning of `regroup.strategies.ParameterServer` for a session.
- `ledger`: the shares of the data that versions have counted. It is a part of the state. Pure.
- `dealing`: the server's decisions in one generation. Pure.
- `messages`: the headers that go over a link. Pure.
- `links`: the connections of one generation, and the pauses of a process that waits for several of them.
- `served_gradients`: the gradients that one rank computes, and the parameters that it receives.
- `versions`: one version, applied to the state of the server or of its standby.
- `service`: the server's side of the links. `standby`: the side of the rank that holds a second copy of the state.
- `served_committer`: the commit of a step, in place of `regroup.transaction.commit`.

docs/design/adr/0031-parameter-server.md has the rules and the reasons.
"""
