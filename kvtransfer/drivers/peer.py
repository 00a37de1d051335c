"""One decode process as the prefill worker sees it: ask for blocks, fill them, commit or stop.

Drives `Sender` with the current link. In place, the decode pool is mapped and the owner computes straight
into the granted blocks; otherwise it computes in scratch and `PushQueue` copies. A Peer outlives its links:
what was being written when one broke is still answered for on the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.action_pump import ActionPump
from kvtransfer.drivers.codec import Response, key_of, ref_of, request_of
from kvtransfer.drivers.granted_blocks import GrantedBlocks
from kvtransfer.drivers.peer_link import PeerLink
from kvtransfer.drivers.push_queue import PushQueue
from kvtransfer.drivers.scratch import Scratch, ScratchBlocks
from kvtransfer.protocol.errors import AttemptOver, GrantDeniedError, PeerLost
from kvtransfer.protocol.messages import (
    GrantDenied,
    GrantReceived,
    GrantRef,
    GrantRevoked,
    Key,
    LinkLost,
    SenderAction,
)
from kvtransfer.protocol.progress import Progress
from kvtransfer.protocol.sender import Sender
from kvtransfer.transports.base import PushChannel, Run
from kvtransfer.transports.device_order import queued_work, until_written
from kvtransfer.transports.pool_memory import let_go


@dataclass(slots=True)
class _Progress:
    next_block: int
    """The first block that was not pushed."""
    bytes_sent: int = 0


class Peer:
    """Made by `HandoffClient.peer`. Callbacks come on the event loop."""

    def __init__(
        self,
        address: str,
        incarnation: int,
        *,
        on_abort: Callable[[Key], None],
        on_lost: Callable[[Peer, list[Key]], None],
    ) -> None:
        self.address = address
        self.incarnation = incarnation
        self.memory: KVMemory | None = None
        """The decode worker's pool while it is mapped."""
        self._on_abort, self._on_lost = on_abort, on_lost
        self._scratch: Scratch | None = None
        self._queue: PushQueue | None = None
        self._link: PeerLink | None = None
        self._transport = ""
        self._sender = Sender()
        self._pump: ActionPump[SenderAction] = ActionPump(self._perform)
        self._asks: dict[Key, asyncio.Future[GrantReceived]] = {}
        self._progress: dict[GrantRef, _Progress] = {}

    @property
    def linked(self) -> bool:
        """Whether there is a stream."""
        return self._link is not None

    @property
    def in_place(self) -> bool:
        """Whether this worker computes straight into the decode worker's pool."""
        return self.memory is not None

    # -- what the prefill worker does

    async def ask(
        self, key: Key, num_tokens: int, keys: Sequence[bytes], *, keep: bool = True
    ) -> GrantedBlocks:
        """Wait for blocks for `num_tokens` tokens; `keys` are those of their full blocks.

        Where blocks are copied, `keep` lets those that were computed here enter the cache of this worker.
        Raises GrantRefused, PeerLost, or ValueError for an attempt that has asked before. Cancelling the
        call takes the ask back.
        """
        if key in self._asks:
            raise ValueError("blocks for this attempt were asked for already")
        # Taken before the first await, so that the second of two asks fails and not the first.
        offered: asyncio.Future[GrantReceived] = asyncio.get_running_loop().create_future()
        self._asks[key] = offered
        blocks: ScratchBlocks | None = None
        try:
            if self._scratch is not None:
                blocks = await self._scratch.take(num_tokens, keys)
            if not self.linked:
                raise PeerLost
            self._pump.run(self._sender.ask(key))
            offer = await offered
            if not self._sender.take(key):
                raise (AttemptOver() if self.linked else PeerLost())
        except BaseException:
            self._pump.run(self._sender.withdraw(key))
            if blocks is not None and self._scratch is not None:
                self._scratch.give_back(blocks, keep=False)
            raise
        finally:
            del self._asks[key]
        return self._granted(offer, blocks, keep)

    async def push(self, granted: GrantedBlocks, upto_tokens: int) -> None:
        """The first `upto_tokens` tokens are computed: their full blocks may go. Returns at once."""
        self._push(granted, upto_tokens // granted.memory.layout.block_size)

    async def commit(
        self,
        granted: GrantedBlocks,
        num_tokens: int,
        first_tokens: Sequence[work_pb2.SampledToken],
        times: work_pb2.PhaseTimes,
    ) -> bool:
        """All is computed and nothing more will be written; what was not pushed goes first.

        `times` gets kv_send, the bytes and the cached tokens. False: the grant was revoked or the link
        broke meanwhile; the attempt is over here either way, and `stop` is not needed.
        """
        started = time.monotonic()
        ref = granted.ref
        if granted.scratch is not None:
            self._push(granted, len(granted.block_table))
            if self._queue is not None:
                await self._queue.flush(ref)
        progress = self._progress.pop(ref, None)
        times.kv_bytes_transferred = 0 if progress is None else progress.bytes_sent
        times.cached_tokens = granted.computed_tokens
        times.kv_send.FromNanoseconds(int((time.monotonic() - started) * 1e9))
        committed, actions = self._sender.commit(ref, num_tokens, tuple(first_tokens), times)
        self._pump.run(actions)
        self._give_back(granted, keep=committed and granted.keep)
        return committed

    async def stop(self, granted: GrantedBlocks, failure: work_pb2.Failure | None = None) -> None:
        """Promise that nothing more is written to this grant. Needed after on_abort and on_peer_lost too.

        Call it only when the engine has left the blocks. `failure` says why the prefill gave up by itself.
        """
        if self._progress.pop(granted.ref, None) is None:
            return
        await until_written(granted.memory)
        reason = None if failure is None else failure.reason
        message = "" if failure is None else failure.message
        if reason == work_pb2.FAILURE_REASON_COMPUTE_FAILED and granted.scratch and self._scratch:
            self._scratch.distrust(granted.scratch)

        def quiet() -> None:
            self._pump.run(self._sender.stop(granted.ref, reason, message))
            self._give_back(granted, keep=False)

        if self._queue is not None:
            self._queue.when_idle(granted.ref, quiet)
        else:
            quiet()

    # -- links

    def attach(
        self,
        link: PeerLink,
        memory: KVMemory | None,
        copying: tuple[Scratch, PushChannel] | None,
        *,
        heard: Callable[[Response], None],
        progress: Progress,
    ) -> None:
        """A stream is up and its transport registered: the mapped pool, or scratch and a data channel."""
        self._link, self.memory = link, memory
        self._transport = link.welcome.transport
        self._sender.link_up()
        if copying is not None:
            self._scratch, channel = copying
            self._queue = PushQueue(channel, self._sender.writing, self._sent, link.close, progress)

        def handle(response: Response) -> None:
            heard(response)
            self._handle(response)

        link.start(handle, lambda: self._ended(link))

    async def quiesced(self) -> None:
        """Wait until nothing of an earlier link is under way: what maps a pool may still copy into it."""
        if self._queue is not None and not self.linked:
            await self._queue.close()

    def stalled(self, now: float) -> bool:
        """Whether blocks are sent that do not arrive. Ask at every interval."""
        return self._queue is not None and self.linked and self._queue.stalled(now)

    async def close(self) -> None:
        """End the link and let go of the mapping."""
        link, queue = self._link, self._queue
        if link is not None:
            await link.wait_closed()
        if queue is not None:
            await queue.close()
        self.release()

    def release(self) -> None:
        """Let go of the mapping; grants that are still being written keep it until they are dropped."""
        held, self.memory = [self.memory], None
        let_go(held)

    def _ended(self, link: PeerLink) -> None:
        if self._link is link:
            self._link = None
            if self._queue is not None:
                self._queue.cancel()
            self._pump.run(self._sender.link_lost())

    # -- inner workings

    def _granted(self, offer: GrantReceived, blocks: ScratchBlocks | None, keep: bool) -> GrantedBlocks:
        memory = self.memory if self._scratch is None else self._scratch.memory
        if memory is None:
            raise RuntimeError("granted without memory")
        self._progress[offer.ref] = _Progress(offer.cached_tokens // memory.layout.block_size)
        return GrantedBlocks(
            key=offer.ref.key,
            memory=memory,
            block_table=list(offer.block_ids) if blocks is None else blocks.block_ids,
            computed_tokens=offer.cached_tokens if blocks is None else blocks.cached_tokens,
            cached_tokens=offer.cached_tokens,
            ref=offer.ref,
            scratch=blocks,
            target_table=offer.block_ids,
            transport=self._transport,
            keep=keep,
        )

    def _push(self, granted: GrantedBlocks, upto_block: int) -> None:
        progress = self._progress.get(granted.ref)
        if progress is None or upto_block <= progress.next_block:
            return
        first, progress.next_block = progress.next_block, upto_block
        if granted.scratch is None:
            self._pump.run(self._sender.push(granted.ref, first, upto_block - first))
        elif self._queue is not None and self._sender.writing(granted.ref):
            blocks = granted.block_table[first:upto_block]
            progress.bytes_sent += len(blocks) * granted.memory.layout.bytes_per_block
            targets = granted.target_table[first:upto_block]
            computed = queued_work(granted.memory)
            self._queue.put(Run(granted.ref, first, granted.memory, blocks, targets, computed))

    def _sent(self, ref: GrantRef, first: int, digests: list[bytes]) -> None:
        self._pump.run(self._sender.push(ref, first, len(digests), digests))

    def _give_back(self, granted: GrantedBlocks, *, keep: bool) -> None:
        if granted.scratch is not None and self._scratch is not None:
            self._scratch.give_back(granted.scratch, keep=keep)

    def _handle(self, response: Response) -> None:
        match response.WhichOneof("message"):
            case "grant":
                grant = response.grant
                ref = ref_of(grant.grant)
                self._pump.run(self._sender.granted(ref, grant.block_ids, grant.cached_tokens))
            case "denied":
                denied = response.denied
                reason = denied.failure.reason if denied.HasField("failure") else None
                self._pump.run(self._sender.denied(key_of(denied.id), reason, denied.failure.message))
            case "abort":
                self._pump.run(self._sender.abort(ref_of(response.abort.grant)))
            case _:
                pass  # heartbeats are the client's; the rest is from a newer peer

    def _perform(self, action: SenderAction) -> None:
        match action:
            case GrantReceived(ref, _, _):
                waiting = self._asks.get(ref.key)
                if waiting is not None and not waiting.done():
                    waiting.set_result(action)
            case GrantDenied(key, reason, message):
                self._refuse(key, AttemptOver() if reason is None else GrantDeniedError(reason, message))
            case GrantRevoked(ref):
                self._on_abort(ref.key)
            case LinkLost(asking, writing):
                for key in asking:
                    self._refuse(key, PeerLost())
                self._on_lost(self, [ref.key for ref in writing])
            case _:
                if self._link is not None:
                    self._link.put(request_of(action))

    def _refuse(self, key: Key, error: GrantDeniedError | PeerLost) -> None:
        waiting = self._asks.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)
