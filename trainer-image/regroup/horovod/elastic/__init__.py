"""Elastic Horovod: `hvd.elastic.run`, the states and the sampler.

Processes of survivors stay when ranks are lost, come or leave. `loop` has the way of a process through these changes, `member` its
place in a generation, `state` the copies that it goes back to.
"""

from .loop import run
from .sampler import ElasticSampler
from .state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
