"""The end of an RPC whose client may have stopped reading.

A status waits behind the messages that the client has not read, and gRPC waits with it for as long as the
client likes. Here an RPC has a limited time for it; then its stream is reset. The API of grpc.aio has no
reset. What it does when the last reference to an RPC is dropped is one: gRPC's core cancels a call that has
not ended. The last references are those of the task that waits for the client's side to end, which is found
by what it refers to, and, until another RPC comes, of the server's own loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any, Final, NoReturn

import grpc

from diptych.runtime.errors import DiptychError
from diptych.runtime.heap_trim import HeapTrim
from diptych.runtime.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
STATUS_S: Final = 5.0
"""Seconds that a client has to take the status of an RPC that failed; also what comes before it, unread."""
_log = logging.getLogger(__name__)


async def end_with(context: Context, error: DiptychError, request_id: str, heap: HeapTrim) -> NoReturn:
    """Send the status of ``error``; reset the stream if its client does not take it in `STATUS_S`.

    Raises grpc.aio.AbortError, as `abort`, or CancelledError where the RPC had ended, or is reset.
    """
    sending = asyncio.create_task(abort(context, error, request_id), name="gRPC status")
    try:
        await asyncio.wait({sending}, timeout=STATUS_S)
        if sending.done():
            sending.result()
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as ended:  # by the client, or with its deadline
        raise asyncio.CancelledError("the RPC has ended") from ended
    finally:
        sending.cancel()
    reset(asyncio.current_task(), request_id, heap)
    raise asyncio.CancelledError("the client does not read")


def limit_end(context: Context, request_id: str, seconds: float, heap: HeapTrim) -> None:
    """Reset the stream of the current task's RPC unless its client has read all within ``seconds``."""
    handler = asyncio.current_task()
    timer = asyncio.get_running_loop().call_later(seconds, reset, handler, request_id, heap)

    def done(_: object) -> None:
        timer.cancel()

    context.add_done_callback(done)  # type: ignore[arg-type]  # the stub wants a name for its argument


def reset(handler: asyncio.Task[Any] | None, request_id: str, heap: HeapTrim) -> None:
    """Reset the stream of the RPC that ``handler`` serves; ``heap`` releases what refers to it in cycles."""
    waiting = None if handler is None else _waiting_for_client(handler)
    if handler is None or waiting is None:
        _log.error("request %s: its stream could not be reset", request_id)
        return
    _log.info("request %s: its stream is reset: the client does not read", request_id)
    waiting.cancel()
    if handler is not asyncio.current_task():
        handler.cancel()
    heap.request()


def _waiting_for_client(handler: asyncio.Task[Any]) -> asyncio.Task[Any] | None:
    """Return grpc.aio's task that started ``handler`` and waits for the client's side to end."""
    for task in asyncio.all_tasks():
        if task is handler:
            continue
        for held in gc.get_referents(task.get_coro()):
            # A coroutine of Cython keeps its variables in an object of their own.
            if type(held).__name__.startswith("__pyx_scope_struct") and any(
                variable is handler for variable in gc.get_referents(held)
            ):
                return task
    return None
