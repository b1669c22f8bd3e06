"""Regroup: training jobs that survive failures and resizes.

Importing this package imports nothing else (PEP 562), so operator and agent can use `regroup.protocol` without torch. The names
that a training script uses are loaded at their first use. `session` in `regroup.job` is the place to read on.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers, which do not see the lazy names below
    from regroup import strategies
    from regroup.accelerator import device
    from regroup.data import cached, stream
    from regroup.errors import GenerationChanged, JobEnded, RegroupError
    from regroup.job import Job, session
    from regroup.model_group import mesh, pipeline
    from regroup.parallel.experts import MixtureOfExperts, through_experts
    from regroup.parallel.ulysses import attention, split_sequence

_EXPORTS = {
    "cached": "regroup.data",
    "device": "regroup.accelerator",
    "mesh": "regroup.model_group",
    "attention": "regroup.parallel.ulysses",
    "split_sequence": "regroup.parallel.ulysses",
    "MixtureOfExperts": "regroup.parallel.experts",
    "through_experts": "regroup.parallel.experts",
    "pipeline": "regroup.model_group",
    "session": "regroup.job",
    "Job": "regroup.job",
    "stream": "regroup.data",
    "GenerationChanged": "regroup.errors",
    "JobEnded": "regroup.errors",
    "RegroupError": "regroup.errors",
    "strategies": "regroup",
}

__all__ = [
    "GenerationChanged",
    "Job",
    "JobEnded",
    "MixtureOfExperts",
    "RegroupError",
    "attention",
    "cached",
    "device",
    "mesh",
    "pipeline",
    "session",
    "split_sequence",
    "strategies",
    "stream",
    "through_experts",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'regroup' has no attribute {name!r}")
    import importlib

    module = _EXPORTS[name]
    if module not in ("regroup", "regroup.errors"):
        importlib.import_module("regroup.torch_versions").require()
    value: object = (
        importlib.import_module(f"regroup.{name}")
        if module == "regroup"
        else getattr(importlib.import_module(module), name)
    )
    globals()[name] = value
    return value


def __dir__() -> "list[str]":
    return sorted([*globals(), *_EXPORTS])
