"""The wall clock as Kubernetes' MicroTime. It is for people; no decision reads it."""

import time
from datetime import UTC, datetime


def micro_time() -> str:
    """Return the present time, RFC 3339 UTC in microseconds."""
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
