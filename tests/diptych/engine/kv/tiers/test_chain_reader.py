"""Reader of a prefix: blocks of a server at a time, those of memory in turn, none after a miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from diptych.engine.kv.tiers.chain_reader import ChainReader
from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.remote import RemoteTier
from diptych.engine.kv.tiers.s3 import FAILURES, S3Place, S3Store, credentials_of
from diptych.engine.kv.tiers.stack import StoredBlock, TierStack
from diptych.worker_process import tier_loads
from tests.s3_server import ENVIRONMENT, S3Server

BLOCK = 96
FORM = EntryFormat(b"f" * 16, BLOCK)
KEYS = [bytes([number]) * 16 for number in range(1, 25)]
PARENTS = [b"", *KEYS[:-1]]
AT_ONCE = 8


def payload(key: bytes) -> bytes:
    return key * (BLOCK // 16)


class Bucket:
    """A stack of memory and a bucket that holds the whole prefix."""

    def __init__(self, server: S3Server, at_once: int = AT_ONCE) -> None:
        place = S3Place.parse(server.url, ENVIRONMENT)
        store = S3Store(place, credentials_of(ENVIRONMENT), FORM.entry_bytes, timeout_s=20.0)
        entry = FORM.entry_bytes
        self.remote = RemoteTier(store, FAILURES, FORM.fingerprint, entry, name="s3", at_once=at_once)
        self.ram = RamTier(len(KEYS) * entry)
        for key, parent in zip(KEYS, PARENTS, strict=True):
            self.remote.put(key, parent, FORM.pack(key, parent, payload(key)))
        self.stack = TierStack([self.ram, self.remote], FORM)
        self.reader = ChainReader(self.stack)

    def close(self) -> None:
        self.reader.close()
        self.stack.close()

    def read(self, first: int, count: int, seconds: float = 30.0) -> list[bytes]:
        """Return the keys of what is read, checked."""
        part = slice(first, first + count)
        found = self.reader.read(KEYS[part], PARENTS[part], time.monotonic() + seconds)
        assert [bytes(one.payload) for one in found] == [payload(one.key) for one in found]
        return [one.key for one in found]


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as made:
        yield made


def test_blocks_of_a_bucket_are_asked_for_at_a_time(server: S3Server) -> None:
    bucket = Bucket(server)
    assert bucket.reader.at_once(KEYS[0]) == AT_ONCE
    server.together = threading.Barrier(AT_ONCE)
    assert bucket.read(0, AT_ONCE) == KEYS[:AT_ONCE]
    assert bucket.read(AT_ONCE, 2 * AT_ONCE) == KEYS[AT_ONCE:]
    assert [bucket.ram.parent_of(key) for key in KEYS] == PARENTS, "they moved up, each after its parent"
    assert bucket.ram._order._uses[KEYS[-1]].depth == len(KEYS)
    server.together = None
    asked = len(server.requests)
    assert bucket.reader.at_once(KEYS[0]) == 1
    assert bucket.read(0, len(KEYS)) == KEYS
    assert len(server.requests) == asked, "memory has them"
    bucket.close()


def test_control_one_at_a_time_never_meets(server: S3Server) -> None:
    bucket = Bucket(server, at_once=1)
    server.together = threading.Barrier(2)
    threading.Timer(0.2, server.together.abort).start()
    assert bucket.read(0, 4) == []
    bucket.close()


def test_missing_block_ends_what_is_read(server: S3Server) -> None:
    bucket = Bucket(server)
    lost = next(name for name in server.objects if f":{KEYS[3].hex()}:" in name)
    spoilt = next(name for name in server.objects if f":{KEYS[12].hex()}:" in name)
    del server.objects[lost]
    server.objects[spoilt] = server.objects[spoilt][:-1] + b"\xff"
    assert bucket.read(0, AT_ONCE) == KEYS[:3]
    assert bucket.read(9, AT_ONCE) == KEYS[9:12]
    assert (bucket.stack.damaged, spoilt in server.objects, bucket.reader.late) == (1, False, False)
    bucket.close()


def test_what_came_before_the_time_is_taken_and_the_rest_is_late(server: S3Server) -> None:
    bucket = Bucket(server)
    assert bucket.read(0, 4) == KEYS[:4]
    bucket.ram.forget(KEYS[2:])
    server.freeze()
    assert bucket.read(0, 4, seconds=0.05) == KEYS[:2], "memory has these"
    assert bucket.reader.late
    server.thaw()
    deadline = time.monotonic() + 30
    while bucket.reader.late:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert bucket.read(0, 4) == KEYS[:4]
    bucket.close()


@pytest.mark.asyncio
async def test_load_asks_a_bucket_for_more_than_a_batch_at_a_time(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "LOAD_S", 30.0)
    bucket = Bucket(server, at_once=len(KEYS))
    assert len(KEYS) > tier_loads.BATCH
    loads, taken = tier_loads.TierLoads(16, bucket.stack), list[bytes]()
    server.together = threading.Barrier(len(KEYS))

    async def take(place: int, batch: Sequence[StoredBlock], fresh: Callable[[], bool]) -> int:
        assert (place, fresh()) == (len(taken), True)
        taken.extend(one.key for one in batch)
        return len(batch)

    loaded = await loads.load(KEYS, 0, take)
    assert (loaded.blocks, taken) == ({"s3": len(KEYS)}, KEYS)
    loads.close()
    bucket.close()
