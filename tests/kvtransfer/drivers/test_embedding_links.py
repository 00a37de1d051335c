"""Rows of embeddings from an encode worker's server to a prefill worker's client, over a real stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.worker.v1 import encode_pb2, work_pb2
from kvtransfer.drivers import embedding_client, embedding_link, rows_link
from kvtransfer.drivers.embedding_client import EmbeddingClient, EncoderAddress
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint, Request, Response
from kvtransfer.drivers.embedding_server import EmbeddingServer
from kvtransfer.drivers.rows_link import RowsLink
from kvtransfer.drivers.types import Heartbeat
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.protocol.messages import Key, WriterId
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.row_channels import STREAM, RowReceiver, StreamSender
from kvtransfer.transports.row_region import SLOT_BYTES, SLOTS
from kvtransfer.transports.row_registry import make_row_listeners
from tests.kvtransfer.conftest import until

FINGERPRINT = EmbeddingFingerprint("m" * 64, "llava", "float32")
INCARNATION = 5
WAYS = ("stream", "shared_memory", "tcp")
KEY, IMAGE = ("r", 1), b"i" * 32
ROWS = torch.arange(700 * 512, dtype=torch.float32).view(700, 512)  # more than one part
FAST = LeaseTimes(interval_s=0.05, suspect_after_s=0.2, fence_after_s=0.4, starved_factor=1.0)


@dataclass
class Encoder:
    """An encode worker without an encoder: it answers with `ROWS`, or not at all."""

    answers: bool = True
    silent: bool = False
    asked: list[tuple[Key, bytes]] = field(default_factory=list)
    taken: list[Key] = field(default_factory=list)
    lost: int = 0
    links: list[tuple[RowsLink, int]] = field(default_factory=list)

    def on_ask(self, link: RowsLink, key: Key, digest: bytes, generation: int) -> None:
        self.asked.append((key, digest))
        self.links.append((link, generation))
        if key[0] == "unknown":
            link.deny(generation)
        elif self.answers:
            link.send_rows(generation, digest, ROWS)

    def on_lost(self, link: RowsLink) -> None:
        self.lost += 1

    def beat(self) -> Heartbeat:
        if self.silent:
            raise RuntimeError("it sends nothing any more")
        return Heartbeat()


@dataclass
class Prefill:
    """Events that a prefill worker's client reports."""

    rows: list[tuple[Key, bytes, torch.Tensor]] = field(default_factory=list)
    failed: list[tuple[Key, work_pb2.Failure]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    bytes: Counter[str] = field(default_factory=Counter)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def on_rows(self, key: Key, digest: bytes, rows: torch.Tensor) -> None:
        self.rows.append((key, digest, rows))
        self.news.set()

    def on_failed(self, key: Key, failure: work_pb2.Failure) -> None:
        self.failed.append((key, failure))
        self.news.set()

    def count_bytes(self, way: str, count: int) -> None:
        self.bytes[way] += count

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self.news.wait()
        self.news.clear()


@asynccontextmanager
async def linked(
    encoder: Encoder,
    fingerprint: EmbeddingFingerprint = FINGERPRINT,
    times: LeaseTimes | None = None,
    way: str = STREAM,
    device: str = "cpu",
) -> AsyncIterator[tuple[EmbeddingClient, Prefill, EncoderAddress, EmbeddingServer]]:
    server = EmbeddingServer(
        WriterId("e", INCARNATION),
        FINGERPRINT,
        on_ask=encoder.on_ask,
        on_taken=encoder.taken.append,
        on_lost=encoder.on_lost,
        heartbeat=encoder.beat,
        times=times,
        listeners=make_row_listeners("127.0.0.1", None),
    )
    await server.start()
    edge = make_server(internal=True)
    add_links(edge, [server.service])
    where = EncoderAddress(f"127.0.0.1:{bind(edge, '127.0.0.1', 0, False)}", INCARNATION)
    await edge.start()
    prefill = Prefill()
    client = EmbeddingClient(
        WriterId("p", 1),
        fingerprint,
        on_rows=prefill.on_rows,
        on_failed=prefill.on_failed,
        on_outcome=prefill.outcomes.append,
        on_bytes=prefill.count_bytes,
        device=device,
        times=times,
        transports=() if way == STREAM else (way,),
    )
    try:
        yield client, prefill, where, server
    finally:
        await client.close()
        await server.close()
        await edge.stop(0)


@pytest.mark.parametrize("way", WAYS)
async def test_rows_arrive_with_their_bits_by_the_way_that_was_chosen(way: str) -> None:
    encoder = Encoder()
    async with linked(encoder, way=way) as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)
        await prefill.wait()
        [(key, digest, rows)] = prefill.rows
        assert (key, digest) == (KEY, IMAGE)
        assert torch.equal(rows, ROWS)
        client.taken(where, KEY)
        await until(lambda: bool(encoder.taken))
        assert encoder.taken == [KEY]
        assert prefill.outcomes == ["fetched"]
        assert prefill.bytes == {way: ROWS.nbytes}


