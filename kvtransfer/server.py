"""The decode worker's end of the hand-over: grants blocks, fences writers, hands blocks over.

Drives `Receiver` (what happens to blocks) and one `Lease` a writer (who is alive) with gRPC streams, the
transports and a clock. All of it runs on one event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from diptych.worker.v1 import handoff_pb2, handoff_pb2_grpc, work_pb2
from engine.block_pool import BlockPool
from kvtransfer.action_pump import ActionPump
from kvtransfer.failpoints import damage_blocks
from kvtransfer.fingerprint import Fingerprint, incompatible_field
from kvtransfer.host import host_id
from kvtransfer.lease import Lease, LeasePhase, LeaseTimes, Verdict
from kvtransfer.messages import (
    Expected,
    Fail,
    Fence,
    GrantRef,
    HandOver,
    Key,
    ReceiverAction,
    SendAbort,
    SendDenied,
    SendGrant,
    WriterId,
)
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.ready import Beat, HandoffStats, Ready
from kvtransfer.receiver import Receiver
from kvtransfer.receiving_attempt import Patience
from kvtransfer.server_link import Context, ServerLink, read_hello
from kvtransfer.transports import shared_memory, tcp
from kvtransfer.transports.base import ReceiverHooks, ReceivingTransport
from kvtransfer.wire import Request, Response, key_of, ref_of, response_of

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Writer:
    id: WriterId
    transport: ReceivingTransport
    lease: Lease
    link: ServerLink | None


class HandoffServer:
    """One per decode worker. Callbacks run on the event loop; each key gets at most one of them.

    `on_ready` gives the blocks away; `on_failed(key, reason, message)` says that none will come. After
    `cancel` neither is called. `running()` is the number of sequences that decode now.
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
        beat: Callable[[], Beat] = Beat,
        lease_times: LeaseTimes | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._me = WriterId(worker_id, incarnation)
        self._fingerprint = fingerprint
        self._memory = memory.memory
        self._on_ready, self._on_failed, self._beat = on_ready, on_failed, beat
        self._lease_times = lease_times if lease_times is not None else LeaseTimes()
        self._receiver = Receiver(pool, self._memory.layout.block_size, running, patience)
        self._pump: ActionPump[ReceiverAction] = ActionPump(self._perform)
        self._writers: dict[WriterId, _Writer] = {}
        self._host_id = host_id()
        self._fenced = 0
        self._closed = False
        self._ticking: asyncio.Task[None] | None = None
        hooks = ReceiverHooks(
            dead=self._dead,
            named=self._receiver.named,
            destination=self._destination,
            arrived=lambda *event: self._pump.run(self._receiver.arrived(*event)),
            corrupt=self._corrupt,
        )
        self._transports = {name: _transport(name, memory, host, hooks) for name in transports}
        self.servicer: handoff_pb2_grpc.HandoffServiceServicer = _Servicer(self)

    async def start(self) -> None:
        """Listen for the transports' registrations. Call it before the gRPC server starts. Raises OSError."""
        for transport in self._transports.values():
            await transport.start()
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """End all links; no callback comes from here on."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        for writer in list(self._writers.values()):
            if writer.link is not None:
                writer.link.close()
        for transport in self._transports.values():
            await transport.close()

    # -- the owner's side

    def expect(self, expected: Expected) -> None:
        """The gateway attached an attempt. ValueError if it is attached already."""
        self._pump.run(self._receiver.expect(expected))

    def cancel(self, key: Key) -> None:
        """The attempt is over for any reason; a no-op after on_ready and on_failed."""
        self._pump.run(self._receiver.cancel(key))

    def blocks_freed(self) -> None:
        """Blocks went back to the pool, or fewer sequences run: serve asks that wait."""
        self._pump.run(self._receiver.blocks_freed())

    def abort_newest_grant(self) -> Key | None:
        """Take the newest grant back for the sake of running sequences; None: there is none.

        Its key gets no callback: the caller answers for it. Its blocks come when its writer has stopped.
        """
        key, actions = self._receiver.abort_newest_grant()
        self._pump.run(actions)
        return key

    def drain(self) -> None:
        """Grant nothing from now on; asks are denied, grants go on."""
        self._pump.run(self._receiver.drain())

    def stats(self) -> HandoffStats:
        """The numbers of this moment."""
        stats = self._receiver.stats()
        return HandoffStats(
            writers=len(self._writers),
            grants=stats.grants,
            waiting_asks=stats.waiting_asks,
            quarantined_blocks=stats.quarantined_blocks,
            quarantine_age_s=stats.quarantine_age_s,
            stale_messages=stats.stale_messages,
            fenced=self._fenced,
        )

    # -- links

    async def serve_link(self, context: Context) -> None:
        """One stream, from hello to end."""
        hello = await read_hello(context)
        if hello is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
            return
        writer_id = WriterId(hello.worker_id, hello.incarnation)
        transport = self._choose_transport(hello)
        known = self._writers.get(writer_id)
        if known is not None and known.lease.phase is LeasePhase.FENCED:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this process was fenced")
            return
        refusal = self._refusal(hello, transport)
        if refusal is not None or transport is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal or "transports")
            return
        link = ServerLink(writer_id, context)
        writer = self._link_up(link, transport)
        link.put(self._welcome(hello, transport))
        self._pump.run(self._receiver.link_up(writer_id, in_place=transport.in_place))
        _log.info("prefill worker %s is linked, transport %s", writer_id.worker_id, transport.name)
        try:
            await link.run(self._handle)
        finally:
            self._link_lost(writer, link)

    def _refusal(self, hello: handoff_pb2.HandoffHello, transport: ReceivingTransport | None) -> str | None:
        """The name of what does not fit."""
        field = incompatible_field(self._fingerprint, Fingerprint.from_proto(hello.fingerprint))
        if field is not None:
            return field
        if transport is None:
            return "transports"
        return None

    def _choose_transport(self, hello: handoff_pb2.HandoffHello) -> ReceivingTransport | None:
        for name in hello.transports:
            transport = self._transports.get(name)
            if transport is not None and (not transport.in_place or hello.host_id == self._host_id):
                return transport
        return None

    def _welcome(self, hello: handoff_pb2.HandoffHello, transport: ReceivingTransport) -> Response:
        writer = WriterId(hello.worker_id, hello.incarnation)
        return Response(
            welcome=handoff_pb2.HandoffWelcome(
                worker_id=self._me.worker_id,
                incarnation=self._me.incarnation,
                fingerprint=self._fingerprint.to_proto(),
                transport=transport.name,
                endpoint=transport.endpoint,
                token=transport.admit(writer, hello.pid),
                num_blocks=self._memory.num_blocks,
            )
        )

    def _link_up(self, link: ServerLink, transport: ReceivingTransport) -> _Writer:
        now = time.monotonic()
        known = self._writers.get(link.writer)
        if known is not None and known.link is not None:
            known.link.close()
            self._link_lost(known, known.link)
            known = self._writers.get(link.writer)
        if known is None:
            known = _Writer(link.writer, transport, Lease(now, self._lease_times), link)
            self._writers[link.writer] = known
        else:
            known.link, known.transport = link, transport
            known.lease.link_up(now)
        return known

    def _link_lost(self, writer: _Writer, link: ServerLink) -> None:
        if writer.link is not link:
            return
        writer.link = None
        writer.lease.link_lost(time.monotonic())
        _log.info("prefill worker %s lost its link", writer.id.worker_id)
        self._pump.run(self._receiver.link_lost(writer.id))
        writer.transport.link_lost(writer.id)
        self._forget_if_proven(writer)

    def _forget_if_proven(self, writer: _Writer) -> None:
        if writer.link is None and not self._receiver.holds_unproven(writer.id):
            self._writers.pop(writer.id, None)

    def _handle(self, link: ServerLink, request: Request) -> None:
        writer = self._writers.get(link.writer)
        if writer is None or writer.link is not link:
            return  # another stream of the same process took over
        now = time.monotonic()
        kind = request.WhichOneof("message")
        if kind == "heartbeat":
            writer.lease.beat(now, request.heartbeat.progress, request.heartbeat.busy)
            return
        writer.lease.heard(now)
        if not writer.transport.registered(writer.id):
            _log.error("prefill worker %s speaks before it registered", writer.id.worker_id)
            link.close()
            return
        self._pump.run(self._event(writer.id, kind, request, now))

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
                note = _CommitNote(commit.times, now)
                return self._receiver.commit(writer, ref, commit.num_tokens, commit.first_token, note)
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

    def _dead(self, writer_id: WriterId) -> None:
        """Proven by a transport: nothing of this writer can be written any more."""
        self._pump.run(self._receiver.writer_dead(writer_id))
        writer = self._writers.pop(writer_id, None)
        if writer is not None and writer.link is not None:
            writer.link.close()
            writer.link = None

    def _destination(self, writer: WriterId, ref: GrantRef, index: int) -> memoryview | None:
        block = self._receiver.destination(writer, ref, index)
        return None if block is None else self._memory.block_bytes(block)

    def _corrupt(self, writer: WriterId, ref: GrantRef) -> None:
        _log.error("a block from prefill worker %s is corrupt", writer.worker_id)
        self._pump.run(self._receiver.corrupt(writer, ref))

    def _fence(self, writer_id: WriterId, why: str) -> None:
        writer = self._writers.get(writer_id)
        if writer is None or writer.lease.phase is LeasePhase.FENCED:
            return
        writer.lease.fence()
        self._cut_off(writer, why)

    def _cut_off(self, writer: _Writer, why: str) -> None:
        """It must not write again: end its stream; if it still holds blocks, see to the proof."""
        link = writer.link
        if link is not None:
            link.close()
            self._link_lost(writer, link)
        if self._receiver.holds_unproven(writer.id):
            self._fenced += 1
            _log.warning("prefill worker %s is fenced: %s", writer.id.worker_id, why)
            writer.transport.fence(writer.id)
        else:
            self._writers.pop(writer.id, None)

    # -- time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._lease_times.interval_s)
            now = time.monotonic()
            beat = self._beat()
            message = Response(heartbeat=work_pb2.Heartbeat(progress=beat.progress, busy=beat.busy))
            self._pump.run(self._receiver.tick(now))
            for writer in list(self._writers.values()):
                self._tick_writer(writer, now)
                if writer.link is not None:
                    writer.link.put(message)

    def _tick_writer(self, writer: _Writer, now: float) -> None:
        verdict = writer.lease.tick(now)
        if verdict is Verdict.SUSPECT:
            _log.warning("prefill worker %s does not answer", writer.id.worker_id)
        elif verdict is Verdict.GONE:
            self._cut_off(writer, "it does not answer")
        else:
            self._forget_if_proven(writer)

    # -- actions

    def _perform(self, action: ReceiverAction) -> None:
        match action:
            case SendGrant() | SendDenied() | SendAbort():
                writer = self._writers.get(action.writer)
                if writer is not None and writer.link is not None:
                    writer.link.put(response_of(action))
            case HandOver():
                self._hand_over(action)
            case Fail(key, reason, message):
                if not self._closed:
                    self._on_failed(key, reason, message)
            case Fence(writer_id, why):
                self._fence(writer_id, why)

    def _hand_over(self, done: HandOver) -> None:
        if not isinstance(done.note, _CommitNote):
            raise TypeError("a commit without times")
        times = done.note.times
        times.kv_receive.FromNanoseconds(int((time.monotonic() - done.note.received_at) * 1e9))
        damage_blocks(self._memory, done.block_ids, done.num_tokens)
        self._on_ready(
            Ready(
                key=done.ref.key,
                block_ids=done.block_ids,
                cached_tokens=done.cached_tokens,
                num_tokens=done.num_tokens,
                first_token=done.first_token,
                times=times,
                in_place=done.in_place,
            )
        )


@dataclass(frozen=True, slots=True)
class _CommitNote:
    times: work_pb2.PhaseTimes
    received_at: float


class _Servicer(handoff_pb2_grpc.HandoffServiceServicer):
    def __init__(self, server: HandoffServer) -> None:
        self._server = server

    async def Link(self, request_iterator: object, context: Context) -> None:
        await self._server.serve_link(context)


def _transport(name: str, memory: PoolMemory, host: str, hooks: ReceiverHooks) -> ReceivingTransport:
    if name == shared_memory.NAME:
        return shared_memory.SharedMemoryReceiver(memory, hooks)
    if name == tcp.NAME:
        return tcp.TcpReceiver(host, memory.memory.layout.bytes_per_block, hooks)
    raise ValueError(f"there is no transport {name!r}")
