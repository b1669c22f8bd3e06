"""A judgement whether the operator itself is at fault when many agents are out of reach at once. Pure.

An operator that gets too little CPU, or whose own network is broken, hears of many agents nothing, of all jobs at once. To replace
their pods would end training that goes on without it, and give it more to do: new pods, new handshakes, new generations. So it
waits longer, as Kubernetes stops evictions where most nodes of a zone are not ready.
"""

from __future__ import annotations

FEW = 20
"""So many agents may be lost together: a switch, a rack."""
SHARE = 0.2
"""Beyond FEW, so great a part of all agents is more than that."""


def suspects_itself(num_out_of_reach: int, num_connected: int) -> bool:
    """Return whether the operator is the likelier cause. `num_out_of_reach`: agents without a stream whose container runs on a node
    that is ready. A node that lost its power, or its network, is soon not ready."""
    return num_out_of_reach >= FEW and num_out_of_reach >= SHARE * (num_out_of_reach + num_connected)
