"""KV tiers beside workers of several processes: whole blocks, which any degree with the same parts finds.

In test_tensor_parallel.py and test_own_memories.py the next life of a small group finds its blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import reference, tiny_model
from tests.end_to_end.group_tiers import (
    LOADED,
    completions,
    end_rank,
    tier_blocks,
    tiered,
    tokens_of,
    wait_stored,
)
from tests.end_to_end.rank_processes import Degrees, alone
from tests.end_to_end.stack import Stack

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
"""Heads that two ranks divide unevenly."""
TOKENS = 24
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((70, 100))]
STORED = sum((len(prompt) + TOKENS - 1) // 16 for prompt in PROMPTS)
TWO: Degrees = {"tensor-parallel": 2}
ONE: Degrees = {"sum-parts": 2}
"""One process with the parts of two ranks."""


def test_groups_that_lost_a_rank_find_their_blocks_in_the_tier(tmp_path: Path) -> None:
    """Both workers end with a rank, and both load what their former lives stored: blocks are copied here."""
    model, folder = tiny_model.write(tmp_path, **ODD), tmp_path / "kv"
    expected = alone(model, 2, PROMPTS, TOKENS)
    with tiered(model, folder, TWO, TWO, "tcp") as stack:
        first = completions(stack, PROMPTS, TOKENS)
        assert tokens_of(first) == expected
        assert tier_blocks(first) == [0, 0]
        wait_stored(folder, STORED)
        for role in ("prefill", "decode"):
            end_rank(stack, role)
        again = completions(stack, PROMPTS, TOKENS)
        assert tokens_of(again) == expected
        assert min(tier_blocks(again)) > 0
        for role in ("prefill", "decode"):
            assert stack.metric(role, LOADED) > 0


OWN: Degrees = {**TWO, "own-memories": True}
"""Two ranks that hold their share of each block and no more, as on GPUs."""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_with_memories_of_their_own_find_their_blocks_in_the_tier(
    tmp_path: Path, transport: str
) -> None:
    """In place the prefill worker's ranks read what the decode worker has loaded."""
    model, folder = tiny_model.write(tmp_path, **ODD), tmp_path / "kv"
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    with tiered(model, folder, OWN, OWN, transport, backend="torch") as stack:
        assert tokens_of(completions(stack, PROMPTS, TOKENS)) == expected
        wait_stored(folder, STORED)
        for role in ("prefill", "decode"):
            end_rank(stack, role)
        again = completions(stack, PROMPTS, TOKENS)
        assert tokens_of(again) == expected
        assert min(tier_blocks(again)) > 0
        assert stack.metric("decode", LOADED) > 0
        if transport == "tcp":
            assert stack.metric("prefill", LOADED) > 0


def check_found(stack: Stack, folder: Path, expected: list[list[int]], *, hits: bool) -> None:
    """Compare answers, say whether the tier had blocks of every prompt, and wait until it has all."""
    found = completions(stack, PROMPTS, TOKENS)
    assert tokens_of(found) == expected
    assert all(tier_blocks(found)) == hits
    wait_stored(folder, STORED)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_with_memories_of_their_own_and_others_share_blocks(tmp_path: Path, transport: str) -> None:
    """Ranks that map one memory, one process, and stages find the same files; other parts do not."""
    model, folder = tiny_model.write(tmp_path, **ODD), tmp_path / "kv"
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    stages: Degrees = {**ONE, "pipeline-parallel": 2, "own-memories": True}
    pairs = ((OWN, OWN), (TWO, TWO), (OWN, ONE), (ONE, OWN), (stages, OWN), (OWN, stages))
    for number, (prefill, decode) in enumerate(pairs):
        either = "tcp" if {"own-memories"} & {*prefill, *decode} else transport
        with tiered(model, folder, prefill, decode, either, backend="torch") as stack:
            check_found(stack, folder, expected, hits=number > 0)
    assert len(list(folder.rglob("*.kv"))) == STORED


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_other_degrees_find_the_blocks_and_other_parts_do_not(
    tmp_path: Path, transport: str, backend: str
) -> None:
    model, folder = tiny_model.write(tmp_path, **ODD), tmp_path / "kv"
    expected = alone(model, 2, PROMPTS, TOKENS, backend=backend)
    for number, (prefill, decode) in enumerate(((TWO, ONE), (ONE, TWO), (TWO, TWO), (ONE, ONE))):
        with tiered(model, folder, prefill, decode, transport, backend=backend) as stack:
            check_found(stack, folder, expected, hits=number > 0)
    (only,) = [path for path in folder.iterdir() if path.is_dir()]
    assert len(list(only.iterdir())) == STORED, "the degrees store the same blocks"
    others = alone(model, 1, PROMPTS, TOKENS, backend=backend)
    with tiered(model, folder, {}, {}, transport, backend=backend) as stack:
        strangers = completions(stack, PROMPTS, TOKENS)
        assert tokens_of(strangers) == others
        assert tier_blocks(strangers) == [0, 0]
        assert [one.usage.cached_prompt_tokens for one in strangers if one.usage is not None] == [0, 0]


