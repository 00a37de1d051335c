"""Decode process as the prefill worker sees it: ask for blocks, fill them, commit or stop.

Drives `Sender` with the current link. In place, the decode pool is mapped and the owner computes straight
into the granted blocks; otherwise it computes in scratch, `PushQueue` copies, and `Puller` brings what only
the decode worker has of a prompt. A Peer outlives its links: grants that were being written when a link broke
are answered for on the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.codec import Response, key_of, ref_of, request_of
from kvtransfer.drivers.links import PeerLink
from kvtransfer.drivers.puller import Puller
from kvtransfer.drivers.push_queue import PushQueue
from kvtransfer.drivers.scratch import Scratch, ScratchBlocks
from kvtransfer.drivers.types import GrantedBlocks
from kvtransfer.drivers.window_grant import split_grant, window_runs
from kvtransfer.protocol.errors import AttemptOver, GrantDeniedError, PeerLost
from kvtransfer.protocol.lease import TransferProgress
from kvtransfer.protocol.messages import (
    ActionQueue,
    GrantDenied,
    GrantReceived,
    GrantRef,
    GrantRevoked,
    Key,
    LinkLost,
    SenderAction,
)
from kvtransfer.protocol.sender import Sender
from kvtransfer.transports.base import PushChannel, Run
from kvtransfer.transports.blocking import queued_work, wait_written


@dataclass(frozen=True, slots=True)
class Copying:
    """Own blocks, and the channels of one link that copy from and into them."""

    scratch: Scratch
    exchanged: KVMemory
    """Blocks of `scratch` as they are sent and pulled: whole, or the model's own segments alone."""
    channel: PushChannel
    puller: Puller | None
    """None where the decode worker's blocks cannot be pulled."""


@dataclass(slots=True)
class _PushState:
    next_block: int
    """Index of the first block that was not pushed."""
    bytes_sent: int = 0