@pytest.mark.parametrize("way", WAYS)
async def test_a_damaged_part_is_asked_for_once_more_and_then_fails(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = iter([True])
    monkeypatch.setattr(rows_link, "failpoint", lambda name: next(damaged, False))
    encoder = Encoder()
    async with linked(encoder, way=way) as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)  # its first part is damaged; the second ask's parts are well
        await prefill.wait()
        assert torch.equal(prefill.rows[0][2], ROWS)
        assert prefill.outcomes.count("damaged") == 1
        assert prefill.outcomes.count("stale") == 1  # the rest of the first answer
        monkeypatch.setattr(rows_link, "failpoint", lambda name: True)
        client.ask(where, ("s", 1), IMAGE)
        await prefill.wait()
        [(key, failure)] = prefill.failed
        assert (key, failure.reason) == (("s", 1), work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED)
        assert len(prefill.rows) == 1


async def test_an_attempt_that_is_not_there_is_denied() -> None:
    async with linked(Encoder()) as (client, prefill, where, _):
        client.ask(where, ("unknown", 1), IMAGE)
        await prefill.wait()
        assert prefill.failed[0][1].reason == work_pb2.FAILURE_REASON_ENCODER_LOST


@pytest.mark.parametrize("how", ["silent", "another process", "another dtype", "not there"])
async def test_an_encode_worker_that_does_not_answer_is_lost(how: str) -> None:
    encoder = Encoder(answers=False)
    other = EmbeddingFingerprint("m" * 64, "llava", "bfloat16")
    async with linked(encoder, other if how == "another dtype" else FINGERPRINT, FAST) as ends:
        client, prefill, where, _ = ends
        if how == "another process":
            where = EncoderAddress(where.address, INCARNATION + 1)
        if how == "not there":
            where = EncoderAddress("127.0.0.1:1", INCARNATION)
        client.ask(where, KEY, IMAGE)
        if how == "silent":
            await asyncio.sleep(0.2)
            assert not prefill.failed
            encoder.silent = True
        await prefill.wait()
        [(key, failure)] = prefill.failed
        assert (key, failure.reason) == (KEY, work_pb2.FAILURE_REASON_ENCODER_LOST)
        if how == "another dtype":
            assert "dtype" in failure.message


@pytest.mark.parametrize("way", WAYS)
async def test_what_comes_for_a_dropped_attempt_is_stale(way: str) -> None:
    encoder = Encoder(answers=False)
    async with linked(encoder, way=way) as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)
        await until(lambda: bool(encoder.links))
        client.drop(KEY)
        for link, generation in encoder.links:
            link.send_rows(generation, IMAGE, ROWS)
        await until(lambda: "stale" in prefill.outcomes)
        assert not prefill.rows
        assert not prefill.failed


