"""The places in which the Python client has jobs, and the arguments with which it starts one there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from regroup_client.jobs import Jobs


class Options(TypedDict, total=False):
    """Further arguments of `submit`. Each has the name and the meaning of an option of the command."""

    name: str
    """Name of the job. Default: that of the script."""

    directory: str | Path
    """Directory that travels with the script, which is in it. Default: only the script travels.

    On this machine nothing travels: a script runs in the current directory."""

    min: int
    """Fewest workers to train with. Default with `max`: 1."""

    max: int
    """Most workers. The job is resizable if `min` or `max` is given."""

    cpu: str
    """CPU that each worker requests, such as "4". Only in a cluster."""

    memory: str
    """Memory limit of each worker, such as "16Gi". Only in a cluster."""

    framework: str
    """Framework of the script. Default: PyTorch."""

    env: Mapping[str, str]
    """Variables of the script."""

    env_from: Sequence[str]
    """Secrets whose entries become variables. Only in a cluster."""

    data: Sequence[str]
    """Volumes, each "CLAIM:PATH" or "CLAIM:PATH:ro". Only in a cluster."""

    checkpoint: str
    """In a cluster the claim for checkpoints, or "new:5Gi" for a new one. On this machine a directory."""

    pip: Sequence[str]
    """Packages that the image lacks, each "NAME" or "NAME==VERSION". Only in a cluster."""

    index_url: str
    """Index of `pip`, here and in the pods. Only in a cluster."""

    user: int
    """User id of the pods, which then fit the Pod Security standard restricted. Only in a cluster."""


@dataclass(frozen=True)
class How:
    """The arguments of `submit` that every job has."""

    image: str
    workers: int
    gpus: int


class Place(Protocol):
    """The cluster, or this machine, as a Client uses it."""

    @property
    def jobs(self) -> Jobs:
        """Return the jobs that are there."""

    def submit(self, script: Path, args: Sequence[str], how: How, options: Options) -> str:
        """Make a job of a script, and return what names the job. Raises ClientError."""
