"""The encode loop: what is encoded, for which asks, and what is left after every kind of end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.image_spec import ImageSpec
from diptych.runtime.image_rows import keyed_digest, pixels_digest
from diptych.worker.v1 import encode_pb2, work_pb2
from kvtransfer.drivers.rows_link import RowsLink
from kvtransfer.protocol.messages import Key
from prefill_worker.encoder import engine_loop
from prefill_worker.encoder.engine import LoadedEncoder
from prefill_worker.encoder.engine_loop import EncodeLoop
from prefill_worker.encoder.gateway_stream import EncodeGatewayStream
from prefill_worker.image_store import ImageStore
from tests.diptych.runtime.eventually import eventually

NAMESPACE = bytes(range(32))
SHAPE = (2, 3, 4, 4)
HALF = (0.5, 0.5, 0.5)
SPEC = ImageSpec("llava", (4, 4), 5, "<image>", 1, 3, 1 / 255, HALF, HALF)


@dataclass
class Engine:
    """Stands in for the loaded encoder; some tiles cannot be encoded."""

    tiles: list[int] = field(default_factory=list)
    spec: ImageSpec = SPEC

    @property
    def encoder(self) -> Engine:
        return self

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        first = int(tile.flatten()[0])
        if first >= 200:
            raise RuntimeError("not this one")
        self.tiles.append(first)
        return torch.full((5, 2), float(first))


@dataclass
class Reader(RowsLink):
    """A prefill worker's link that keeps what is sent."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    denied: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = object.__hash__

    def send_rows(self, generation: int, digest: bytes, rows: torch.Tensor) -> None:
        self.rows[generation] = rows

    def deny(self, generation: int) -> None:
        self.denied.append(generation)


class Gateway(EncodeGatewayStream):
    """A gateway's stream that keeps the ends of attempts."""

    def __init__(self) -> None:
        super().__init__("g")
        self.ends: list[tuple[Key, str]] = []

    def delivered(self, key: Key) -> None:
        self.ends.append((key, "delivered"))

    def failed(self, key: Key, failure: work_pb2.Failure) -> None:
        self.ends.append((key, work_pb2.FailureReason.Name(failure.reason)))


@dataclass
class Worker:
    loop: EncodeLoop
    engine: Engine
    gateway: Gateway = field(default_factory=Gateway)
    reader: Reader = field(default_factory=Reader)
    outcomes: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def digest(self, seed: int) -> bytes:
        return keyed_digest(NAMESPACE, pixels_digest(SHAPE, self.pixels(seed)))

    @staticmethod
    def pixels(seed: int) -> bytes:
        return bytes([seed] * 48 + [seed + 1] * 48)

    def send(self, key: Key, *seeds: int, rows: int = 10) -> None:
        """Send an attempt with an image for each seed, as a gateway does."""
        name = work_pb2.AttemptId(request_id=key[0], attempt=key[1])
        encode = encode_pb2.Encode(id=name, cache_namespace=NAMESPACE)
        for number, seed in enumerate(seeds):
            digest = self.digest(seed)
            part = work_pb2.ImagePart(id=name, digest=digest, shape=SHAPE, data=self.pixels(seed))
            self.loop.receive_image(part, self.gateway)
            encode.images.add(first_position=20 * number, rows=rows, digest=digest)
        self.loop.encode(encode, self.gateway)

    def ask(self, key: Key, seed: int, generation: int) -> None:
        self.loop.ask(self.reader, key, self.digest(seed), generation)

    @property
    def empty(self) -> bool:
        loop = self.loop
        return not (loop.num_running + loop.num_waiting or self.gateway.keys or loop._store.num_bytes)


