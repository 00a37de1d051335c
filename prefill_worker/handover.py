"""One request's hand-over, from the ask to the commit: the task that speaks to its decode worker."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from diptych.worker.v1 import work_pb2
from kvtransfer.client import HandoffClient
from kvtransfer.errors import HandoffError
from kvtransfer.peer import Granted, Peer
from prefill_worker.request import PrefillRequest, Stop
from runtime.block_hash import block_keys

log = logging.getLogger(__name__)


class Owner(Protocol):
    """Who computes the request: hears when it has blocks and when it is over."""

    def granted(self, request: PrefillRequest, granted: Granted) -> None: ...

    def ended(
        self, request: PrefillRequest, failure: work_pb2.Failure | None, *, committed: bool = False
    ) -> None: ...


async def hand_over(request: PrefillRequest, client: HandoffClient, block_size: int, owner: Owner) -> None:
    """Ask, then push and commit what the engine loop reports; ends the request in every case."""
    committed = False
    failure: work_pb2.Failure | None = None
    try:
        peer = await client.peer(request.decode_address, request.decode_incarnation)
        granted = await _ask(peer, request, block_size)
        owner.granted(request, granted)
        stop = await _follow(peer, granted, request)
        committed, failure = stop is None, stop.failure if stop is not None else None
    except asyncio.CancelledError:
        # Only while asking: the client has withdrawn the ask, or answers a late grant with Stopped itself.
        failure = request.stop.failure if request.stop is not None else None
    except HandoffError as error:
        failure = error.failure
    except Exception:
        log.exception("hand-over of %s", request.key)
        failure = work_pb2.Failure(reason=work_pb2.FAILURE_REASON_INTERNAL, message="hand-over failed")
    owner.ended(request, failure, committed=committed)


async def _ask(peer: Peer, request: PrefillRequest, block_size: int) -> Granted:
    attempt = request.attempt
    keys = block_keys(attempt.cache_namespace, request.token_ids, block_size) if attempt.cache_read else []
    return await peer.ask(request.key, len(request.token_ids), keys)


async def _follow(peer: Peer, granted: Granted, request: PrefillRequest) -> Stop | None:
    """Pass on each computed chunk; None = committed."""
    while True:
        news = await request.news.get()
        if isinstance(news, Stop):
            await peer.stop(granted, news.failure)
            return news
        if news.first_token is None:
            await peer.push(granted, news.upto)
            continue
        if await peer.commit(granted, len(request.token_ids), news.first_token, request.times()):
            return None
        # Revoked, or the link broke, while the commit was on its way: whoever did it has said so.
        return request.stop or Stop(_lost())


def _lost() -> work_pb2.Failure:
    return work_pb2.Failure(
        reason=work_pb2.FAILURE_REASON_PEER_LOST, message="the link to the decode worker broke"
    )
