"""Server of the decode worker: grants blocks, fences writers, hands verified blocks to the worker.

Drives `Receiver` (blocks) and one `Lease` a writer (liveness) with links, transports and a clock. All of it
runs on one event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import grpc

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_table import PromptWindow
from diptych.runtime.failpoints import ARMED
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.rpc_streams.method import HANDOFF
from diptych.runtime.rpc_streams.stream import LinkService, Refused, Stream
from diptych.worker.v1 import handoff_pb2, work_pb2
from kvtransfer.drivers.codec import Request, Response, key_of, ref_of, response_of
from kvtransfer.drivers.handshake import Fingerprint, Handshake
from kvtransfer.drivers.links import ServerLink, read_hello
from kvtransfer.drivers.local_writer import NAME as LOCAL
from kvtransfer.drivers.local_writer import CommitNote, LocalWriter
from kvtransfer.drivers.types import HandoffStats, Heartbeat, Ready
from kvtransfer.drivers.writer_registry import WriterRegistry
from kvtransfer.protocol.grants import GrantGate
from kvtransfer.protocol.lease import LeaseTimes, RunningTime
from kvtransfer.protocol.messages import (
    ActionQueue,
    Fail,
    FenceWriter,
    GrantRef,
    Handoff,
    Key,
    PendingTransfer,
    ReceiverAction,
    SendAbort,
    SendDenied,
    SendGrant,
    WriterId,
)
from kvtransfer.protocol.receiver import Receiver
from kvtransfer.protocol.transfer_table import EscalationTimeouts
from kvtransfer.transports.base import ReceiverHooks
from kvtransfer.transports.failpoints import damage_blocks
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.pull_frames import PullServer
from kvtransfer.transports.registry import PULLS_FRAMES, PULLS_MAPPED, make_receiver

_log = logging.getLogger(__name__)


class HandoffServer:
    """Handoff service of one decode worker.

    Callbacks run on the event loop; each key gets at most one of them.

    Args:
        running: returns the number of sequences that decode now.
        on_ready: takes the blocks of a finished handoff.
        on_failed: `on_failed(key, reason, message)` reports an attempt that gets no blocks. After `cancel`
            neither is called.
        heartbeat: state of this worker's engine.
        gate: what attempts need beside blocks; None: nothing.
        tls: certificates for the sockets of transports; None: they are plain.
        local_chunk: most tokens of a prompt that this worker computes itself at once.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: int,
        fingerprint: Fingerprint,
        memory: PoolMemory,
        pool: BlockPool,
        transports: Sequence[str],
        running: Callable[[], int],
        on_ready: Callable[[Ready], None],
        on_failed: Callable[[Key, int, str], None],
        host: str = "127.0.0.1",
        heartbeat: Callable[[], Heartbeat] = Heartbeat,
        lease_times: LeaseTimes | None = None,
        timeouts: EscalationTimeouts | None = None,
        gate: GrantGate | None = None,
        tls: InternalTls | None = None,
        local_chunk: int = 0,
    ) -> None:
        self._memory = memory.memory
        self._on_ready, self._on_failed, self._heartbeat = on_ready, on_failed, heartbeat
        self._lease_times = lease_times if lease_times is not None else LeaseTimes()
        layout = self._memory.layout
        self._receiver = Receiver(pool, layout.block_size, running, timeouts, gate, layout.windows)
        self._actions: ActionQueue[ReceiverAction] = ActionQueue(self._perform)
        self._writers = WriterRegistry(self._receiver, self._actions, self._lease_times)
        self.local = LocalWriter(WriterId(worker_id, incarnation), self._receiver, self._actions, local_chunk)
        """Writer that stands for this worker itself."""
        self._closed = False
        self._tick_task: asyncio.Task[None] | None = None
        self._time = RunningTime(self._lease_times.interval_s)
        made = [make_receiver(name, memory, host, self._hooks_of(name), tls) for name in transports]
        self._pulls: PullServer | None = None
        if not PULLS_FRAMES.isdisjoint(transports):
            self._pulls = PullServer(host, self._memory, self._receiver.prefix_block, tls, self._exchanged)
        self._handshake = Handshake(
            self.local.id,
            fingerprint,
            self._memory.num_blocks,
            made,
            self._pulls,
            layout.bytes_per_block,
        )
        self._forgotten = 0
        pool.on_forgotten.append(self._on_forgotten)
        self.service = LinkService(HANDOFF, self.serve_link)

    async def start(self) -> None:
        """Listen for the transports' registrations. Call it before the gRPC server starts. Raises OSError."""
        for transport in self._handshake.transports:
            await transport.start()
        if self._pulls is not None:
            await self._pulls.start()
        self._tick_task = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """End all links; no callback comes from here on."""
        self._closed = True
        if self._tick_task is not None:
            self._tick_task.cancel()
            await asyncio.gather(self._tick_task, return_exceptions=True)
        self._writers.close_links()
        for transport in self._handshake.transports:
            await transport.close()
        if self._pulls is not None:
            await self._pulls.close()

    # -- the owner's side

    def expect(self, expected: PendingTransfer) -> None:
        """Take an attempt that the gateway attached. Raises ValueError if it is attached already."""
        self._actions.run(self._receiver.expect(expected))

    def cancel(self, key: Key) -> None:
        """End an attempt for any reason; a no-op after on_ready and on_failed."""
        self._actions.run(self._receiver.cancel(key))

    def blocks_freed(self) -> None:
        """Serve waiting asks after blocks went back to the pool, or fewer sequences run."""
        self._actions.run(self._receiver.blocks_freed())

    def abort_newest_grant(self) -> Key | None:
        """Revoke the newest grant for the sake of running sequences and return its key; None without one.

        The key gets no callback: the caller answers for it. Its blocks return when its writer has stopped.
        """
        key, actions = self._receiver.abort_newest_grant()
        self._actions.run(actions)
        return key

    @property
    def num_grants(self) -> int:
        """The number of grants that prefill workers are filling."""
        return self._receiver.num_grants

    def stats(self) -> HandoffStats:
        """Return the counts of this moment."""
        stats = self._receiver.stats()
        return HandoffStats(
            writers=len(self._writers),
            grants=stats.grants,
            waiting_asks=stats.waiting_asks,
            quarantined_blocks=stats.quarantined_blocks,
            quarantine_age_s=stats.quarantine_age_s,
            stale_messages=stats.stale_messages,
            fenced=self._writers.fenced,
        )

    # -- links

    async def serve_link(self, stream: Stream) -> None:
        """Serve one stream from hello to end. Raises Refused and StreamLost."""
        hello = await read_hello(stream)
        if hello is None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        writer_id = WriterId(hello.worker_id, hello.incarnation)
        if writer_id == self.local.id:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "worker_id, incarnation: those of this worker")
        if self._writers.is_fenced(writer_id):
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this process was fenced")
        transport = self._handshake.choose_transport(hello)
        if isinstance(transport, str):
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, transport)
        link = ServerLink(writer_id, stream)
        whole = self._handshake.shares_drafter(hello)
        writer = self._writers.link_up(link, transport, shares_drafter=whole)
        link.put(self._handshake.make_welcome(hello, transport, self._forgotten))
        reads_prefix = transport.name in PULLS_MAPPED
        self._actions.run(
            self._receiver.link_up(
                writer_id,
                in_place=transport.in_place,
                transport=transport.name,
                reads_prefix=reads_prefix,
                chunk=hello.chunk_tokens,
            )
        )
        _log.info("prefill worker %s is linked, transport %s", writer_id.worker_id, transport.name)
        if not whole:
            _log.warning("prefill worker %s has another drafter: no drafts after it", writer_id.worker_id)
        try:
            await link.run(self._handle)
        finally:
            self._writers.link_lost(writer, link)
            if self._pulls is not None and not self._writers.is_linked(writer_id):
                self._pulls.end(writer_id)

    def _handle(self, link: ServerLink, request: Request) -> None:
        writer = self._writers.writer_of(link)
        if writer is None:
            return
        now = time.monotonic()
        kind = request.WhichOneof("message")
        if kind == "heartbeat":
            beat = request.heartbeat
            writer.lease.on_heartbeat(now, beat.progress, beat.busy, Heartbeat.late_s_of(beat))
            return
        writer.lease.on_message(now)
        if not writer.transport.registered(writer.id):
            _log.error(
                "prefill worker %s sent a message before its transport registered", writer.id.worker_id
            )
            link.close()
            return
        self._actions.run(self._event(writer.id, kind, request, now))
        if kind == "pushed":
            pushed = request.pushed
            writer.transport.pushed(writer.id, ref_of(pushed.grant), pushed.first_block, pushed.num_blocks)

    def _event(
        self, writer: WriterId, kind: str | None, request: Request, now: float
    ) -> list[ReceiverAction]:
        match kind:
            case "ask":
                return self._receiver.ask(writer, key_of(request.ask.id))
            case "pushed":
                pushed = request.pushed
                ref = ref_of(pushed.grant)
                first, count = pushed.first_block, pushed.num_blocks
                return self._receiver.pushed(writer, ref, first, count, list(pushed.digests))
            case "commit":
                commit = request.commit
                ref = ref_of(commit.grant)
                note = CommitNote(commit.times, now)
                first_tokens = tuple(commit.first_tokens)
                return self._receiver.commit(writer, ref, commit.num_tokens, first_tokens, note)
            case "stopped":
                return self._stopped(writer, request.stopped)
            case _:
                return []  # from a newer peer

    def _stopped(self, writer: WriterId, stopped: handoff_pb2.Stopped) -> list[ReceiverAction]:
        if stopped.grant.generation == 0:
            return self._receiver.withdraw(writer, key_of(stopped.grant.id))
        reason = stopped.failure.reason if stopped.HasField("failure") else None
        return self._receiver.stopped(writer, ref_of(stopped.grant), reason, stopped.failure.message)

    # -- transports

    def _hooks_of(self, transport: str) -> ReceiverHooks:
        return ReceiverHooks(
            dead=partial(self._writers.writer_dead, transport),
            resolve=self._receiver.resolve,
            destinations=self._receiver.destinations,
            arrived=lambda *event: self._actions.run(self._receiver.arrived(*event)),
            corrupt=self._on_corrupt,
            exchanged=self._exchanged,
        )

    def _exchanged(self, writer: WriterId, memory: KVMemory) -> KVMemory:
        """Return what of the blocks of `memory` is exchanged with a writer."""
        return memory if self._writers.shares_drafter(writer) else memory.without_draft()

    def _on_corrupt(self, writer: WriterId, ref: GrantRef) -> None:
        _log.error("a block from prefill worker %s is corrupt", writer.worker_id)
        self._actions.run(self._receiver.corrupt(writer, ref))

    def _on_forgotten(self, keys: Sequence[bytes]) -> None:
        """Tell the writers that copy what they must not keep; those in place share the pool's own cache."""
        self._forgotten += 1
        message = handoff_pb2.PrefixForgotten(keys=keys, count=self._forgotten)
        self._writers.send_to_copying(Response(forgotten=message))

    # -- time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._lease_times.interval_s)
            try:
                self._tick_once(time.monotonic())
            except Exception:  # one bad tick must not end the heartbeats
                _log.exception("a tick of the handoff failed")

    def _tick_once(self, now: float) -> None:
        message = Response(heartbeat=self._heartbeat().to_proto())
        self._actions.run(self._receiver.tick(self._time.at(now)))
        self._writers.tick(now, message)

    # -- actions

    def _perform(self, action: ReceiverAction) -> None:
        match action:
            case SendGrant() | SendDenied() | SendAbort() | FenceWriter() if action.writer == self.local.id:
                self.local.perform(action)
            case SendGrant() | SendDenied() | SendAbort():
                self._writers.send(action.writer, response_of(action))
            case Handoff():
                self._handoff(action)
            case Fail(key, reason, message):
                if not self._closed:
                    self._on_failed(key, reason, message)
            case FenceWriter(writer_id, why):
                self._writers.fence(writer_id, why)

    def _handoff(self, done: Handoff) -> None:
        if not isinstance(done.note, CommitNote):
            raise TypeError("a commit without times")
        times = done.note.times
        times.kv_receive.FromNanoseconds(int((time.monotonic() - done.note.received_at) * 1e9))
        if ARMED:
            damage_blocks(self._memory, done.block_ids, done.num_tokens)
        self._on_ready(
            Ready(
                key=done.ref.key,
                block_ids=done.block_ids,
                cached_tokens=done.cached_tokens,
                num_tokens=done.num_tokens,
                first_tokens=cast("tuple[work_pb2.SampledToken, ...]", done.first_tokens),
                times=times,
                in_place=done.in_place,
                transport=LOCAL if done.writer == self.local.id else self._writers.transport_of(done.writer),
                window=self._window_of(done),
                drafted=done.writer == self.local.id or self._writers.shares_drafter(done.writer),
            )
        )

    def _window_of(self, done: Handoff) -> PromptWindow | None:
        layout = self._memory.layout
        if layout.windows is None:
            return None
        cached = done.cached_tokens // layout.block_size
        return PromptWindow(layout.windows.tables, done.window_pins, done.window_blocks, cached)
