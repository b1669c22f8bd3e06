"""Quantiles of the histograms on a Prometheus page."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return a quantile of cumulative buckets, linear inside one, as Prometheus computes it; None: nothing was counted.

    One in the last, open bucket is that bucket's lower bound.
    """
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    low, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= q * total:
            return low if bound == float("inf") else low + (bound - low) * (q * total - below) / (count - below)
        low, below = bound, count
    return low


def milliseconds(page: str, histogram: str, **labels: str) -> dict[str, float] | None:
    """Return p50 and p99 of a histogram of seconds, over all series with these labels; None: nothing was counted."""
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{histogram}_bucket" and all(sample.labels.get(k) == v for k, v in labels.items()):
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
    p50, p99 = quantile(buckets, 0.5), quantile(buckets, 0.99)
    return None if p50 is None or p99 is None else {"p50": round(p50 * 1e3, 2), "p99": round(p99 * 1e3, 2)}
