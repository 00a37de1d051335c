"""Reader of KV events as others have it: vLLM's classes for msgspec, and a subscriber that follows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import zmq


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Reader:
    """A router's index: the token prefixes that a worker holds, by medium, built from its events alone."""

    def __init__(self, address: str, *, topic: str = "", password: str = "", timeout_s: float = 30.0) -> None:
        self._context = zmq.Context()
        self._password = password
        self._socket = self._connect(zmq.SUB, address)
        self._socket.subscribe(topic)
        self._timeout_s = timeout_s
        self.numbers: list[int] = []
        self.batches: list[KVEventBatch] = []
        self.chains: dict[int | bytes, tuple[int, ...]] = {}
        self.media: dict[str, set[int | bytes]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def _connect(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        if self._password:
            socket.plain_username, socket.plain_password = b"diptych", self._password.encode()
        socket.connect(address)
        return socket

    def read(self, within_s: float = 0.05) -> bool:
        """Take one batch; False if none comes in time."""
        if not self._socket.poll(int(within_s * 1000)):
            return False
        _, number, batch = self._socket.recv_multipart()
        self.take(int.from_bytes(number, "big"), batch)
        return True

    def until(self, true: Callable[[], bool]) -> None:
        """Read until something holds."""
        deadline = time.monotonic() + self._timeout_s
        while not true():
            assert time.monotonic() < deadline, f"{len(self.batches)} batches did not show it"
            self.read()

    def replay(self, address: str, first: int) -> None:
        """Take again what was sent since the batch `first`."""
        patience_ms = int(self._timeout_s * 1000)
        with self._connect(zmq.DEALER, address) as socket:
            # One that was refused already has nowhere to send to, and would wait for ever.
            assert socket.poll(patience_ms, zmq.POLLOUT), "no replay"
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                assert socket.poll(patience_ms), "no replay"
                _, number, batch = socket.recv_multipart()
                if number == (-1).to_bytes(8, "big", signed=True):
                    return
                self.take(int.from_bytes(number, "big"), batch)

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch."""
        self.numbers.append(number)
        batch = DECODER.decode(payload)
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self.media.setdefault(event.medium or "", set()).difference_update(event.block_hashes)
            else:
                self.media.clear()

    def _store(self, event: BlockStored) -> None:
        before = () if event.parent_block_hash is None else self.chains[event.parent_block_hash]
        for place, one in enumerate(event.block_hashes):
            before += tuple(event.token_ids[place * event.block_size : (place + 1) * event.block_size])
            self.chains[one] = before
        self.media.setdefault(event.medium or "", set()).update(event.block_hashes)

    def held(self, tokens: tuple[int, ...], medium: str = "GPU") -> int:
        """Return the tokens of the longest prefix of `tokens` that is held in a medium."""
        prefixes = (self.chains[one] for one in self.media.get(medium, ()))
        return max((len(one) for one in prefixes if tokens[: len(one)] == one), default=0)
