"""The handoff of one request, from the ask to the commit: the task that talks to its decode worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.runtime.block_hash import block_keys
from diptych.runtime.failpoints import reach
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.drivers.peer import Peer
from kvtransfer.drivers.types import GrantedBlocks
from kvtransfer.protocol.errors import AttemptOver, HandoffError
from prefill_worker.request import PrefillRequest, Stop


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a handoff. Neither committed nor failed: another process ended the attempt."""

    committed: bool = False
    failure: work_pb2.Failure | None = None


async def run_handoff(
    request: PrefillRequest,
    client: HandoffClient,
    block_size: int,
    on_granted: Callable[[GrantedBlocks], None],
) -> Outcome:
    """Ask for blocks, then push and commit the chunks that the engine loop reports.

    May be cancelled while it asks, before `on_granted` is called: the client takes the ask back, or answers
    a grant that is on its way with Stopped itself.
    """
    try:
        peer = await client.peer(request.decode_address, request.decode_incarnation)
        granted = await _ask(peer, request, block_size)
        on_granted(granted)
        stop = await _send_chunks(peer, granted, request)
    except AttemptOver:
        return Outcome()
    except HandoffError as error:
        return Outcome(failure=error.failure)
    return Outcome(committed=True) if stop is None else Outcome(failure=stop.failure)


async def _ask(peer: Peer, request: PrefillRequest, block_size: int) -> GrantedBlocks:
    attempt = request.attempt
    keys = []
    if attempt.cache_read:
        namespace, images = attempt.cache_namespace, attempt.images
        keys = block_keys(namespace, request.token_ids, block_size, images=images)
    return await peer.ask(request.key, len(request.token_ids), keys, keep=attempt.cache_write)


async def _send_chunks(peer: Peer, granted: GrantedBlocks, request: PrefillRequest) -> Stop | None:
    """Push each computed chunk and commit the last; return None once committed."""
    while True:
        event = await request.events.get()
        if isinstance(event, Stop):
            await peer.stop(granted, event.failure)
            return event
        if not event.first_tokens:
            await peer.push(granted, event.upto)
            continue
        reach("prefill.before_commit")
        if await peer.commit(granted, len(request.token_ids), event.first_tokens, request.times()):
            reach("prefill.committed")
            return None
        # Revoked, or the link broke, while the commit was on its way: the revoking side reports why.
        return request.stop or Stop(_link_broke())


def _link_broke() -> work_pb2.Failure:
    return work_pb2.Failure(
        reason=work_pb2.FAILURE_REASON_PEER_LOST, message="the link to the decode worker broke"
    )
