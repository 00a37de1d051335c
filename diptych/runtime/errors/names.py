"""Errors of names: what is not there, what is there already, and what an operator's order met."""

import grpc

from diptych.runtime.errors.base import DiptychError, Resource, printable

_MOST_NAMES = 20


class UnknownModel(DiptychError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_MODEL"

    def __init__(self, name: str, *served: str) -> None:
        """`served`: what is, instead."""
        asked = printable(name)
        message = f"the model '{asked}' is not served here"
        if served:
            more = f" and {len(served) - _MOST_NAMES} more" if len(served) > _MOST_NAMES else ""
            message += f"; served: {', '.join(served[:_MOST_NAMES])}{more}"
        super().__init__(message, resource=Resource("model", asked))


class UnknownAdapter(DiptychError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_ADAPTER"

    def __init__(self, name: str) -> None:
        asked = printable(name)
        super().__init__(f"the adapter '{asked}' is not served here", resource=Resource("adapter", asked))


class UnknownWorker(DiptychError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_WORKER"

    def __init__(self, worker_id: str) -> None:
        asked = printable(worker_id)
        super().__init__(f"this gateway knows no worker '{asked}'", resource=Resource("worker", asked))


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
