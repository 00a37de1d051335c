"""Scratch: its prefix cache, the report of changes to it, and what voids copies."""

from __future__ import annotations

import pytest

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.drivers.scratch import Scratch
from tests.kvtransfer.conftest import LAYOUT

BLOCK = LAYOUT.block_size
KEYS = [bytes([i]) * 16 for i in range(8)]
OTHERS = [bytes([i]) * 16 for i in range(100, 108)]


class Reported:
    def __init__(self, blocks: int = 8) -> None:
        self.keys: set[bytes] = set()
        self.pool = BlockPool(blocks)
        self.scratch = Scratch(KVMemory(LAYOUT, blocks), self.pool, self.changed)

    def changed(self, added: list[bytes], removed: list[bytes]) -> None:
        assert not self.keys.intersection(added)
        assert self.keys.issuperset(removed)
        self.keys = self.keys.union(added).difference(removed)

    def check(self) -> None:
        self.pool.invariants()
        assert self.keys == set(self.scratch.cached_keys())


@pytest.fixture
def made() -> Reported:
    return Reported()


async def test_kept_blocks_are_reported_and_found_again(made: Reported) -> None:
    blocks = await made.scratch.acquire(3 * BLOCK + 1, KEYS[:3])
    assert not made.keys
    made.scratch.release(blocks, keep=True)
    assert made.keys == set(KEYS[:3])
    again = await made.scratch.acquire(3 * BLOCK + 1, KEYS[:3])
    assert again.cached_tokens == 3 * BLOCK
    made.scratch.release(again, keep=False)
    made.check()


async def test_evicted_and_flushed_keys_are_reported(made: Reported) -> None:
    made.scratch.release(await made.scratch.acquire(6 * BLOCK, KEYS[:6]), keep=True)
    other = await made.scratch.acquire(5 * BLOCK, OTHERS[:5])
    assert made.keys == set(KEYS[:3])
    made.check()
    made.scratch.release(other, keep=True)
    assert made.scratch.flush() == 8
    assert not made.keys
    made.check()


async def test_pulled_blocks_enter_the_cache_before_the_attempt_ends(made: Reported) -> None:
    blocks = await made.scratch.acquire(4 * BLOCK, KEYS[:4])
    made.scratch.keep_pulled(blocks, 2, "decode")
    assert made.keys == set(KEYS[:2])
    made.scratch.release(blocks, keep=False)
    assert made.keys == set(KEYS[:2])
    made.check()


@pytest.mark.parametrize("how", ["flush", "distrust", "forgotten keys", "all forgotten"])
async def test_event_between_start_and_entry_voids_the_blocks(made: Reported, how: str) -> None:
    blocks = await made.scratch.acquire(4 * BLOCK, KEYS[:4])
    if how == "flush":
        made.scratch.flush()
    elif how == "distrust":
        made.scratch.invalidate(blocks)
    else:
        made.scratch.forget("decode", KEYS[:1] if how == "forgotten keys" else [])
    made.scratch.keep_pulled(blocks, 2, "decode")
    made.scratch.release(blocks, keep=True)
    assert not made.keys
    made.check()


async def test_forgotten_keys_take_along_what_continues_them(made: Reported) -> None:
    blocks = await made.scratch.acquire(4 * BLOCK, KEYS[:4])
    made.scratch.keep_pulled(blocks, 2, "decode")
    made.scratch.release(blocks, keep=True)
    made.scratch.forget("decode", KEYS[1:2])
    assert made.keys == set(KEYS[:1])
    made.check()


async def test_flush_of_a_decode_worker_takes_only_what_came_from_there(made: Reported) -> None:
    pulled = await made.scratch.acquire(2 * BLOCK, KEYS[:2])
    made.scratch.keep_pulled(pulled, 1, "decode")
    made.scratch.release(pulled, keep=True)
    made.scratch.release(await made.scratch.acquire(2 * BLOCK, OTHERS[:2]), keep=True)
    made.scratch.forget("other", [])
    assert made.keys == {*KEYS[:2], *OTHERS[:2]}
    made.scratch.forget("decode", [])
    assert made.keys == set(OTHERS[:2])
    made.check()