@pytest.mark.parametrize("degrees", [{"pipeline-parallel": 2}, {**TWO, "pipeline-parallel": 2}], ids=str)
def test_stages_and_one_process_find_one_anothers_blocks(tmp_path: Path, degrees: dict[str, Any]) -> None:
    model, folder = tiny_model.write(tmp_path, **ODD), tmp_path / "kv"
    parts = degrees.get("tensor-parallel", 1)
    expected = alone(model, parts, PROMPTS, TOKENS)
    one: Degrees = {"sum-parts": parts}
    for number, (prefill, decode) in enumerate(((degrees, degrees), (one, one), (degrees, degrees))):
        with tiered(model, folder, prefill, decode, "shared_memory") as stack:
            check_found(stack, folder, expected, hits=number > 0)


def test_the_bundled_model_finds_blocks_of_another_degree(tmp_path: Path) -> None:
    """Nine query heads, three KV heads."""
    model, folder = reference.model_file(), tmp_path / "kv"
    prompts = [list(reference.prompts()[index]) for index in (12, 21)]
    expected = alone(model, 2, prompts, TOKENS)
    stored = sum((len(prompt) + TOKENS - 1) // 16 for prompt in prompts)
    for number, (prefill, decode) in enumerate(((TWO, TWO), (ONE, ONE), (TWO, TWO))):
        with tiered(model, folder, prefill, decode, "tcp") as stack:
            found = completions(stack, prompts, TOKENS)
            assert tokens_of(found) == expected
            assert any(tier_blocks(found)) == (number > 0)
            wait_stored(folder, stored)


def test_a_draft_models_segment_comes_back_with_each_block(tmp_path: Path) -> None:
    """It lies behind rank 0's share. The model drafts for itself: most drafts are right where it came."""
    model, folder = tiny_model.write(tmp_path, **ODD), tmp_path / "kv"
    expected = alone(model, 2, PROMPTS, TOKENS, backend="torch")
    drafting: Degrees = {**OWN, "speculative-model": str(model)}
    decode: Degrees = {**drafting, "speculative-tokens": 3}
    with tiered(model, folder, drafting, decode, "auto", backend="torch") as stack:
        assert tokens_of(completions(stack, PROMPTS, TOKENS)) == expected
        wait_stored(folder, STORED)
        for role in ("prefill", "decode"):
            end_rank(stack, role)
        again = completions(stack, PROMPTS, TOKENS)
        assert tokens_of(again) == expected
        assert min(tier_blocks(again)) > 0
        drafted, accepted = (
            stack.metric("decode", f"diptych_spec_decode_{name}_tokens_total")
            for name in ("draft", "accepted")
        )
        assert drafted / 2 < accepted <= drafted


def test_ranks_on_the_triton_step_find_their_blocks(tmp_path: Path) -> None:
    """Ranks compute as on GPUs, with the kernels in Triton's interpreter."""
    model, folder = tiny_model.write(tmp_path, max_position_embeddings=128), tmp_path / "kv"
    prompts = [tiny_model.prompt(1, 60)]
    expected = alone(model, 2, prompts, 8, backend="torch")
    with tiered(model, folder, OWN, OWN, "tcp", backend="triton") as stack:
        assert tokens_of(completions(stack, prompts, 8)) == expected
        wait_stored(folder, 4)
        end_rank(stack, "decode")
        again = completions(stack, prompts, 8)
        assert tokens_of(again) == expected
        assert min(tier_blocks(again)) > 0
