"""The end of an RPC whose client may have stopped reading.

A status waits behind the messages that the client has not read, and gRPC waits with it for as long as the
client likes. Here an RPC has a limited time for it; then its handler ends. The API of grpc.aio cannot reset a
stream: what it keeps of such an RPC, one message at most, goes when the client reads, cancels or disconnects.
"""

from __future__ import annotations

import asyncio
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
    """Send the status of ``error``; give the RPC up if its client does not take it in `STATUS_S`.

    Raises grpc.aio.AbortError, as `abort`, or CancelledError where the RPC had ended, or is given up.
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
    give_up(request_id, heap)
    raise asyncio.CancelledError("the client does not read")


def limit_end(context: Context, request_id: str, seconds: float, heap: HeapTrim) -> None:
    """Give up the RPC of the current task unless its client has read all within ``seconds``."""
    handler = asyncio.current_task()

    def expired() -> None:
        give_up(request_id, heap)
        if handler is not None:
            handler.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expired)

    def done(_: object) -> None:
        timer.cancel()

    context.add_done_callback(done)  # type: ignore[arg-type]  # the stub wants a name for its argument


def give_up(request_id: str, heap: HeapTrim) -> None:
    """Log the end of an RPC whose client does not read, and let ``heap`` release what it held."""
    _log.info("request %s: given up, its client does not read", request_id)
    heap.request()
