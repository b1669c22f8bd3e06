"""The exceptions that cross rooms. Each carries one sentence that may be shown to a person.

    RegroupError
    +-- SpecError          the user's job cannot run as written: condition Accepted=False and an event, never a retry
    +-- StatusError        the status of a job is not what we write: a bug or an edit by hand, retried with back-off
    +-- ConflictError      somebody wrote first (HTTP 409 on an update): read again, plan again
    +-- NotFoundError      the object is gone (HTTP 404): nothing left to do for it
    +-- UnavailableError   the API server could not be asked or did not decide (time-out, 429, 5xx): try again later

Errors of one room only (a refused token, a malformed message) live in that room and derive from RegroupError too.
"""

from __future__ import annotations


class RegroupError(Exception):
    """Base of every exception that we raise on purpose; `str()` is one sentence for a person."""


class SpecError(RegroupError):
    """A job's spec breaks a rule. `reason` is CamelCase for the condition; `str()` names field, value, rule and fix."""

    def __init__(self, message: str, *, reason: str = "InvalidSpec") -> None:
        """`message` is the whole sentence, field path included."""
        super().__init__(message)
        self.reason = reason


class StatusError(RegroupError):
    """The stored status cannot be read back; `str()` names the field."""


class ConflictError(RegroupError):
    """A write lost a race: the object's resourceVersion (or its existence) is not what the writer had read."""


class NotFoundError(RegroupError):
    """The object does not exist (any more)."""


class UnavailableError(RegroupError):
    """The API server gave no verdict; the request may or may not have taken effect."""

    retry_after_s: float = 0.0
    """Seconds for which the API server wants no further request (header Retry-After)."""
