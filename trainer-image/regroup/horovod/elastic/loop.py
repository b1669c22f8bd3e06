"""`hvd.elastic.run`: calls a script's function again after each change of the ranks, with the state of the last commit."""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from regroup.errors import DivergedError
from regroup.horovod import world
from regroup.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from regroup.protocol import env

from . import link
from .member import Member
from .state import State

T = TypeVar("T")
_NOT_ELASTIC = (
    "hvd.elastic.run keeps no process here: the script that the job's command names does not call it by a name of hvd, so all "
    "processes start again after each change of the workers. Call hvd.elastic.run in that script."
)


def run(func: Callable[..., T]) -> Callable[..., T | None]:
    """Decorate the function that trains. Its first argument is the state.

    All ranks call the function. When a rank is lost, it is called again in the processes that are left, with the state of the last
    commit. When ranks come or leave as planned, it is called again after a commit. Reset callbacks run before, on the ranks that
    were there. The function must not be called before all ranks have built their state, and code before it calls no collectives.

    Returns what the function returns on this rank. Only a process that is started again after the function of all ranks has
    returned gets None, with the state of the end. Raises what the function raises, except for a lost rank and a change of the
    ranks. Raises JobEnded, which ends the script with code 0, if the job needs this process no more.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T | None:
        member = link.member()
        if member is None:  # plain python, or a script whose processes start again after each change
            if env.SOCKET in os.environ and world.rank() == 0:
                print(_NOT_ELASTIC, flush=True)
            state.sync()
            return func(state, *args, **kwargs)
        try:
            return _run(member, state, lambda: func(state, *args, **kwargs))
        except Exception as error:
            if not isinstance(error, DivergedError):  # what is diverged is no state to go back to
                member.keep_state()
            raise

    return wrapper


def _run(member: Member, state: State, call: Callable[[], T]) -> T | None:
    result: T | None = None
    was_here = False
    """This process has been in a generation with its state: reset callbacks follow."""
    while True:
        try:
            member.follow()
            member.load(state)
            if not member.has_returned:
                if was_here:
                    state.on_reset()
                was_here = True
                state.sync()
                result = call()
            if member.finish(state):
                return result
        except HorovodInternalError as error:
            member.explain(error)
            state.restore()
        except HostsUpdatedInterrupt:
            member.leave_together()