class Peer:
    """Client of one decode process, made by `HandoffClient.peer`. Callbacks come on the event loop."""

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
        """The decode worker's pool while it is mapped, None where blocks are copied."""
        self._on_abort, self._on_lost = on_abort, on_lost
        self._copying: Copying | None = None
        self._forgotten: int | None = None
        """Count of the decode worker's PrefixForgotten messages; None before the first link."""
        self._queue: PushQueue | None = None
        self._link: PeerLink | None = None
        self._transport = ""
        self._sender = Sender()
        self._actions: ActionQueue[SenderAction] = ActionQueue(self._perform)
        self._pending_asks: dict[Key, asyncio.Future[GrantReceived]] = {}
        self._push_states: dict[GrantRef, _PushState] = {}

    @property
    def linked(self) -> bool:
        """True while there is a stream."""
        return self._link is not None

    @property
    def in_place(self) -> bool:
        """True if this worker computes straight into the decode worker's pool."""
        return self.memory is not None

    # -- the prefill worker's side

    async def ask(
        self, key: Key, num_tokens: int, keys: Sequence[bytes], *, keep: bool = True
    ) -> GrantedBlocks:
        """Wait for blocks for `num_tokens` tokens. Cancelling the call takes the ask back.

        Args:
            keys: hash of each full block of the tokens; empty when no prefix cache may be read.
            keep: where blocks are copied, lets those that were computed here enter the own prefix cache.

        Raises:
            GrantDeniedError: the decode worker denied the ask.
            PeerLost: the link broke.
            ValueError: the attempt has asked before.
        """
        if key in self._pending_asks:
            raise ValueError("blocks for this attempt were asked for already")
        # Entered before the first await, so that the second of two asks fails and not the first.
        grant_arrival: asyncio.Future[GrantReceived] = asyncio.get_running_loop().create_future()
        self._pending_asks[key] = grant_arrival
        blocks: ScratchBlocks | None = None
        try:
            if self._copying is not None:
                blocks = await self._copying.scratch.acquire(num_tokens, keys)
            if not self.linked:
                raise PeerLost
            self._actions.run(self._sender.ask(key))
            grant = await grant_arrival
            if not self._sender.start_writing(key):
                raise (AttemptOver() if self.linked else PeerLost())
        except BaseException:
            self._actions.run(self._sender.withdraw(key))
            if blocks is not None and self._copying is not None:
                self._copying.scratch.release(blocks, keep=False)
            raise
        finally:
            del self._pending_asks[key]
        if blocks is None or self._copying is None:
            return self._granted_blocks(grant, num_tokens, None, keep, grant.cached_tokens)
        started = time.monotonic()
        try:
            cached_tokens = await self._pull(self._copying, grant, blocks, keep)
        except BaseException:
            self._actions.run(self._sender.stop(grant.ref))
            self._copying.scratch.release(blocks, keep=False)
            raise
        pull_s = time.monotonic() - started if grant.cached_tokens > blocks.cached_tokens else 0.0
        return self._granted_blocks(grant, num_tokens, blocks, keep, cached_tokens, pull_s)

    async def push(self, granted: GrantedBlocks, upto_tokens: int) -> None:
        """Send the full blocks of the first `upto_tokens` tokens, which are computed. Returns at once."""
        self._push(granted, upto_tokens // granted.memory.layout.block_size)

    async def commit(
        self,
        granted: GrantedBlocks,
        num_tokens: int,
        first_tokens: Sequence[work_pb2.SampledToken],
        times: work_pb2.PhaseTimes,
    ) -> bool:
        """End the handoff of blocks that are all computed, after pushing the rest of them.

        `times` gets kv_send, the bytes and the cached tokens. Returns False if the grant was revoked or the
        link broke meanwhile; the attempt is over here either way, and `stop` is not needed.
        """
        started = time.monotonic()
        ref = granted.ref
        if granted.scratch is not None:
            self._push(granted, len(granted.block_table))
            self._push_window(granted, num_tokens)
            if self._queue is not None:
                await self._queue.flush(ref)
        state = self._push_states.pop(ref, None)
        times.kv_bytes_transferred = 0 if state is None else state.bytes_sent
        times.cached_tokens = granted.computed_tokens
        times.kv_send.FromNanoseconds(int((time.monotonic() - started) * 1e9))
        committed, actions = self._sender.commit(ref, num_tokens, tuple(first_tokens), times)
        self._actions.run(actions)
        self._release_scratch(granted, keep=committed and granted.keep)
        return committed

    async def stop(self, granted: GrantedBlocks, failure: work_pb2.Failure | None = None) -> None:
        """Promise that nothing more is written to this grant. Needed after on_abort and on_peer_lost too.

        Call it only when the engine has left the blocks. `failure` is set if the prefill gave up by itself.
        """
        if self._push_states.pop(granted.ref, None) is None:
            return
        await wait_written(granted.memory)
        reason = None if failure is None else failure.reason
        message = "" if failure is None else failure.message
        if reason == work_pb2.FAILURE_REASON_COMPUTE_FAILED and granted.scratch and self._copying:
            self._copying.scratch.invalidate(granted.scratch)

        def quiet() -> None:
            self._actions.run(self._sender.stop(granted.ref, reason, message))
            self._release_scratch(granted, keep=False)

        if self._queue is not None:
            self._queue.when_idle(granted.ref, quiet)
        else:
            quiet()

    # -- links

    def link_up(
        self,
        link: PeerLink,
        memory: KVMemory | None,
        copying: Copying | None,
        *,
        on_message: Callable[[Response], None],
        progress: TransferProgress,
    ) -> None:
        """Take a stream whose transport is registered.

        Args:
            memory: the mapped pool of the decode worker, None where blocks are copied.
            copying: the own blocks and the data channels, None in place.
            on_message: called with every message of the peer.
            progress: detector of a data connection that falls silent.
        """
        self._link, self.memory = link, memory
        self._transport = link.welcome.transport
        self._sender.link_up()
        forgotten, self._forgotten = self._forgotten, link.welcome.forgotten
        if copying is not None:
            self._copying = copying
            if forgotten not in (None, self._forgotten):  # a message was lost with the link before
                copying.scratch.forget(self.address, ())
            self._queue = PushQueue(
                copying.channel, self._sender.is_writing, self._on_sent, link.close, progress
            )

        def handle(response: Response) -> None:
            on_message(response)
            self._handle(response)

        link.start(handle, lambda: self._on_stream_end(link))

    async def wait_quiesced(self) -> None:
        """Wait until no copy of an earlier link is in flight."""
        if self._queue is not None and not self.linked:
            await self._queue.close()

    def stalled(self, now: float) -> bool:
        """Return True if blocks are sent that do not arrive. Call it at every interval."""
        return self._queue is not None and self.linked and self._queue.stalled(now)

    async def close(self) -> None:
        """End the link and unmap the pool."""
        link, queue = self._link, self._queue
        self._end_pulls()
        if link is not None:
            await link.wait_closed()
        if queue is not None:
            await queue.close()
        self.unmap()

    def unmap(self) -> None:
        """Unmap the pool; grants that are still being written keep the mapping until they are dropped."""
        self.memory = None

    def _on_stream_end(self, link: PeerLink) -> None:
        if self._link is link:
            self._link = None
            self._end_pulls()
            if self._queue is not None:
                self._queue.cancel()
            self._actions.run(self._sender.link_lost())

    # -- messages and actions

    async def _pull(self, copying: Copying, grant: GrantReceived, blocks: ScratchBlocks, keep: bool) -> int:
        """Return the tokens whose KV is in scratch, after pulling what only the decode worker has of them."""
        size = copying.scratch.memory.layout.block_size
        first, upto = blocks.cached_tokens // size, grant.cached_tokens // size
        if copying.puller is None or upto <= first:
            return blocks.cached_tokens
        pulled = await copying.puller.pull(
            grant.ref, first, grant.block_ids[first:upto], blocks.block_ids[first:upto]
        )
        if pulled and keep:
            copying.scratch.keep_pulled(blocks, first + pulled, self.address)
        return (first + pulled) * size

    def _end_pulls(self) -> None:
        if self._copying is not None and self._copying.puller is not None:
            self._copying.puller.close()

    def _granted_blocks(
        self,
        grant: GrantReceived,
        num_tokens: int,
        blocks: ScratchBlocks | None,
        keep: bool,
        computed_tokens: int,
        pull_s: float = 0.0,
    ) -> GrantedBlocks:
        memory = self.memory if self._copying is None else self._copying.scratch.memory
        if memory is None:
            raise RuntimeError("granted without memory")
        self._push_states[grant.ref] = _PushState(grant.cached_tokens // memory.layout.block_size)
        target, window = split_grant(
            memory.layout, num_tokens, grant.block_ids, grant.cached_tokens, grant.window_pins
        )
        return GrantedBlocks(
            key=grant.ref.key,
            memory=memory,
            block_table=target if blocks is None else blocks.block_ids,
            computed_tokens=computed_tokens,
            cached_tokens=grant.cached_tokens,
            ref=grant.ref,
            scratch=blocks,
            target_table=grant.block_ids,
            transport=self._transport,
            keep=keep,
            window=window if blocks is None else blocks.window,
            target_window=window,
            pull_s=pull_s,
        )

    def _push(self, granted: GrantedBlocks, upto_block: int) -> None:
        state = self._push_states.get(granted.ref)
        if state is None or upto_block <= state.next_block:
            return
        first, state.next_block = state.next_block, upto_block
        if granted.scratch is None:
            self._actions.run(self._sender.push(granted.ref, first, upto_block - first))
        elif self._copying is not None and self._queue is not None and self._sender.is_writing(granted.ref):
            blocks, memory = granted.block_table[first:upto_block], self._copying.exchanged
            state.bytes_sent += len(blocks) * memory.layout.bytes_per_block
            targets = granted.target_table[first:upto_block]
            self._queue.put(Run(granted.ref, first, memory, blocks, targets, queued_work(memory)))

    def _push_window(self, granted: GrantedBlocks, num_tokens: int) -> None:
        """Send the windowed blocks that stay of a prompt, which is computed."""
        state, own, target = self._push_states.get(granted.ref), granted.window, granted.target_window
        if state is None or self._queue is None or own is None or target is None:
            return
        if self._copying is None or not self._sender.is_writing(granted.ref):
            return
        memory = self._copying.exchanged
        for first, blocks in window_runs(memory.layout, num_tokens, own, target):
            state.bytes_sent += len(blocks) * memory.layout.bytes_per_block
            targets = granted.target_table[first : first + len(blocks)]
            self._queue.put(Run(granted.ref, first, memory, blocks, targets, queued_work(memory)))

    def _on_sent(self, ref: GrantRef, first: int, digests: list[bytes]) -> None:
        self._actions.run(self._sender.push(ref, first, len(digests), digests))

    def _release_scratch(self, granted: GrantedBlocks, *, keep: bool) -> None:
        if granted.scratch is not None and self._copying is not None:
            self._copying.scratch.release(granted.scratch, keep=keep)

    def _handle(self, response: Response) -> None:
        match response.WhichOneof("message"):
            case "grant":
                grant = response.grant
                ref = ref_of(grant.grant)
                self._actions.run(
                    self._sender.granted(ref, grant.block_ids, grant.cached_tokens, grant.window_pins)
                )
            case "denied":
                denied = response.denied
                reason = denied.failure.reason if denied.HasField("failure") else None
                self._actions.run(self._sender.denied(key_of(denied.id), reason, denied.failure.message))
            case "abort":
                self._actions.run(self._sender.abort(ref_of(response.abort.grant)))
            case "forgotten":
                self._forgotten = response.forgotten.count
                if self._copying is not None:
                    self._copying.scratch.forget(self.address, response.forgotten.keys)
            case _:
                pass  # heartbeats are the client's; other messages are from a newer peer

    def _perform(self, action: SenderAction) -> None:
        match action:
            case GrantReceived(ref):
                waiting = self._pending_asks.get(ref.key)
                if waiting is not None and not waiting.done():
                    waiting.set_result(action)
            case GrantDenied(key, reason, message):
                self._fail_ask(key, AttemptOver() if reason is None else GrantDeniedError(reason, message))
            case GrantRevoked(ref):
                self._on_abort(ref.key)
            case LinkLost(asking, writing):
                for key in asking:
                    self._fail_ask(key, PeerLost())
                self._on_lost(self, [ref.key for ref in writing])
            case _:
                if self._link is not None:
                    self._link.put(request_of(action))

    def _fail_ask(self, key: Key, error: GrantDeniedError | PeerLost) -> None:
        waiting = self._pending_asks.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)
