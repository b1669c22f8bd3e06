"""Notice pods that their kubelets do not set up: a Secret that is missing, a volume that cannot be attached. Pure.

The kubelet says why only in the pod's events, which the operator may not read.
"""

from __future__ import annotations

from regroup_operator.model.records import Pod

SET_UP_S = 60.0
"""A kubelet that has not set a pod up for so long is named: large volumes take their time to be attached."""


def not_set_up(pod: Pod, now_s: float) -> str:
    """Return a sentence on a pod that its kubelet has not set up in time, with the command that shows why.

    The sentence is empty if the pod is set up or has time left. It does not begin with the pod's name.
    """
    due_s = set_up_due_s(pod)
    if due_s is None or now_s < due_s:
        return ""
    what = f"its kubelet has not set the pod up for {SET_UP_S:.0f} s (volumes, network, host name)"
    return f"{what}. See its events: kubectl describe pod --namespace={pod.namespace} {pod.name}"


def set_up_due_s(pod: Pod) -> float | None:
    """Return when a pod has to be set up, monotonic; None: it is, or has no node yet."""
    return None if pod.unset_since_s is None else pod.unset_since_s + SET_UP_S
