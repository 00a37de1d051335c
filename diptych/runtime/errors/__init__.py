"""Errors of requests, and the gRPC status that a client gets for each.

    DiptychError
    ├── InvalidParameter          INVALID_ARGUMENT     a field is bad or missing
    ├── UnsupportedFeature        INVALID_ARGUMENT     a field this build does not implement
    ├── ContextLengthExceeded     INVALID_ARGUMENT     can never fit
    ├── NoValidToken              FAILED_PRECONDITION  its bans or its grammar leave no token
    ├── Unauthenticated           UNAUTHENTICATED      no API key, or one that is not known
    ├── PermissionDenied          PERMISSION_DENIED    a key without the scope; another tenant's request
    ├── QuotaExceeded             RESOURCE_EXHAUSTED   the key's own bound, with a retry hint
    ├── UnknownModel              NOT_FOUND
    ├── UnknownAdapter            NOT_FOUND
    ├── UnknownWorker             NOT_FOUND
    ├── UnknownObject             NOT_FOUND            no such file or batch of this tenant
    ├── StorageFull               RESOURCE_EXHAUSTED   no room for files; delete some
    ├── DuplicateRequest          ALREADY_EXISTS       a live request has this id
    ├── AdapterExists             ALREADY_EXISTS       another content has this name
    ├── AdapterRefused            FAILED_PRECONDITION  a worker cannot load it
    ├── RoleChangeRefused         FAILED_PRECONDITION  a worker keeps its role for now
    ├── Overloaded
    │   ├── QueueFull             RESOURCE_EXHAUSTED   with a retry hint
    │   ├── KvCapacity            RESOURCE_EXHAUSTED   with a retry hint
    │   ├── ImageMemory           RESOURCE_EXHAUSTED   with a retry hint
    │   └── DeadlineUnattainable  RESOURCE_EXHAUSTED   with a retry hint
    ├── NoReadyWorker             UNAVAILABLE          with a retry hint
    ├── Draining                  UNAVAILABLE          with a retry hint
    ├── GrammarNotChecked         UNAVAILABLE          with a retry hint
    ├── ShutDown                  ABORTED              output went out; before that it is Draining
    ├── WorkerLost                UNAVAILABLE, or ABORTED once output went out
    ├── KvTransferFailed          UNAVAILABLE, or ABORTED once output went out
    ├── AdapterNotLoaded          UNAVAILABLE, or ABORTED once output went out
    ├── SlowReader                ABORTED              the client does not read its stream
    ├── DeadlineExceeded          DEADLINE_EXCEEDED
    ├── Cancelled                 CANCELLED
    └── Internal                  INTERNAL             a bug; fixed text

The rule that clients may rely on: UNAVAILABLE means that nothing was delivered and the request is
safe to replay; ABORTED means that output was delivered.

A module of this package has the errors of one kind; others import them from the package.

Messages name fields and numbers. They never hold a value that the client sent, save the name of a
model, an adapter or a worker, and never a piece of a prompt.
"""

import grpc

from diptych.runtime.errors.access import PermissionDenied, QuotaExceeded, Unauthenticated
from diptych.runtime.errors.base import RETRY_AFTER_S, DiptychError, FieldViolation, Resource, printable
from diptych.runtime.errors.capacity import (
    DeadlineUnattainable,
    Draining,
    GrammarNotChecked,
    ImageMemory,
    KvCapacity,
    NoReadyWorker,
    Overloaded,
    QueueFull,
)
from diptych.runtime.errors.interruption import (
    AdapterNotLoaded,
    Cancelled,
    DeadlineExceeded,
    Internal,
    Interrupted,
    KvTransferFailed,
    ShutDown,
    SlowReader,
    WorkerLost,
)
from diptych.runtime.errors.names import (
    AdapterExists,
    AdapterRefused,
    DuplicateRequest,
    RoleChangeRefused,
    StorageFull,
    UnknownAdapter,
    UnknownModel,
    UnknownObject,
    UnknownWorker,
)
from diptych.runtime.errors.request import (
    ContextLengthExceeded,
    InvalidParameter,
    NoValidToken,
    UnsupportedFeature,
)

__all__ = [
    "REJECTIONS",
    "RETRY_AFTER_S",
    "AdapterExists",
    "AdapterNotLoaded",
    "AdapterRefused",
    "Cancelled",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "DeadlineUnattainable",
    "DiptychError",
    "Draining",
    "DuplicateRequest",
    "FieldViolation",
    "GrammarNotChecked",
    "ImageMemory",
    "Internal",
    "Interrupted",
    "InvalidParameter",
    "KvCapacity",
    "KvTransferFailed",
    "NoReadyWorker",
    "NoValidToken",
    "Overloaded",
    "PermissionDenied",
    "QueueFull",
    "QuotaExceeded",
    "Resource",
    "RoleChangeRefused",
    "ShutDown",
    "SlowReader",
    "StorageFull",
    "Unauthenticated",
    "UnknownAdapter",
    "UnknownModel",
    "UnknownObject",
    "UnknownWorker",
    "UnsupportedFeature",
    "WorkerLost",
    "printable",
    "rejection_reasons",
]

REJECTIONS = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})
"""Codes of a request that the server could not serve and of which nothing was delivered."""


def rejection_reasons() -> list[str]:
    """Return the reasons of all errors with which a request may be refused before any output."""
    reasons, classes = set(), [DiptychError]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        refused = kind.code in REJECTIONS or issubclass(kind, Interrupted)
        if refused and "reason" in vars(kind):
            reasons.add(kind.reason)
    return sorted(reasons)
