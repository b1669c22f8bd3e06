"""Rules for the fields of a job that cannot change once it has started, with the sentences that say so.

As in spec.py each rule is written twice, side by side. The API server has it as CEL, and compares with the stored object. `regroup
run`, which has no API server, has it in `check_change`. A test in tests/api holds that both say the same. A job has started once
status.startTime is set. From then on there are workers that were made from these fields. A worker that was made from others could
not join them (docs/design/adr/0010-largest-size-is-fixed.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from regroup_operator.api.base import cel
from regroup_operator.api.errors import SpecError
from regroup_operator.api.job import Job

_STARTED = "has(oldSelf.status) && has(oldSelf.status.startTime)"
_ONCE = "once the job has started (status.startTime is set). Change it back, or delete the job and create it anew."


def _unless_started(kept: str, message: str, expression: str | None = None) -> dict[str, str]:
    return cel(f"!({_STARTED}) || ({kept})", message, expression)


def _same_optional(field: str) -> str:
    new, old = f"self.spec.{field}", f"oldSelf.spec.{field}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


_MANAGER = "spec.runPolicy.managedBy cannot change. Delete the job and create it anew."

CHANGE_RULES = [
    cel(
        "has(self.spec.runPolicy.managedBy) == has(oldSelf.spec.runPolicy.managedBy) && (!has(self.spec.runPolicy.managedBy) || "
        "self.spec.runPolicy.managedBy == oldSelf.spec.runPolicy.managedBy)",
        _MANAGER,
    ),
    _unless_started("self.spec.template == oldSelf.spec.template", f"spec.template cannot change {_ONCE}"),
    _unless_started(_same_optional("processesPerWorker"), f"spec.processesPerWorker cannot change {_ONCE}"),
    _unless_started(
        "self.spec.workersPerGroup == oldSelf.spec.workersPerGroup", f"spec.workersPerGroup cannot change {_ONCE}"
    ),
    _unless_started("self.spec.framework == oldSelf.spec.framework", f"spec.framework cannot change {_ONCE}"),
    _unless_started(_same_optional("roles"), f"spec.roles cannot change {_ONCE}"),
    _unless_started(_same_optional("checkpoint"), f"spec.checkpoint cannot change {_ONCE}"),
    _unless_started(_same_optional("memorySnapshot"), f"spec.memorySnapshot cannot change {_ONCE}"),
    _unless_started(_same_optional("progress"), f"spec.progress cannot change {_ONCE}"),
    _unless_started(
        "self.spec.network.podNames == oldSelf.spec.network.podNames", f"spec.network.podNames cannot change {_ONCE}"
    ),
    _unless_started(
        "has(self.spec.elasticPolicy) == has(oldSelf.spec.elasticPolicy)",
        f"spec.elasticPolicy cannot be added or removed {_ONCE}",
    ),
    _unless_started(
        "!has(self.spec.elasticPolicy) || !has(oldSelf.spec.elasticPolicy) || "
        "self.spec.elasticPolicy.maxReplicas == oldSelf.spec.elasticPolicy.maxReplicas",
        f"spec.elasticPolicy.maxReplicas cannot change {_ONCE}",
        f"'spec.elasticPolicy.maxReplicas (%d) cannot change from %d {_ONCE}'"
        ".format([self.spec.elasticPolicy.maxReplicas, oldSelf.spec.elasticPolicy.maxReplicas])",
    ),
    _unless_started(
        "has(self.spec.elasticPolicy) || has(oldSelf.spec.elasticPolicy) || "
        "self.spec.replicas == oldSelf.spec.replicas",
        "spec.replicas of a started job of fixed size cannot change. Change it back, or delete the job and create it "
        "anew with spec.elasticPolicy.",
        "'spec.replicas (%d) of a started job of fixed size cannot change from %d. Change it back, or delete the job "
        "and create it anew with spec.elasticPolicy.'.format([self.spec.replicas, oldSelf.spec.replicas])",
    ),
]
"""The rules for the API server, in the order of `check_change`."""


def check_change(old: Job, new: Job) -> None:
    """Raise SpecError with the sentence of the first rule that the change from `old` to `new` breaks."""
    if new.spec.run_policy.managed_by != old.spec.run_policy.managed_by:
        raise SpecError(_MANAGER)
    if old.status.start_time is not None:
        for problem in _problems(old, new):
            raise SpecError(problem)


def _problems(old: Job, new: Job) -> Iterator[str]:
    if new.raw["spec"]["template"] != old.raw["spec"]["template"]:
        yield f"spec.template cannot change {_ONCE}"
    if new.spec.processes_per_worker != old.spec.processes_per_worker:
        yield f"spec.processesPerWorker cannot change {_ONCE}"
    if new.spec.workers_per_group != old.spec.workers_per_group:
        yield f"spec.workersPerGroup cannot change {_ONCE}"
    if new.spec.framework != old.spec.framework:
        yield f"spec.framework cannot change {_ONCE}"
    if new.raw["spec"].get("roles", []) != old.raw["spec"].get("roles", []):
        yield f"spec.roles cannot change {_ONCE}"
    if new.spec.checkpoint != old.spec.checkpoint:
        yield f"spec.checkpoint cannot change {_ONCE}"
    if new.spec.memory_snapshot != old.spec.memory_snapshot:
        yield f"spec.memorySnapshot cannot change {_ONCE}"
    if new.spec.progress != old.spec.progress:
        yield f"spec.progress cannot change {_ONCE}"
    if new.spec.network != old.spec.network:
        yield f"spec.network.podNames cannot change {_ONCE}"
    if new.elastic != old.elastic:
        yield f"spec.elasticPolicy cannot be added or removed {_ONCE}"
    if new.elastic and new.max_replicas != old.max_replicas:
        yield f"spec.elasticPolicy.maxReplicas ({new.max_replicas}) cannot change from {old.max_replicas} {_ONCE}"
    if not new.elastic and new.spec.replicas != old.spec.replicas:
        yield (
            f"spec.replicas ({new.spec.replicas}) of a started job of fixed size cannot change from "
            f"{old.spec.replicas}. Change it back, or delete the job and create it anew with spec.elasticPolicy."
        )
