"""Three random faults over a job in the cluster, judged as `make chaos` judges: thousands more are that command's."""

from __future__ import annotations

import pytest
from rich.console import Console

from chaos import plan
from chaos.campaign import in_cluster, run_one
from chaos.kinds import KINDS
from cluster.kubectl import Kubectl
from tests.long import only_long

SEED, FAULTS = 32, 3
"""A killed store host, a pod deleted while the next generation takes over the state, a zygote killed while a checkpoint is written.
What takes nodes or the leading operator along has tests of its own."""


@pytest.mark.usefixtures("beside_samples")
@only_long("50 faults in the cluster follow in `make test-all`, and test-chaos has 40 in local jobs")
def test_random_faults_in_the_cluster_leave_the_end_as_it_was(operator: Kubectl) -> None:
    planned = plan.faults(SEED, FAULTS, plan.scenario(SEED, cluster=True), cluster=True)
    assert not any(KINDS[fault.kind].leaderless for fault in planned), "the samples run beside it"
    result = run_one(Console(width=160), in_cluster(operator), SEED, FAULTS, "test", cluster=True)
    assert result.verdict.passed, result.verdict
    assert len(result.faults) == FAULTS
