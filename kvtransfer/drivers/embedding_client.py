"""Client of the prefill worker for encode workers: one link to each, opened when its rows are first wanted.

A link that breaks, or an encode worker that falls silent, fails the attempts that still want something of it;
their gateway tries another one. Rows that came damaged are asked for once more, under another generation.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from diptych.runtime.internal_tls import InternalTls
from diptych.worker.v1 import encode_pb2, work_pb2
from kvtransfer.drivers.codec import attempt_id, failure
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint, EmbeddingLink, Request, Response
from kvtransfer.drivers.types import Heartbeat
from kvtransfer.protocol.errors import HandoffDenied
from kvtransfer.protocol.lease import Lease, LeaseTimes, Verdict
from kvtransfer.protocol.messages import Key, WriterId
from kvtransfer.protocol.row_transfer import Arrival, RowAsks, Rows, RowsPart
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.row_channels import STREAM, RowReceiver, RowsAdmission
from kvtransfer.transports.row_registry import open_row_receiver

FETCHED, DAMAGED, STALE, LOST = OUTCOMES = ("fetched", "damaged", "stale", "lost")
_LOST = work_pb2.FAILURE_REASON_ENCODER_LOST
_TRANSFER_FAILED = work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderAddress:
    """An encode worker's process."""

    address: str
    incarnation: int


@dataclass(slots=True, eq=False)
class _Peer:
    where: EncoderAddress
    asks: RowAsks
    keys: set[Key] = field(default_factory=set)
    """Attempts that may still want something of it."""
    asked_again: set[tuple[Key, bytes]] = field(default_factory=set)
    unsent: list[Request] = field(default_factory=list)
    """Messages before the link is up."""
    link: EmbeddingLink | None = None
    lease: Lease | None = None
    way: str = STREAM
    receiver: RowReceiver | None = None
    """Receiver of its rows; None: they come over the link."""
    read: int = 0
    """Parts that were announced in a region, and are copied or dropped."""

    def send(self, request: Request) -> None:
        if self.link is None:
            self.unsent.append(request)
        else:
            self.link.put(request)


