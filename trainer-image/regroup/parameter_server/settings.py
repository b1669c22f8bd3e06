"""The meaning of `regroup.strategies.ParameterServer` for a session."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from regroup import strategies
from regroup.errors import UsageError
from regroup.protocol.local import Assignment

from . import links
from .dealing import Roles, Terms, roles_of
from .ledger import CountedPlan


def plan_of(described: strategies.ParameterServer, plan: CountedPlan) -> CountedPlan:
    """Return the plan with the number of shares in a version. Raises UsageError for a version of more than a block."""
    shares = described.shares_per_version
    if shares is None:
        shares = plan.num_virtual if described.staleness == 0 else 1
    if shares > plan.num_virtual:
        raise UsageError(
            f"shares_per_version of ParameterServer is {shares}, and a global batch has {plan.num_virtual} microbatches "
            "(global_batch / microbatch). Pass that number at most."
        )
    return replace(plan, shares_per_version=shares)


def terms_of(described: strategies.ParameterServer, plan: CountedPlan, roles: Roles) -> Terms:
    """Return the rules of a generation."""
    return Terms(described.staleness, plan.shares_per_version, roles, is_whole(described, plan))


def is_whole(described: strategies.ParameterServer, plan: CountedPlan) -> bool:
    """Return whether a version is the gradient of a whole block, of no age."""
    return described.staleness == 0 and plan.shares_per_version == plan.num_virtual


def links_of(described: strategies.ParameterServer) -> Callable[[Assignment], Mapping[str, tuple[int, ...]]]:
    """Return a function that names the links of this process in a generation (`Groups`)."""

    def of(assignment: Assignment) -> Mapping[str, tuple[int, ...]]:
        roles = roles_of(assignment.world_size, assignment.local_world_size, computes=described.computes)
        return links.parts(assignment, roles.standby)

    return of
