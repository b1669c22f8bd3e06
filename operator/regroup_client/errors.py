"""The exceptions of the client. Each message is one sentence for the user, and names what to do."""

from __future__ import annotations

CLOSED = "Closed"
"""Reason of an ApiError for a request after the end of the connection."""


class ClientError(Exception):
    """A request or a command cannot be done. It is the base of all exceptions of this package."""


class AccessError(ClientError):
    """There is no way to the API server: no kubectl, no usable kubeconfig, or a login that failed."""


class ApiError(ClientError):
    """The API server refused a request, or gave no answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """Keep the HTTP status (0: there was no answer) and the word of Kubernetes, such as NotFound or Invalid."""
        super().__init__(message or f"The API server answered {status} {reason}.")
        self.status, self.reason = status, reason

    @property
    def is_final(self) -> bool:
        """True if another attempt would fail, too: there is no such object, the user may not see it, or the client is closed."""
        return self.status in (401, 403, 404) or self.reason == CLOSED


class SubmitError(ClientError):
    """The arguments or files of a job cannot be submitted. Nothing was created."""


class JobError(ClientError):
    """There is no such job, it has ended already, or it failed while it was waited for."""


class TimedOut(ClientError):
    """The time is over, and a job is not what was waited for."""


class LostError(ClientError):
    """A follower gave up, since its requests had failed for too long."""


class ArgumentError(ClientError):
    """An argument is wrong. No cluster was asked."""


class PullError(ClientError):
    """The files of a job cannot be fetched, or are not what was committed. Nothing was left in the directory."""