class EmbeddingClient:
    """Links of one prefill worker to encode workers. Callbacks run on the event loop.

    Args:
        on_rows: `on_rows(key, digest, rows)` gets an image's embeddings `[rows, width]`, on `device`.
        on_failed: `on_failed(key, failure)`: an attempt does not get what it asked for.
        on_outcome: gets one of `OUTCOMES` for each image, or part of one, that came or did not.
        on_bytes: `on_bytes(way, count)`: bytes of rows came by this way.
        heartbeat: state of this worker's engine.
        tls: certificates for the links; None: they are plain.
        transports: ways of rows to offer, in order of preference (`row_ways`).
    """

    def __init__(
        self,
        worker: WriterId,
        fingerprint: EmbeddingFingerprint,
        *,
        on_rows: Callable[[Key, bytes, torch.Tensor], None],
        on_failed: Callable[[Key, work_pb2.Failure], None],
        on_outcome: Callable[[str], None] = lambda outcome: None,
        on_bytes: Callable[[str, int], None] = lambda way, count: None,
        heartbeat: Callable[[], Heartbeat] = Heartbeat,
        device: torch.device | str = "cpu",
        times: LeaseTimes | None = None,
        tls: InternalTls | None = None,
        transports: Sequence[str] = (),
    ) -> None:
        self._worker, self._fingerprint, self._tls = worker, fingerprint, tls
        self._transports, self._on_bytes = tuple(transports), on_bytes
        self._on_rows, self._on_failed, self._on_outcome = on_rows, on_failed, on_outcome
        self._heartbeat = heartbeat
        self._device = device
        self._dtype: torch.dtype = getattr(torch, fingerprint.dtype)
        self._times = times or LeaseTimes()
        self._generations = itertools.count(1)
        self._peers: dict[EncoderAddress, _Peer] = {}
        self._of_key: dict[Key, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None

    def ask(self, where: EncoderAddress, key: Key, digest: bytes) -> None:
        """Ask for an image's rows; `on_rows` or `on_failed` follows, unless the attempt is dropped before."""
        peer = self._peer(where)
        peer.keys.add(key)
        self._of_key[key] = peer
        self._send_ask(peer, key, digest)

    def taken(self, where: EncoderAddress, key: Key) -> None:
        """Tell the encode worker that an attempt needs no more rows, though it may not have asked for any."""
        self._peer(where).send(Request(taken=encode_pb2.RowsTaken(id=attempt_id(key))))
        self.drop(key)

    def drop(self, key: Key) -> None:
        """Want nothing more for an attempt: what still comes is stale."""
        if (peer := self._of_key.pop(key, None)) is not None:
            peer.keys.discard(key)
            peer.asks.drop({key})
            peer.asked_again = {one for one in peer.asked_again if one[0] != key}

    async def close(self) -> None:
        """End all links; no callback comes from here on."""
        peers, self._peers = list(self._peers.values()), {}
        self._of_key.clear()
        tasks = [*self._tasks] if self._ticking is None else [*self._tasks, self._ticking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in peers:
            peer.keys.clear()
            if peer.link is not None:
                await peer.link.wait_closed()
            _close_receiver(peer)

    def _peer(self, where: EncoderAddress) -> _Peer:
        """Return the link to a process, which is being opened if there was none."""
        peer = self._peers.get(where)
        if peer is None:
            peer = self._peers[where] = _Peer(where, RowAsks(self._dtype.itemsize, self._generations))
            task = asyncio.create_task(self._connect(peer), name=f"link encoder {where.address}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if self._ticking is None:
                self._ticking = asyncio.create_task(self._tick(), name="embedding links")
        return peer

    def _send_ask(self, peer: _Peer, key: Key, digest: bytes) -> None:
        generation = peer.asks.ask(key, digest)
        ask = encode_pb2.AskRows(id=attempt_id(key), digest=digest, generation=generation)
        peer.send(Request(ask=ask))

    async def _connect(self, peer: _Peer) -> None:
        try:
            link = await EmbeddingLink.connect(
                peer.where.address, self._worker, self._fingerprint, self._tls, self._transports
            )
        except HandoffDenied as denied:
            self._lost(peer, str(denied))
            return
        try:
            if link.welcome.incarnation != peer.where.incarnation:
                await link.wait_closed()
                self._lost(peer, "another encode process has this address now")
                return
            await self._open_way(peer, link)
        except BaseException:
            await link.wait_closed()
            raise
        _log.info("linked to encode worker %s, rows by %s", link.welcome.worker_id, peer.way)
        peer.link, peer.lease = link, Lease(time.monotonic(), self._times)
        for request in peer.unsent:
            link.put(request)
        peer.unsent.clear()
        link.start(lambda response: self._handle(peer, response), lambda: self._lost(peer, "the link broke"))

    async def _open_way(self, peer: _Peer, link: EmbeddingLink) -> None:
        """Register with the way that the welcome names. Rows come over the link where that fails."""
        channel = link.welcome.channel
        if not channel.transport:
            return
        admission = RowsAdmission(peer.where.address, channel.endpoint, channel.token, self._tls)

        def broken(why: str) -> None:
            if self._peers.get(peer.where) is peer:
                _log.warning("rows from the encode worker at %s: %s", peer.where.address, why)
            link.close()

        try:
            peer.receiver = await open_row_receiver(
                channel.transport,
                admission,
                self._dtype.itemsize,
                lambda part: self._arrived(peer, part),
                broken,
            )
        except TransportError as error:
            _log.warning("rows from %s go over its link: %s", link.welcome.worker_id, error)
            return
        peer.way = channel.transport
        link.put(Request(opened=encode_pb2.RowsChannelOpened()))

    def _lost(self, peer: _Peer, why: str) -> None:
        if self._peers.get(peer.where) is not peer:
            return  # closed
        del self._peers[peer.where]
        _close_receiver(peer)
        _log.warning("the encode worker at %s: %s", peer.where.address, why)
        for key in list(peer.keys):
            self._fail(key, failure(_LOST, f"the encode worker at {peer.where.address}: {why}"))

    def _fail(self, key: Key, why: work_pb2.Failure) -> None:
        self._on_outcome(LOST)
        self.drop(key)
        self._on_failed(key, why)

    def _handle(self, peer: _Peer, response: Response) -> None:
        now = time.monotonic()
        kind = response.WhichOneof("message")
        if peer.lease is not None and kind == "heartbeat":
            beat = response.heartbeat
            peer.lease.on_heartbeat(now, beat.progress, beat.busy, Heartbeat.late_s_of(beat))
        elif peer.lease is not None:
            peer.lease.on_message(now)
        if kind == "part":
            self._take_part(peer, response.part)
        elif kind == "denied" and (key := peer.asks.deny(response.denied.generation)) is not None:
            self._fail(key, failure(_LOST, "the encode worker does not have the attempt"))

    def _take_part(self, peer: _Peer, sent: encode_pb2.RowsPart) -> None:
        """Take a part that came over the link, or was announced there; a place that is none ends the link."""
        place = (sent.generation, sent.first_row, sent.rows, sent.total_rows, sent.width)
        part = RowsPart(*place, sent.data, sent.checksum, sent.slot if sent.HasField("slot") else None)
        if part.slot is None:
            self._arrived(peer, part, STREAM)
            return
        try:
            if peer.receiver is None:
                raise TransportError("rows are announced in a region, and none is mapped")
            self._arrived(peer, peer.receiver.locate(part))
        except TransportError as error:
            _log.error("rows from the encode worker at %s: %s", peer.where.address, error)
            if peer.link is not None:
                peer.link.close()
            return
        peer.read += 1
        peer.send(Request(read=encode_pb2.RowsRead(parts=peer.read)))

    def _arrived(self, peer: _Peer, part: RowsPart, way: str | None = None) -> None:
        self._on_bytes(way or peer.way, len(part.data))
        arrival, rows = peer.asks.arrive(part)
        if arrival is Arrival.STALE:
            self._on_outcome(STALE)
        elif rows is None:
            return
        elif arrival is Arrival.DAMAGED:
            self._damaged(peer, rows)
        else:
            self._on_outcome(FETCHED)
            tensor = torch.frombuffer(rows.data, dtype=self._dtype).view(rows.total_rows, rows.width)
            self._on_rows(rows.key, rows.digest, tensor.to(self._device))

    def _damaged(self, peer: _Peer, rows: Rows) -> None:
        self._on_outcome(DAMAGED)
        _log.error("rows of an image of %s came damaged", rows.key)
        if (rows.key, rows.digest) in peer.asked_again:
            self._fail(rows.key, failure(_TRANSFER_FAILED, "rows of an image came damaged twice"))
            return
        peer.asked_again.add((rows.key, rows.digest))
        self._send_ask(peer, rows.key, rows.digest)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._times.interval_s)
            now = time.monotonic()
            message = Request(heartbeat=self._heartbeat().to_proto())
            for peer in list(self._peers.values()):
                if peer.link is None or peer.lease is None:
                    continue
                if peer.lease.tick(now) is Verdict.EXPIRED:
                    _log.warning("encode worker %s does not answer", peer.link.welcome.worker_id)
                    peer.link.close()
                else:
                    peer.link.put(message)


def _close_receiver(peer: _Peer) -> None:
    if peer.receiver is not None:
        peer.receiver.close()
        peer.receiver = None
