"""Base of the errors of requests, and what an error tells beside its text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import grpc

RETRY_AFTER_S = 1.0
"""Retry hint where no estimate exists: about the time in which a worker restarts or a lease expires."""

_MAX_NAME = 128


@dataclass(frozen=True)
class FieldViolation:
    """Violation of a field: its path in the request's proto (`sampling.top_p`) and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True)
class Resource:
    """Resource that was not found or exists already, as in google.rpc.ResourceInfo."""

    type: str
    name: str


class DiptychError(Exception):
    """Base of all errors that are answers to a request. Raise a subclass.

    `code` and `reason` (an ErrorInfo reason, upper snake case) are the contract; `message` is for
    people; `metadata` is the reason's data; `retry_after_s`, when set, tells when to try again.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
        resource: Resource | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.violations = violations
        self.resource = resource


def printable(name: str) -> str:
    """Return a client's name made harmless for headers and logs: printable ASCII, bounded."""
    return "".join(c if " " <= c <= "~" else "?" for c in name[:_MAX_NAME])
