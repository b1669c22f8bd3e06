"""The pace at which news that only readers need are reported and written: the more jobs, the slower (adr/0062). Pure."""

from __future__ import annotations

JOBS_AT_FULL_PACE = 50
"""Up to so many jobs report as often as agents do by default."""
MAX_FACTOR = 10.0
"""Beyond 500 jobs the reports grow with the jobs again."""


def progress_factor(num_jobs: int) -> float:
    """Return how many times as long as usual agents wait between two reports of progress."""
    return round(min(max(1.0, num_jobs / JOBS_AT_FULL_PACE), MAX_FACTOR), 1)


def write_every_s(usual_s: float, num_jobs: int, writes_per_s: float) -> float:
    """Return the seconds between two writes of one job's progress, of which all jobs together get `writes_per_s`."""
    return max(usual_s, num_jobs / writes_per_s)
