"""From a job to the objects of the cluster that serve it: pod, service, config map, as plain dicts. Pure.

Here belongs everything that a worker's pod gets besides what the user wrote. Which pods there should be is decided in
plan/; creating them is kube/'s. Nothing here reads a clock, a file or the API.
"""

from regroup_operator.render.objects import config_map, service
from regroup_operator.render.pod import RenderSettings, dry_run_pod, worker_pod
from regroup_operator.render.renderer import Renderer

__all__ = ["RenderSettings", "Renderer", "config_map", "dry_run_pod", "service", "worker_pod"]
