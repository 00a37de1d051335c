"""Consent to the prefix cache holds for the prefill worker's own cache too."""

from __future__ import annotations

import pytest

from tests.diptych.worker_process.both_workers import house
from tests.diptych.worker_process.scripted_gateway import Gateway, work

PROMPT = tuple(range(20))


@pytest.mark.parametrize("write", [True, False])
async def test_blocks_that_must_not_be_cached_are_cached_nowhere(write):
    async with house("tcp", blocks=64) as made:
        gateway, decode, prefill = Gateway(made), made.decodes[0], made.prefills[0]
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 3, cache_write=write))
        await heard.ended.wait()
        assert await made.empty() == []
        assert (prefill.scratch.cached() > 0) == write
        assert (decode.pool.cached() > 0) == write
        await gateway.close()