@pytest.mark.parametrize("way", WAYS)
async def test_an_image_of_more_parts_than_a_region_has_slots_arrives_beside_another(way: str) -> None:
    encoder = Encoder(answers=False)
    large = torch.arange((SLOTS + 3) * (SLOT_BYTES // 1024) * 256, dtype=torch.float32).view(-1, 256)
    async with linked(encoder, way=way) as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)
        client.ask(where, ("s", 1), IMAGE)
        await until(lambda: len(encoder.links) == 2)
        for (link, generation), rows in zip(encoder.links, (large, ROWS), strict=True):
            link.send_rows(generation, IMAGE, rows)
        await until(lambda: len(prefill.rows) == 2)
        assert torch.equal(prefill.rows[0][2], ROWS)  # they took turns
        assert torch.equal(prefill.rows[1][2], large)
        assert prefill.bytes == {way: large.nbytes + ROWS.nbytes}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
async def test_rows_of_an_encoder_on_a_gpu_reach_a_gpu(way: str) -> None:
    encoder = Encoder(answers=False)
    async with linked(encoder, way=way, device="cuda") as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)
        await until(lambda: bool(encoder.links))
        [(link, generation)] = encoder.links
        link.send_rows(generation, IMAGE, ROWS.cuda())
        await prefill.wait()
        rows = prefill.rows[0][2]
        assert rows.device.type == "cuda"
        assert torch.equal(rows.cpu(), ROWS)


@pytest.mark.parametrize("way", ["shared_memory", "tcp"])
async def test_rows_go_over_the_stream_where_the_way_cannot_be_opened(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def closed(*_: object) -> RowReceiver:
        raise TransportError("no way there")

    monkeypatch.setattr(embedding_client, "open_row_receiver", closed)
    async with linked(Encoder(), way=way) as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)
        await prefill.wait()
        assert torch.equal(prefill.rows[0][2], ROWS)
        assert prefill.bytes == {STREAM: ROWS.nbytes}


async def test_another_host_gets_rows_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_link, "host_id", lambda: "another")
    for ways, expected in ((("shared_memory",), STREAM), (("shared_memory", "tcp"), "tcp")):
        async with linked(Encoder()) as (client, prefill, where, _):
            monkeypatch.setattr(client, "_transports", ways)
            client.ask(where, KEY, IMAGE)
            await prefill.wait()
            assert prefill.bytes == {expected: ROWS.nbytes}


@pytest.mark.parametrize("end", ["encode", "prefill"])
async def test_an_attempt_is_told_when_the_data_socket_of_its_rows_breaks(end: str) -> None:
    encoder = Encoder(answers=False)
    async with linked(encoder, way="tcp") as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)
        await until(lambda: bool(encoder.links))
        if end == "encode":
            encoder.links[0][0].use(StreamSender())  # it closes the sender before
        else:
            [peer] = client._peers.values()
            assert peer.receiver is not None
            peer.receiver.close()
        await prefill.wait()
        [(key, failure)] = prefill.failed
        assert (key, failure.reason) == (KEY, work_pb2.FAILURE_REASON_ENCODER_LOST)
        await until(lambda: encoder.lost == 1)


@pytest.mark.parametrize("what", ["slot", "count"])
async def test_a_peer_that_names_no_slot_of_the_region_loses_its_link(what: str) -> None:
    encoder = Encoder(answers=False)
    async with linked(encoder, way="shared_memory") as (client, prefill, where, _):
        client.ask(where, KEY, IMAGE)
        await until(lambda: bool(encoder.links))
        if what == "slot":
            encoder.links[0][0].put(Response(part=encode_pb2.RowsPart(slot=SLOTS)))
        else:
            [peer] = client._peers.values()
            peer.send(Request(read=encode_pb2.RowsRead(parts=1)))
        await prefill.wait()
        assert prefill.failed[0][1].reason == work_pb2.FAILURE_REASON_ENCODER_LOST
