"""The wall clock as Kubernetes' MicroTime: people read it, no decision does."""

import time
from datetime import UTC, datetime


def micro_time() -> str:
    """Return now, RFC 3339 UTC in microseconds."""
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
