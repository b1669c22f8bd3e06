"""What a session with a parameter server puts together, and what it refuses before it begins.

`regroup.job` calls these in order. What happens then is in `regroup.transaction.served`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from . import strategies
from .errors import UsageError
from .generation import links
from .parallel.dealing import roles_of
from .parallel.ledger import CountedPlan
from .parallel.served import Served
from .protocol import env
from .protocol.local import Assignment
from .session_settings import SessionSettings, refuse
from .state.training import TrainingState
from .transaction.served import is_whole


def plan_of(described: strategies.ParameterServer, plan: CountedPlan) -> CountedPlan:
    """Return the plan of the blocks with its shares in a version. Raises UsageError for a version of more than a block."""
    shares = described.shares_per_version
    if shares is None:
        shares = plan.num_virtual if described.staleness == 0 else 1
    if shares > plan.num_virtual:
        raise UsageError(
            f"shares_per_version of ParameterServer is {shares}, and a global batch has {plan.num_virtual} microbatches "
            "(global_batch / microbatch). Pass that number at most."
        )
    return replace(plan, shares_per_version=shares)


def make_strategy(described: strategies.ParameterServer, state: TrainingState, plan: Any) -> Served:
    """Return what computes this rank's gradients. Raises UsageError."""
    assert isinstance(plan, CountedPlan)
    return Served(state.model, state.optimizer, plan, is_whole=is_whole(described, plan))


def links_of(described: Any) -> Callable[[Assignment], Mapping[str, tuple[int, ...]]]:
    """Return what names the links of a process in a generation; there are none without a parameter server."""
    if not isinstance(described, strategies.ParameterServer):
        return lambda _: {}

    def of(assignment: Assignment) -> Mapping[str, tuple[int, ...]]:
        roles = roles_of(assignment.world_size, assignment.local_world_size, computes=described.computes)
        return links.parts(assignment, roles.standby)

    return of


def check(settings: SessionSettings, *, is_stream: bool, group_size: int) -> None:
    """Raise UsageError for what a session does not do under a parameter server."""
    refuse(
        f"{{}} does not work with strategy {type(settings.strategy).__name__} so far. Leave one of them out.",
        {
            'reduction="exact"': settings.reduction == "exact",
            "scaler": settings.scaler is not None,
            "batch_per_rank": settings.batch_per_rank is not None,
            "noise_scale": settings.noise_scale,
            "data that is a stream": is_stream,
            "regroup.mesh()": group_size > 1,
            "A memory snapshot (spec.memorySnapshot)": bool(os.environ.get(env.SNAPSHOT_DIR)),
        },
    )
