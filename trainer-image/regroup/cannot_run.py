"""Refuses to run for a reason that no restart can change. The agent hears the reason, so no process is started again."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from .errors import UsageError
from .protocol import env, local

_TELL_S = 2.0
"""Timeout of each message to and from the agent."""


def refuse(sentence: str) -> NoReturn:
    """Tell the agent that no process of this job can run, and raise UsageError with the sentence.

    The operator fails the job (CannotRun) once this process has ended.
    """
    _tell_agent(sentence)
    raise UsageError(sentence)


def _tell_agent(sentence: str) -> None:
    """Tell the agent that no process of this job can run. Does nothing without an agent."""
    try:
        message = local.CannotRun(int(os.environ[env.LOCAL_RANK]), int(os.environ[env.INCARNATION]), sentence)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.settimeout(_TELL_S)
            agent.connect(os.environ[env.SOCKET])
            agent.sendall(local.encode(message))
            agent.recv(1)  # the agent closes once it has read the message; only then this process may end
    except (OSError, KeyError, ValueError):
        pass
