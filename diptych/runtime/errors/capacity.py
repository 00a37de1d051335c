"""Errors of a server that cannot take a request now; each has a hint when to try again."""

from typing import ClassVar

import grpc

from diptych.runtime.errors.base import RETRY_AFTER_S, DiptychError


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
