"""Streams of messages between processes, whatever carries them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from diptych.runtime.rpc_streams.method import LinkMethod


class StreamLost(Exception):
    """The stream is over, and not because the other end had said all: `code` and `details` tell why."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class Refused(Exception):
    """Refusal by the handler of a stream: ends it, and the other end reads StreamLost with this reason."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Stream(Protocol):
    """Messages both ways, in order, each of them once, until either end closes it or it breaks.

    One task reads and one writes. Who closes it while another task reads or writes ends that with StreamLost.
    """

    async def read(self) -> Any:
        """Return the next message; None when the other end has sent all. Raises StreamLost."""
        ...

    async def write(self, message: Any) -> None:
        """Return when there is room for more. Raises StreamLost."""
        ...


class ClientStream(Stream, Protocol):
    """The end that opened the stream."""

    def cancel(self) -> None:
        """Break it: the other end reads StreamLost."""
        ...

    async def close(self) -> None:
        """Cancel, and let go of what it needed."""
        ...


@dataclass(frozen=True, slots=True)
class LinkService:
    """Kind of a stream as a process serves it.

    `serve` runs for each stream, from hello to end. It may raise Refused; when the other end goes it is
    cancelled, or reads StreamLost.
    """

    method: LinkMethod
    serve: Callable[[Stream], Awaitable[None]]
