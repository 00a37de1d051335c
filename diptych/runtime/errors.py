"""Errors of requests, and the gRPC status that a client gets for each.

    DiptychError
    ├── InvalidParameter          INVALID_ARGUMENT     a field is bad or missing
    ├── UnsupportedFeature        INVALID_ARGUMENT     a field this build does not implement
    ├── ContextLengthExceeded     INVALID_ARGUMENT     can never fit
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

Messages name fields and numbers. They never hold a value that the client sent, save the name of a
model or request, and never a piece of a prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import grpc

RETRY_AFTER_S = 1.0
"""Retry hint where no estimate exists: about the time in which a worker restarts or a lease expires."""

REJECTIONS = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})
"""Codes of a request that the server could not serve and of which nothing was delivered."""

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


class InvalidParameter(DiptychError):
    """A field is missing or out of range. `description` says the rule, not the value."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_PARAMETER"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}", violations=(FieldViolation(field, description),))


class UnsupportedFeature(DiptychError):
    """A field that this build or model does not implement; nothing is ignored in silence."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "UNSUPPORTED_FEATURE"

    def __init__(self, field: str, description: str = "is not supported by this server") -> None:
        super().__init__(f"{field}: {description}", violations=(FieldViolation(field, description),))


class ContextLengthExceeded(DiptychError):
    """Prompt plus max_tokens is over the model's context, or over the whole KV pool. All in tokens.

    The message is OpenAI's sentence: clients cut their history when they find its beginning.

    ``at_least``: the prompt was not counted, because this many tokens are too many by themselves. ``field``:
    the one to change, if known: the prompt, or what asks for more output than fits beside it.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(
        self, prompt_tokens: int, max_tokens: int, limit: int, *, at_least: bool = False, field: str = ""
    ) -> None:
        bound = "at least " if at_least else ""
        message = (
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{bound}{prompt_tokens + max_tokens} tokens ({bound}{prompt_tokens} in the messages, "
            f"{max_tokens} in the completion). Please reduce the length of the messages or completion."
        )
        super().__init__(
            message,
            violations=(FieldViolation(field, message),) if field else (),
            metadata={
                "prompt_tokens": str(prompt_tokens),
                "max_tokens": str(max_tokens),
                "limit": str(limit),
            },
        )


class Unauthenticated(DiptychError):
    """Says what is missing, never what came."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(DiptychError):
    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class QuotaExceeded(DiptychError):
    """A key has used up what it may; `quota` says which bound, as "600 requests a minute"."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"

    def __init__(self, key_name: str, quota: str, retry_after_s: float) -> None:
        super().__init__(f"this API key has at most {quota}", retry_after_s=retry_after_s)
        self.subject = f"key:{key_name}"
        self.quota = quota


_MOST_NAMES = 20


class UnknownModel(DiptychError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_MODEL"

    def __init__(self, name: str, *served: str) -> None:
        """`served`: what is, instead."""
        message = "no such model is served here"
        if served:
            more = f" and {len(served) - _MOST_NAMES} more" if len(served) > _MOST_NAMES else ""
            message += f"; {', '.join(served[:_MOST_NAMES])}{more} {'is' if len(served) == 1 else 'are'}"
        super().__init__(message, resource=Resource("model", printable(name)))


class UnknownAdapter(DiptychError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_ADAPTER"

    def __init__(self, name: str) -> None:
        super().__init__("no such adapter is served here", resource=Resource("adapter", printable(name)))


class AdapterExists(DiptychError):
    """Another content is served under this name, and the request does not say to replace it."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ADAPTER_EXISTS"

    def __init__(self, name: str) -> None:
        super().__init__(
            "another content is served under this name: unload it first, or ask to replace it",
            resource=Resource("adapter", printable(name)),
        )


class AdapterRefused(DiptychError):
    """Workers that cannot load an adapter; ``why`` is what they say of it, for operators."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_REFUSED"

    def __init__(self, why: str) -> None:
        super().__init__(f"the adapter was not loaded: {why}")


class RoleChangeRefused(DiptychError):
    """Raised where a worker cannot change its role now; `why` says what stands against it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ROLE_CHANGE_REFUSED"

    def __init__(self, why: str) -> None:
        super().__init__(f"the worker keeps its role: {why}")


class UnknownWorker(DiptychError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_WORKER"

    def __init__(self, worker_id: str) -> None:
        super().__init__(
            "this gateway knows no such worker", resource=Resource("worker", printable(worker_id))
        )


class UnknownObject(DiptychError):
    """Raised for a file or a batch that the tenant does not have."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_OBJECT"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"there is no such {kind}", resource=Resource(kind, printable(name)))


class StorageFull(DiptychError):
    """Raised when all the room for files is taken."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "STORAGE_FULL"

    def __init__(self) -> None:
        super().__init__("no room is left for files here: delete some, or come back later")


class DuplicateRequest(DiptychError):
    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            "a live request has this id already", resource=Resource("request", printable(request_id))
        )


class Overloaded(DiptychError):
    """The server has too much to do. Raise a subclass."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    explanation: ClassVar[str] = "the server is overloaded"

    def __init__(self, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(self.explanation, retry_after_s=retry_after_s)


class QueueFull(Overloaded):
    reason = "QUEUE_FULL"
    explanation = "the queue is full"


class KvCapacity(Overloaded):
    reason = "KV_CAPACITY"
    explanation = "there is no KV memory for this request now"


class ImageMemory(Overloaded):
    reason = "IMAGE_MEMORY"
    explanation = "there is no memory for this request's images now"


class DeadlineUnattainable(Overloaded):
    reason = "DEADLINE_UNATTAINABLE"
    explanation = "the estimated wait is longer than the request's deadline"


class NoReadyWorker(DiptychError):
    """No worker of a role ("prefill", "decode" or "encode") can take the request."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NO_READY_WORKER"

    def __init__(self, role: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(f"no {role} worker is ready", metadata={"role": role}, retry_after_s=retry_after_s)


class Draining(DiptychError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"

    def __init__(self, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__("the server is shutting down", retry_after_s=retry_after_s)


class GrammarNotChecked(DiptychError):
    """The process that compiles grammars first died, and the next one, too."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "GRAMMAR_NOT_CHECKED"

    def __init__(self, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__("the grammar could not be checked now", retry_after_s=retry_after_s)


class Interrupted(DiptychError):
    """The request broke off; the code tells whether output had gone out to the client. Raise a subclass."""

    explanation: ClassVar[str]

    def __init__(self, tokens_emitted: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(
            self.explanation, metadata={"tokens_emitted": str(tokens_emitted)}, retry_after_s=retry_after_s
        )
        self.code = grpc.StatusCode.ABORTED if tokens_emitted else grpc.StatusCode.UNAVAILABLE

    def before_output(self) -> DiptychError:
        """Return the same error for tokens that came to this process, of which none went to the client."""
        return type(self)(retry_after_s=self.retry_after_s)


class WorkerLost(Interrupted):
    reason = "WORKER_LOST"
    explanation = "a worker of this request went away"


class ShutDown(Interrupted):
    """The gateway ends, and the grace for what runs is over."""

    reason = "SHUTTING_DOWN"
    explanation = "the server shut down before the answer was complete"

    def before_output(self) -> DiptychError:
        return Draining()


class KvTransferFailed(Interrupted):
    reason = "KV_TRANSFER_FAILED"
    explanation = "the handoff of the prompt's KV blocks failed"


class AdapterNotLoaded(Interrupted):
    """No workers have the request's adapter, and none can load it; their log and the gateway's say why."""

    reason = "ADAPTER_NOT_LOADED"
    explanation = "the workers could not load the adapter of this request"


class SlowReader(DiptychError):
    """The client does not read its stream; ``limit`` is the bound that was exceeded."""

    code = grpc.StatusCode.ABORTED
    reason = "SLOW_READER"

    def __init__(self, limit: str) -> None:
        super().__init__("the output was not read in time", metadata={"limit": limit})
        self.limit = limit


class DeadlineExceeded(DiptychError):
    """`phase` is where the request was: admission, queue, prefill, kv_transfer, decode, …"""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"

    def __init__(self, phase: str) -> None:
        super().__init__(f"the deadline passed in phase {phase}", metadata={"phase": phase})


class NoValidToken(DiptychError):
    """Output that cannot go on: the request's bans or its grammar leave no token that may come next, or
    following the grammar takes more work than one token may. Both are seen with the model's vocabulary only.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_VALID_TOKEN"

    def __init__(self) -> None:
        super().__init__(
            "the constraints of the request leave no token that may come next, or its grammar is too complex"
        )


class Cancelled(DiptychError):
    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class Internal(DiptychError):
    """A bug or logits that are not finite. The text is fixed: what happened is in the server's log.

    ``why`` is for that log alone; it holds no text and no token of the request.
    """

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, why: str = "") -> None:
        super().__init__("internal error; the server's log has the details under this request id")
        self.why = why


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


def printable(name: str) -> str:
    """Return a client's name made harmless for headers and logs: printable ASCII, bounded."""
    return "".join(c if " " <= c <= "~" else "?" for c in name[:_MAX_NAME])
