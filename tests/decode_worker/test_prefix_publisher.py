"""Blocks that a sequence fills, entered into the prefix cache as they are filled."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from decode_worker.prefix_publisher import PrefixPublisher
from diptych.engine.kv.block_pool import BlockPool
from diptych.runtime.block_hash import block_keys
from diptych.worker_process.attempt import Attempt
from tests.diptych.worker_process.scripted_gateway import NAMESPACE, work

SIZE = 16


def attempt_of(prompt: Sequence[int]) -> Attempt:
    return Attempt.from_work(work(("r", 1), tuple(prompt), 100), max_context=10**6)


@pytest.mark.parametrize("prompt_tokens", [1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 3 * SIZE + 5])
def test_publish_gives_the_same_keys_however_the_tokens_are_split(prompt_tokens: int) -> None:
    prompt, output = list(range(prompt_tokens)), list(range(1000, 1000 + 5 * SIZE))
    expected = block_keys(NAMESPACE, prompt + output, SIZE)
    for stride in (1, 7, SIZE, 2 * SIZE + 1, 5 * SIZE):
        pool = BlockPool(len(expected))
        prefixes, blocks = (
            PrefixPublisher(pool, SIZE, lambda added, removed: None),
            pool.allocate(len(expected)),
        )
        attempt, keys = attempt_of(prompt), []
        for said in [*range(stride, len(output), stride), len(output)]:
            prefixes.publish(attempt, prompt_tokens + said, blocks, output_ids=output[:said], keys=keys)
        assert keys == expected == pool.cached_keys()


def test_publish_of_one_block_costs_the_same_for_long_and_short_sequences() -> None:
    """The event loop pays it for each sequence at every sixteenth token."""

    def seconds(tokens: int) -> float:
        pool = BlockPool(1)
        prefixes, attempt = (
            PrefixPublisher(pool, SIZE, lambda added, removed: None),
            attempt_of(range(tokens)),
        )
        done = tokens // SIZE
        blocks, output = [0] * done + pool.allocate(1), list(range(SIZE))
        taken = []
        for _ in range(20):
            keys = [bytes(16)] * done
            started = time.perf_counter()
            prefixes.publish(attempt, tokens + SIZE, blocks, output_ids=output, keys=keys)
            taken.append(time.perf_counter() - started)
        return min(taken)

    assert seconds(2**17) < 10 * seconds(2**7)
