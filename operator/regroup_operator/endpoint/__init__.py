"""The membership endpoint: HTTPS between the operator and the agents. Certificates, authentication, sessions, streams.

It records what agents say and sends what the controller tells; it decides nothing. `sessions` is the pure part, and
`registry` holds the sessions and the open streams. `server` is the HTTP edge, `certificates` makes the CA and the serving key.
"""
