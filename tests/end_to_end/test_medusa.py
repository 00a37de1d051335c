"""Medusa heads in real processes: transformers' tokens, over both transports and through a killed worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diptych.client import AsyncClient
from tests.diptych.worker_process.test_medusa_loader import write_heads
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_draft_model import _streamed, _total

PROMPT = tuple(range(40, 70))
pytestmark = pytest.mark.timeout(900)


@pytest.mark.full  # tests/diptych/worker_process/test_medusa.py has both workers in one process
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_heads_and_trees_change_no_token_nor_does_the_death_of_a_decode_worker(
    transport: str, tmp_path: Path
) -> None:
    model = tiny_model.write(tmp_path / "tiny")
    heads = write_heads(tmp_path / "heads", model)
    flags = ("--model", str(model), "--dtype", "fp32", "--transport", transport, "--decode-workers", "2")
    with running_stack(*flags) as plain:
        expected = asyncio.run(_streamed(plain, PROMPT, kill=False))
    with running_stack(*flags, "--speculative-model", str(heads), "--speculative-tree", "3,2,1") as stack:
        assert asyncio.run(_streamed(stack, PROMPT, kill=False)) == expected
        seeded = asyncio.run(_seeded(stack.address))
        assert _total(stack, "draft") > 0
        assert asyncio.run(_streamed(stack, PROMPT, kill=True)) == expected
    with running_stack(*flags) as plain:
        assert asyncio.run(_seeded(plain.address)) == seeded


async def _seeded(address: str) -> tuple[int, ...]:
    async with AsyncClient(address) as client:
        tokens: list[int] = []
        async for chunk in client.stream(PROMPT, max_tokens=40, temperature=1.0, seed=5, timeout_s=120):
            tokens += chunk.token_ids
        return tuple(tokens)
