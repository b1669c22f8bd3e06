"""Settings of an installation, all of them in the environment.

A field `join_quiet_s` is REGROUP_SETTINGS_JOIN_QUIET_SECONDS there and joinQuietSeconds in the chart's `settings`.
Lists are separated by commas. The prefix is ours alone, so a misspelt name is refused instead of ignored. `REGROUP_`
would not do: Kubernetes itself sets REGROUP_PORT and others in the operator's pod, because its Service is called
regroup.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from regroup_operator.api import RegroupError
from regroup_operator.model.records import Settings

PREFIX = "REGROUP_SETTINGS_"


class SettingsError(RegroupError):
    """The settings cannot be used. The text names the variable, the value and the rule."""


class OperatorSettings(BaseModel):
    """All settings of an installation. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    namespace: str = "regroup-system"
    """Namespace of the operator itself: its lease, its CA and its Service are there. The chart takes it from the pod."""

    pod_name: str = ""
    """Name of the operator's own pod, which the leader labels. Empty: it runs outside the cluster, no pod is labelled."""

    watch_namespaces: list[str] = Field(default_factory=list)
    """Namespaces whose jobs are served. Empty: all."""

    service_name: str = "regroup"
    """Name of the Service in `namespace` that leads agents to the leader; the serving certificate carries it."""

    operator_url: str = ""
    """URL that agents call. Empty: https://<service_name>.<namespace>.svc:<membership_port>."""

    membership_host: str = ""
    """Address that the endpoint for agents listens on. Empty: all of them."""

    membership_port: int = Field(default=8443, ge=0, le=65535)
    """Port of the endpoint for agents; 0 takes a free one (tests)."""

    ops_host: str = ""
    """Address of /healthz, /readyz and /metrics. Empty: all of them."""

    ops_port: int = Field(default=8080, ge=0, le=65535)
    """Port of /healthz, /readyz and /metrics; 0 takes a free one (tests)."""

    drain_taints: list[str] = Field(
        default_factory=lambda: [
            "aws-node-termination-handler/asg-lifecycle-termination",
            "aws-node-termination-handler/rebalance-recommendation",
            "aws-node-termination-handler/scheduled-maintenance",
            "aws-node-termination-handler/spot-itn",
            "cloud.google.com/impending-node-termination",
            "karpenter.sh/disrupted",
            "medik8s.io/drain",
            "remediator.kubernetes.azure.com/unschedulable",
            "ToBeDeletedByClusterAutoscaler",
        ]
    )
    """Keys of taints that announce the end of a node. Workers on such a node hand over at once. Empty: none. A node
    that is only cordoned (node.kubernetes.io/unschedulable) is not left."""

    per_job_metrics: bool = False
    """True gives /metrics series for each job (regroup_job_*). Their number grows with the jobs."""

    decision_log: str = ""
    """File for the decision log (docs/how-to/runbook.md), with older parts beside it. Empty: none is written."""

    decision_log_mib: int = Field(default=20, ge=1, le=1024)
    """Largest size of one of the decision log's five files, in MiB."""

    agent_image: str = "regroup-operator:dev"
    """Image that the workers' agent is copied from. It is the operator's own, so that both speak the same protocol."""

    agent_image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of `agent_image` in workers."""

    agent_image_pull_secrets: list[str] = Field(default_factory=list)
    """Secrets of the job's namespace for `agent_image`, added to those of the template."""

    lease_name: str = "regroup"
    """Name of the Lease in `namespace` that decides which replica leads."""

    lease_duration_s: int = Field(default=15, ge=2)
    """Seconds without a renewal of the lease after which another operator leads. 15, as for Kubernetes' own controllers."""

    lease_renew_deadline_s: float = Field(default=10.0, gt=0)
    """Seconds without a renewal after which the leader ends itself; at most leaseDurationSeconds minus leaseRetrySeconds."""

    lease_retry_s: float = Field(default=2.0, gt=0)
    """Seconds between two attempts on the lease."""

    ca_secret_name: str = "regroup-ca"
    """Secret in `namespace` that holds the CA of the endpoint; the operator makes it."""

    certificate_days: int = Field(default=7, ge=1)
    """Days that a serving certificate is valid; renewed at a third of it."""

    num_workers: int = Field(default=16, ge=1)
    """Jobs that are reconciled at the same time. Each waits for the API most of the time."""

    progress_writes_per_second: float = Field(default=20.0, gt=0)
    """Status writes per second that carry progress only, all jobs together; others are never delayed."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    first_wait_s: float = Field(default=Settings.first_wait_s, ge=0)
    """Seconds after minReplicas workers are ready until a job starts with fewer than spec.replicas."""

    settle_s: float = Field(default=Settings.settle_s, ge=0)
    """Seconds to wait for a failed worker's report, after a collective broke and the failed worker is not known."""

    join_quiet_s: float = Field(default=Settings.join_quiet_s, ge=0)
    """Seconds that a planned generation waits after the last worker became ready, so that joiners come together. A job
    with more than 500 members waits longer, in proportion to them."""

    join_max_s: float = Field(default=Settings.join_max_s, ge=0)
    """Most seconds that a planned generation waits after the first worker became ready. A job with more than 500
    members waits longer, too."""

    planned_timeout_s: float = Field(default=Settings.planned_timeout_s, gt=0)
    """Seconds until a planned generation that not all members entered is dropped for a forced one. They are at least
    three of the job's steps."""

    form_timeout_s: float = Field(default=Settings.form_timeout_s, gt=0)
    """Seconds until a forced generation that its members have not entered, or not formed, is announced anew without the
    members that hold it up. To enter it they have at least three of the job's steps. The time to form doubles for each
    generation in a row that did not form."""

    adopt_timeout_s: float = Field(default=Settings.adopt_timeout_s, gt=0)
    """Seconds until a forced generation whose members copy the state or read a checkpoint is announced anew without the
    members that hold it up. They double in the same way."""

    start_timeout_s: float = Field(default=Settings.start_timeout_s, gt=0)
    """Seconds until trainer processes that have not attached are started again, while no start of the job was seen yet."""

    late_timeout_s: float = Field(default=Settings.late_timeout_s, gt=0)
    """Seconds until a worker that has not come to the newest generation is restarted in place, and replaced after that."""

    replace_after_s: float = Field(default=Settings.replace_after_s, gt=0)
    """Seconds after which a worker whose agent cannot be reached is replaced, although its node is Ready."""

    term_grace_s: float = Field(default=Settings.term_grace_s, ge=0)
    """Seconds at the start of a leader's term in which a missing stream means nothing: agents are still reconnecting."""

    hello_timeout_s: float = Field(default=Settings.hello_timeout_s, gt=0)
    """Seconds that a container may run before its agent's silence makes AgentsConnected false."""

    progress_write_s: float = Field(default=Settings.progress_write_s, ge=0)
    """Seconds between two status writes of a job that carry progress only."""

    probe_s: float = Field(default=Settings.probe_s, ge=0)
    """Seconds by which TCP keepalive delays the sight of a dead peer; taken off disconnectSeconds."""

    resync_s: float = Field(default=Settings.resync_s, gt=0)
    """Seconds after which every job is reconciled again although no event has come."""

    hang_s: float = Field(default=Settings.hang_s, gt=0)
    """Seconds without a commit below which no step counts as hung, if spec.recovery.hangSeconds is absent."""

    first_step_s: float = Field(default=Settings.first_step_s, gt=0)
    """Seconds that the first step of a process may take: it compiles."""

    checkpoint_s: float = Field(default=Settings.checkpoint_s, gt=0)
    """Most seconds that a script waits for one checkpoint: its last, or the one after a roll-back. After its first
    checkpoint a process waits four times as long as its slowest one took, but at least 300 s, if that is less."""

    @model_validator(mode="after")
    def _lease_is_safe(self) -> OperatorSettings:
        if self.lease_renew_deadline_s + self.lease_retry_s > self.lease_duration_s:
            raise ValueError(
                f"leaseRenewDeadlineSeconds ({self.lease_renew_deadline_s:g}) plus leaseRetrySeconds "
                f"({self.lease_retry_s:g}) is more than leaseDurationSeconds ({self.lease_duration_s}), so that two "
                "operators could lead. Raise leaseDurationSeconds."
            )
        return self

    @property
    def url(self) -> str:
        """URL that agents call."""
        return self.operator_url or f"https://{self.service_name}.{self.namespace}.svc:{self.membership_port}"

    def policy(self) -> Settings:
        """Return the settings of the membership policy."""
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})


def variable(field: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + re.sub(r"_s$", "_seconds", field).upper()


def load(environ: Mapping[str, str]) -> OperatorSettings:
    """Return the settings in `environ`. Raises SettingsError with one sentence."""
    fields = {variable(name): name for name in OperatorSettings.model_fields}
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in fields:
            raise SettingsError(f"{name} is not a setting. Remove it or correct its spelling.")
        is_list = OperatorSettings.model_fields[fields[name]].annotation == list[str]
        values[fields[name]] = [part.strip() for part in text.split(",") if part.strip()] if is_list else text
    try:
        return OperatorSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":
            raise SettingsError(str(first["ctx"]["error"])) from None
        where = variable(str(first["loc"][0]))
        raise SettingsError(f"{where} ({first['input']}) is refused: {first['msg']}. Correct it.") from None
