"""The worker's end of a gateway's long-lived stream: hello, messages both ways, loss."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc

In = TypeVar("In")
Out = TypeVar("Out")


async def first_message(
    requests: AsyncIterator[In], field: str, context: grpc.aio.ServicerContext[In, Out]
) -> In:
    """The first message of a stream, which has to be `field`; anything else is refused."""
    async for message in requests:
        if message.WhichOneof("message") == field:  # type: ignore[attr-defined]
            return message
        break
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: must be the first message of the stream")
    raise RuntimeError("abort returned")


async def duplex(
    requests: AsyncIterator[In],
    replies: AsyncIterator[Out],
    on_message: Callable[[In], None],
    on_lost: Callable[[], None],
) -> AsyncIterator[Out]:
    """Write `replies` while reading `requests`; ends when either does, and calls `on_lost` in every case.

    `on_lost` must end `replies`: the other side closing its half is how the stream ends from there.
    """

    async def read() -> None:
        # A reset stream is an end like any other: the attempts on it are cancelled either way.
        with contextlib.suppress(grpc.aio.UsageError, grpc.RpcError):
            async for message in requests:
                on_message(message)
        on_lost()

    reader = asyncio.create_task(read(), name="gateway-link-reader")
    try:
        async for reply in replies:
            yield reply
    finally:
        reader.cancel()
        on_lost()
