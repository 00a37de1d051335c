"""Blocks that hold something wrong: once a row has failed over them nobody reads them again."""

from __future__ import annotations

import pytest

from tests.kvtransfer.conftest import until
from tests.worker.asker import Gateway, work
from tests.worker.house import BLOCK, greedy, house

NAN = float("nan")


@pytest.mark.parametrize("prompt_tokens", [BLOCK - 1, BLOCK, 3 * BLOCK + 1])
async def test_what_decoding_wrote_is_forgotten_with_the_row_that_failed(prompt_tokens):
    """A prompt that fills no block has no key: its first block has one since there is output in it."""
    prompt = tuple(range(7, 7 + prompt_tokens))
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("bad", 1), prompt, 200))
        await until(lambda: decode.loop.steps > 3 * BLOCK)
        assert decode.pool.cached() > prompt_tokens // BLOCK
        decode.memory.data.fill_(NAN)
        await heard.ended.wait()
        assert heard.last_words == ["decode FAILURE_REASON_ROW_FAILED"]
        assert await made.empty() == []
        assert decode.pool.cached() == 0
        decode.memory.data.zero_()  # new blocks are written before they are read
        said = greedy(prompt, 20)
        other = gateway.start(decode, prefill, work(("other", 1), prompt + said[:9], 11))
        await other.ended.wait()
        assert tuple(other.tokens) == said[9:]
        await gateway.close()
