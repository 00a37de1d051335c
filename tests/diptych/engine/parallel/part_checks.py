"""Checks of a model in parts, whichever backend computes them: each is called with the ranks of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import Part
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.thread_ranks import Ranks, ThreadGroup, go_on, whole

EXACT = 1e-4
"""Largest difference of a logit in float32."""
TEXT, GREEDY = 70, 12
Made = Callable[[int, int], Ranks]
"""Maker of the ranks of one model, for a number of parts and of ranks."""


def check_family(
    case: str,
    folder: Path,
    made: Callable[[OpenCheckpoint, int, int], Ranks],
    lacks: Callable[[ModelShape], str | None] = lambda shape: None,
) -> None:
    """Compare the parts of a family's model, written to `folder`, with the whole and every degree's bits.

    The test is skipped where `lacks` says why the backend does not compute the model.
    """
    opened, text = open_checkpoint(save(oracle_of(config_of(case)), folder), "fp32"), text_of(TEXT)
    if (why := lacks(opened.shape)) is not None:
        pytest.skip(f"torch computes it: {why}")
    check_degrees(opened, text, lambda parts, ranks: made(opened, parts, ranks))


def check_degrees(opened: OpenCheckpoint, text: Sequence[int], made: Made) -> None:
    """Compare the logits of parts with the whole's, within EXACT, and the bits of every degree.

    Two parts (3 KV heads: uneven), and six, two to a KV head where there are so many query heads.
    """
    expected = whole(opened, text)
    more = (6, (1, 2, 3, 6)) if opened.shape.num_heads >= 6 else (3, (1, 3))
    for parts, degrees in ((2, (1, 2)), more):
        found = {}
        for count in degrees:
            ranks = made(parts, count)
            memory = ranks.memory()
            found[count] = (ranks.step(memory, 0, text, len(text)), memory.data.clone())
        logits, kept = found[1]
        assert (logits - expected).abs().max() < EXACT
        for count in degrees[1:]:
            assert torch.equal(found[count][0], logits), (parts, count)
            assert torch.equal(found[count][1], kept), (parts, count)


def check_other_degree(made: Made, kept: KVMemory, prefill: int, decode: int) -> None:
    """Compare `decode` ranks that go on from the blocks of `prefill` with one rank, whose blocks are `kept`:
    the bits of blocks, tokens and logits, of six parts.
    """
    text, alone = text_of(TEXT), made(6, 1)
    alone.step(kept, 0, text[:-1])
    pool = KVMemory(kept.layout, kept.num_blocks)
    made(6, prefill).step(pool, 0, text[:-1])
    assert torch.equal(pool.data, kept.data)
    expected = go_on(alone, kept, text, GREEDY)
    found = go_on(made(6, decode), pool, text, GREEDY)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def check_own_heads(parts: Sequence[Part], own: Sequence[KVMemory], pool: KVMemory) -> None:
    """Compare what ranks wrote, each in a memory of its `own`, with the common pool, cut by index: the heads
    of their `parts` of every block, and no others.
    """
    each = len(parts) // len(own)
    for rank, memory in enumerate(own):
        held = parts[rank * each : (rank + 1) * each]
        heads = slice(held[0].kv_heads.start, held[-1].kv_heads.stop)
        assert torch.equal(memory.data[:, :, :, heads], pool.data[:, :, :, heads])
        rest = [head for head in range(pool.layout.num_kv_heads) if not heads.start <= head < heads.stop]
        assert not memory.data[:, :, :, rest].any()


def next_heads(right: Sequence[Part]) -> list[Part]:
    """Return parts that read the KV heads of the part after them."""
    return [replace(part, kv_heads=right[(at + 1) % len(right)].kv_heads) for at, part in enumerate(right)]


def check_next_heads(made: Made, shifted: Ranks) -> None:
    """Compare three ranks that read the next KV head of the blocks, `shifted`, with one rank of three parts:
    other logits and other tokens.
    """
    text = text_of(TEXT)
    filled = made(3, 3)
    pool = filled.memory()
    filled.step(pool, 0, text[:-1])
    expected = go_on(made(3, 1), pool, text, GREEDY)
    found = go_on(shifted, pool, text, GREEDY)
    assert found[0] != expected[0]
    assert (found[1] - expected[1]).abs().max() > 1e-2


def stopped(group: ThreadGroup) -> KVMemory:
    """Compute a step that rank 0 alone knows to be aborted from its begin; return what it wrote in blocks.

    Its logits have to be no numbers.
    """
    memory, words = group.memory(), AbortWords(1)
    words.abort(0)
    steps = [SequenceStep(memory, range(8), 0, text_of(20), True)]
    every: list[AbortWords | None] = [words, *[None] * (len(group.backends) - 1)]
    with ThreadPoolExecutor(len(every)) as threads:
        logits = list(threads.map(lambda b, w: b.forward(steps, w), group.backends, every))
    assert logits[0].isnan().all()
    return memory


def check_layers(memory: KVMemory, written: int) -> None:
    """Check that the first `written` layers were computed, and no other one."""
    assert memory.data[:, :written].flatten(2).any(dim=2).any(dim=0).all()
    assert not memory.data[:, written:].any()


def check_other_sums(first: Ranks, second: Ranks) -> None:
    """Compare the logits of ranks that add in different orders: within EXACT, of other bits."""
    text = text_of(TEXT)
    one, other = (ranks.step(ranks.memory(), 0, text) for ranks in (first, second))
    assert (one - other).abs().max() < EXACT
    assert not torch.equal(one, other)