@asynccontextmanager
async def running(cache_bytes: int = 1 << 20) -> AsyncIterator[Worker]:
    engine = Engine()
    loop = EncodeLoop(
        cast(LoadedEncoder, engine),
        ImageStore(1 << 20),
        EmbeddingCache(cache_bytes),
        on_ended=lambda request, outcome: worker.outcomes.append(outcome),
        on_image=lambda outcome: worker.images.append(outcome),
    )
    worker = Worker(loop, engine)
    task = asyncio.create_task(loop.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop.close()


async def test_nothing_is_encoded_before_it_is_asked_for() -> None:
    async with running() as worker:
        worker.send(("r", 1), 10, 20)
        await asyncio.sleep(0.05)
        assert worker.engine.tiles == []
        assert worker.loop.waiting_rows == 20
        worker.ask(("r", 1), 20, 1)
        await eventually(lambda: 1 in worker.reader.rows)
        assert worker.engine.tiles == [20, 21]
        assert worker.reader.rows[1][:, 0].tolist() == [20.0] * 5 + [21.0] * 5
        assert worker.loop.waiting_rows == 10
        worker.loop.taken(("r", 1))
        assert worker.gateway.ends == [(("r", 1), "delivered")]
        assert worker.empty
        assert worker.outcomes == ["delivered"]


async def test_an_image_that_was_encoded_is_sent_again_without_encoding() -> None:
    async with running() as worker:
        for attempt in (1, 2):
            worker.send(("r", attempt), 10)
            worker.ask(("r", attempt), 10, attempt)
            await eventually(lambda number=attempt: number in worker.reader.rows)
            worker.loop.taken(("r", attempt))
        assert worker.engine.tiles == [10, 11]
        assert worker.images == ["encoded", "cached"]
        assert torch.equal(worker.reader.rows[1], worker.reader.rows[2])
        assert worker.loop.flush() == 1
        assert worker.loop.cached_bytes == 0
        worker.send(("r", 3), 10)
        worker.ask(("r", 3), 10, 3)
        await eventually(lambda: 3 in worker.reader.rows)
        assert worker.engine.tiles == [10, 11, 10, 11]


async def test_an_ask_that_comes_before_its_attempt_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as worker:
        worker.ask(("r", 1), 10, 1)
        worker.send(("r", 1), 10)
        await eventually(lambda: 1 in worker.reader.rows)
        monkeypatch.setattr(engine_loop, "EARLY_ASK_S", 0.0)
        worker.ask(("never", 1), 10, 2)
        worker.loop.tick(float("inf"))
        assert worker.reader.denied == [2]
        worker.ask(("r", 1), 99, 3)  # an image that the attempt does not have
        assert worker.reader.denied == [2, 3]


async def test_an_image_that_cannot_be_encoded_fails_its_attempt_alone() -> None:
    async with running() as worker:
        worker.send(("bad", 1), 200)
        worker.send(("good", 1), 10)
        worker.ask(("bad", 1), 200, 1)
        worker.ask(("good", 1), 10, 2)
        await eventually(lambda: 2 in worker.reader.rows)
        assert worker.gateway.ends == [(("bad", 1), "FAILURE_REASON_COMPUTE_FAILED")]
        assert 1 not in worker.reader.rows
        worker.loop.taken(("good", 1))
        assert worker.empty


async def test_what_ends_leaves_nothing() -> None:
    async with running() as worker:
        worker.send(("cancelled", 1), 10)
        worker.ask(("cancelled", 1), 10, 1)
        worker.loop.cancel(("cancelled", 1))
        worker.send(("lost", 1), 20)
        worker.loop.gateway_lost(worker.gateway)
        assert worker.gateway.ends == []
        assert worker.outcomes == ["cancelled", "cancelled"]
        assert worker.empty
        gateway = worker.gateway = Gateway()
        worker.send(("handed back", 1), 30)
        worker.loop.draining = True
        worker.send(("too late", 1), 40)
        worker.loop.hand_back()
        assert [end for _, end in gateway.ends] == ["FAILURE_REASON_DRAINING"] * 2
        worker.ask(("too late", 1), 40, 9)
        assert worker.reader.denied == [9]
        assert worker.empty


async def test_images_that_did_not_come_whole_fail_their_attempt() -> None:
    async with running() as worker:
        worker.send(("r", 1), 10, rows=11)
        assert worker.gateway.ends == [(("r", 1), "FAILURE_REASON_COMPUTE_FAILED")]
        assert worker.empty


async def test_asks_of_a_reader_that_is_gone_are_forgotten() -> None:
    async with running() as worker:
        worker.send(("r", 1), 10)
        worker.ask(("r", 1), 10, 1)
        gone, worker.reader = worker.reader, Reader()
        worker.loop.reader_lost(gone)
        assert worker.loop.num_running == 0
        worker.ask(("r", 1), 10, 2)
        await eventually(lambda: 2 in worker.reader.rows)
        assert 1 not in gone.rows
