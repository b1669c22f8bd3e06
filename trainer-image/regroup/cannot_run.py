"""Refuse what no restart can change: the agent hears of it, so that no process of the job is started again."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from .errors import UsageError
from .protocol import env, local

_TELL_S = 2.0
"""How long the agent may take."""


def refuse(sentence: str) -> NoReturn:
    """Raise UsageError with the sentence, after the agent has heard that neither this process nor one that is started after it can
    run. The operator fails the job (CannotRun) once the process has ended."""
    _tell_agent(sentence)
    raise UsageError(sentence)


def _tell_agent(sentence: str) -> None:
    """Tell the agent that no process of this job can run. Without an agent, or with one that has gone, nobody is told."""
    try:
        message = local.CannotRun(int(os.environ[env.LOCAL_RANK]), int(os.environ[env.INCARNATION]), sentence)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.settimeout(_TELL_S)
            agent.connect(os.environ[env.SOCKET])
            agent.sendall(local.encode(message))
            agent.recv(1)  # the agent has read it once it closes: the process may end now
    except (OSError, KeyError, ValueError):
        pass
