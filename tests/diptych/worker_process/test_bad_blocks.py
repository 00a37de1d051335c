"""Blocks with wrong contents: once a row has failed over them no request reads them again."""

from __future__ import annotations

import pytest

from tests.diptych.worker_process.both_workers import BLOCK, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

NAN = float("nan")


@pytest.mark.parametrize("prompt_tokens", [BLOCK - 1, BLOCK, 3 * BLOCK + 1])
async def test_a_failed_row_removes_its_output_from_the_prefix_cache(prompt_tokens):
    """A prompt that fills no block has no key: its first block has one since there is output in it."""
    prompt = tuple(range(7, 7 + prompt_tokens))
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("bad", 1), prompt, 200))
        await until(lambda: decode.loop.steps > 3 * BLOCK)
        assert decode.pool.cached() > prompt_tokens // BLOCK
        decode.memory.data.fill_(NAN)
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode FAILURE_REASON_COMPUTE_FAILED"]
        assert await made.empty() == []
        assert decode.pool.cached() == 0
        decode.memory.data.zero_()  # new blocks are written before they are read
        said = greedy(prompt, 20)
        other = gateway.start(decode, prefill, work(("other", 1), prompt + said[:9], 11))
        await other.ended.wait()
        assert tuple(other.tokens) == said[9:]
        await gateway.close()


async def test_a_copying_prefill_worker_forgets_the_blocks_of_a_failed_row():
    prompt = tuple(range(20))
    async with house("tcp", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills

        async def ask(name: str) -> list[int] | list[str]:
            heard = gateway.start(decode, prefill, work((name, 1), prompt, 3))
            await heard.ended.wait()
            assert await made.empty() == []
            return heard.tokens or heard.terminal_messages[:1]

        assert await ask("first") == list(greedy(prompt, 3))
        decode.loop.flush_prefix_cache()
        prefill.scratch_memory.data.fill_(NAN)
        assert await ask("second") == ["prefill FAILURE_REASON_COMPUTE_FAILED"]
        prefill.scratch_memory.data.zero_()
        assert prefill.scratch.cached() == 0
        assert await ask("third") == list(greedy(prompt, 3))
        await gateway.close()
