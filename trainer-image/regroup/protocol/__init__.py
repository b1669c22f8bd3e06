"""One schema for operator, agent and trainer: wire messages, the generation document, environment names.

Belongs here: frozen dataclasses and pure functions on them. Does not: sockets, files, clocks, decisions.
Standard library only, Python 3.9: the package travels inside the agent's zipapp.

`env` names of environment variables; `codec` dataclass <-> JSON; `state` what a worker says of itself;
`document` a generation; `wire` operator <-> agent; `local` agent <-> trainer process.
"""

RELEASE = "0.1.0"
"""The release of operator, agent and library: `version` in pyproject.toml."""
VERSION = 1
"""Version of the protocol between operator and agent that this release's agents send."""
OLDEST = 1
"""Oldest version that an operator serves: agents stay as they are while the operator is upgraded. Within a version, messages gain
only fields that may be missing. A session with any other version is refused with a sentence."""

MAX_REPORT_BYTES = 64 * 1024
"""Largest message that the operator reads from an agent."""
