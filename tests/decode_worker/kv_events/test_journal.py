"""Events of a pool's changes: a reader that follows them knows what the pool and the tiers hold."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_worker.kv_events import journal as journal_module
from decode_worker.kv_events.events import pack_batch
from decode_worker.kv_events.journal import Journal
from decode_worker.prefix_publisher import PrefixPublisher
from diptych.engine.kv.block_pool import BlockPool
from diptych.runtime.block_hash import block_keys
from diptych.runtime.image_rows import ImageRows

pytest.importorskip("msgspec", reason="the extra `dev` has it")
pytest.importorskip("zmq", reason="the extra `dev` has it")
from tests.decode_worker.kv_events.vllm_reader import DECODER, BlockStored, Reader

SIZE, BLOCKS = 4, 12
NAMESPACE = bytes(32)


def attempt(tokens: list[int], adapter: bytes = b"", images: tuple[ImageRows, ...] = ()) -> Any:
    return SimpleNamespace(
        cache_write=True,
        prompt_ids=tokens,
        delivered_ids=[],
        cache_namespace=NAMESPACE,
        images=images,
        adapter=adapter,
    )


class Worker:
    """A pool whose changes are told to a reader, and tiers that take what leaves it."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS)
        self.tiers: set[bytes] = set()
        self.reader = Reader.__new__(Reader)
        self.reader.numbers, self.reader.batches = [], []
        self.reader.chains, self.reader.media = {}, {}
        self.journal = Journal(self._publish, SIZE)
        self.publisher = PrefixPublisher(self.pool, SIZE, self._changed)
        self.publisher.journal = self.journal

    def _publish(self, events: list[Any]) -> None:
        self.reader.take(len(self.reader.numbers), pack_batch(1.5, events, 0))

    def _changed(self, added: list[bytes], removed: list[bytes]) -> None:
        tiered = [key for key in removed if key in self.tiers]
        self.journal.changed(added, removed, tiered)

    def compute(self, tokens: list[int], **more: Any) -> None:
        one = attempt(tokens, **more)
        keys = block_keys(NAMESPACE, tokens, SIZE)
        blocks = self.pool.acquire_prefix(keys)
        blocks += self.pool.allocate(len(keys) - len(blocks))
        self.publisher.publish(one, len(tokens), blocks)
        self.pool.release(blocks)
        self.publisher.report_changes()

    def hashes(self) -> set[int]:
        return {int.from_bytes(key[-8:], "big") for key in self.pool.cached_keys()}


def test_reader_knows_the_prefixes_that_the_pool_holds_at_every_moment() -> None:
    worker, rng = Worker(), random.Random(5)
    prompts = [[rng.randrange(50) for _ in range(3 * SIZE)] for _ in range(4)]
    for _ in range(200):
        prompt = rng.choice(prompts)[: SIZE * rng.randint(1, 3)]
        worker.compute(prompt + [rng.randrange(50) for _ in range(SIZE * rng.randint(0, 2))])
        assert worker.reader.media["GPU"] == worker.hashes()
        if rng.random() < 0.1:
            worker.pool.clear_cache()
            worker.publisher.report_changes()
            assert worker.reader.media["GPU"] == set()
    worker.compute(prompts[0])
    assert worker.reader.held(tuple(prompts[0])) == len(prompts[0])


def test_chain_is_one_event_and_a_branch_names_its_parent() -> None:
    worker = Worker()
    worker.compute(list(range(12)))
    worker.compute([*range(8), 30, 31, 32, 33])
    first, second = (batch.events for batch in worker.reader.batches)
    assert [len(one.block_hashes) for one in cast("list[BlockStored]", first)] == [3]
    (branch,) = cast("list[BlockStored]", second)
    assert branch.parent_block_hash == cast("BlockStored", first[0]).block_hashes[1]
    assert (branch.token_ids, branch.block_size, branch.lora_name) == ([30, 31, 32, 33], SIZE, None)


def test_adapter_is_named_and_prompts_with_images_are_left_out() -> None:
    worker = Worker()
    worker.compute(list(range(8)), adapter=b"\xab" * 32)
    (event,) = cast("list[BlockStored]", worker.reader.batches[0].events)
    assert event.lora_name == "ab" * 32
    worker.compute(list(range(20, 28)), images=(ImageRows(0, 4, bytes(32)),))
    assert len(worker.reader.batches) == 1


def test_block_that_leaves_for_a_tier_changes_its_medium_and_comes_back() -> None:
    worker = Worker()
    prompt = list(range(8))
    keys = block_keys(NAMESPACE, prompt, SIZE)
    worker.compute(prompt)
    worker.tiers.update(keys)
    worker.compute(list(range(20, 20 + SIZE * BLOCKS)))
    assert worker.reader.held(tuple(prompt)) == 0
    assert worker.reader.held(tuple(prompt), "CPU") == 8
    (block,) = worker.pool.allocate(1)
    worker.journal.expect(keys, prompt, attempt(prompt))
    worker.pool.insert(block, keys[0], b"")
    worker.pool.release([block])
    worker.publisher.report_changes()
    assert worker.reader.held(tuple(prompt)) == SIZE
    assert len(worker.reader.media["CPU"]) == 1
    worker.journal.left_tiers([keys[1], b"x" * 16])
    assert worker.reader.media["CPU"] == set()


def test_expected_blocks_that_never_come_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_EXPECTED", 10)
    worker = Worker()
    for start in range(0, 400, SIZE):
        tokens = list(range(start, start + SIZE))
        worker.journal.expect(block_keys(NAMESPACE, tokens, SIZE), tokens, attempt(tokens))
    assert len(worker.journal._expected) == 10
    assert DECODER is not None
