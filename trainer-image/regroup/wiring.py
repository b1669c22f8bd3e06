"""The parts of a session that follow from its settings: the samples of each step, the strategy, and the committer."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import model_group, strategies
from .data import UNKNOWN, SamplePlan, Stream
from .errors import UsageError
from .generation.membership import Membership
from .layout import Layout
from .parallel.ddp import DataParallel
from .parallel.exact import Exact
from .parallel.local_steps import LocalSteps
from .parallel.strategy import Strategy
from .parameter_server import settings as server_settings
from .parameter_server.ledger import CountedPlan
from .parameter_server.served_committer import ServedCommitter
from .parameter_server.served_gradients import ServedGradients
from .protocol import env
from .protocol.local import Assignment
from .session_settings import SessionSettings, refuse, shuffles
from .state.memory import Memory
from .state.training import CommitRecord, TrainingState
from .transaction.commit import Committer, Extras
from .transaction.header import Header


def plan_of(settings: SessionSettings, source: Any, max_world_size: int, layout: Layout) -> SamplePlan:
    """Return the samples of each step. Raises UsageError if the settings do not fit the samples, and DataError."""
    described, is_stream = settings.strategy, isinstance(source, Stream)
    if is_stream and layout.size > 1:
        raise UsageError("data is a stream, which does not work with regroup.mesh() so far. Pass a map-style dataset.")
    mixes = shuffles(settings.shuffle, source)
    sizes = (
        settings.seed,
        UNKNOWN if is_stream else len(source),
        settings.largest_batch(max_world_size),
        settings.microbatch,
        max_world_size,
    )
    if isinstance(described, strategies.ParameterServer):
        _check_served(settings, is_stream=is_stream, group_size=layout.size)
        return server_settings.plan_of(described, CountedPlan(*sizes, shuffles=mixes))
    return SamplePlan(*sizes, layout, in_order=is_stream, shuffles=mixes)


def _check_served(settings: SessionSettings, *, is_stream: bool, group_size: int) -> None:
    """Raise UsageError for a setting that does not work with a parameter server. `group_size`: ranks of a model group."""
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


def make_strategy(
    described: strategies.Description,
    reduction: str,
    model: torch.nn.Module,
    state: TrainingState,
    plan: SamplePlan,
    *,
    measures: bool = False,
) -> Strategy:
    """Return the strategy of a description. Raises UsageError if it does not fit the model.

    `measures`: it measures norms of gradients, too.
    """
    if reduction == "exact":
        return Exact(model, state.optimizer, plan)
    if isinstance(described, (strategies.LocalSGD, strategies.DiLoCo)):
        return _local_steps(described, state, plan)
    if isinstance(described, strategies.ParameterServer):
        assert isinstance(plan, CountedPlan)
        is_whole = server_settings.is_whole(described, plan)
        return ServedGradients(state.model, state.optimizer, plan, is_whole=is_whole)
    if state.scaler is not None and isinstance(described.hook, strategies.PowerSGD):
        raise UsageError(
            "strategy has a PowerSGD hook, and scaler is set: what one step leaves for the next would be of another scale. "
            "Train in bfloat16, which needs no scaler, or use another hook."
        )
    return DataParallel(model, state.optimizer, plan, described, model_group.inner(), measures=measures)


def _local_steps(
    described: strategies.LocalSGD | strategies.DiLoCo, state: TrainingState, plan: SamplePlan
) -> Strategy:
    """Return a strategy of rounds of inner steps. Raises UsageError."""
    name = type(described).__name__
    if state.scaler is not None:
        raise UsageError(
            f"scaler is given, and strategy is {name}: each rank would find overflows, and a scale, of its own. Use bfloat16, "
            "which needs no scaler."
        )
    if plan.layout.size > 1:
        raise UsageError(f"strategy {name} does not work with regroup.mesh() so far. Leave one of them out.")
    rate, momentum = 1.0, 0.0
    if isinstance(described, strategies.DiLoCo):
        rate, momentum = described.outer_learning_rate, described.outer_momentum
    return LocalSteps(
        state.model,
        state.optimizer,
        plan,
        inner_steps=described.inner_steps,
        max_norm=described.max_norm,
        outer=lambda trained: torch.optim.SGD(trained, lr=rate, momentum=momentum, nesterov=momentum > 0),
        before_change=lambda: state.before_change(),
    )


def make_committer(
    described: strategies.Description,
    membership: Membership,
    strategy: Strategy,
    state: TrainingState,
    plan: SamplePlan,
    memory: Memory,
    on_commit: Callable[[CommitRecord, Header, bool], None],
    extras: Extras,
) -> Committer | ServedCommitter:
    """Return the committer of a session. It calls `on_commit(record, header, empty)` after each step."""
    if not isinstance(strategy, ServedGradients):
        return Committer(membership, strategy, state, plan, memory, on_commit, extras)
    assert isinstance(described, strategies.ParameterServer)
    assert isinstance(plan, CountedPlan)
    return ServedCommitter(membership, strategy, described, state, plan, on_commit)


def links_of(described: strategies.Description) -> Callable[[Assignment], Mapping[str, tuple[int, ...]]]:
    """Return a function that names the links of this process in a generation. Only a parameter server has links."""
    if isinstance(described, strategies.ParameterServer):
        return server_settings.links_of(described)
    return lambda _: {}
