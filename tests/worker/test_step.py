"""One row that cannot be computed ends its own request and no other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.batch import AbortWords
from engine.sampling import SampleFailure
from tests.worker.asker import Gateway, work
from tests.worker.house import VOCABULARY, greedy, house
from worker.step import compute_rows


def halves(rows: Sequence[int], abort: AbortWords) -> list[float]:
    return [float("nan") if abort.is_aborted(n) else 1 / row for n, row in enumerate(rows)]


def test_rows_that_can_be_computed_are():
    assert compute_rows([2, 0, 4], AbortWords(3), halves) == [
        0.5,
        SampleFailure("step failed: ZeroDivisionError"),
        0.25,
    ]


def test_alone_too_a_row_hears_that_nobody_wants_it():
    abort = AbortWords(3)

    def compute(rows: Sequence[int], words: AbortWords) -> list[float]:
        if len(rows) > 1:
            abort.abort(2)  # while the step runs
            raise ValueError
        return halves(rows, words)

    first, second, third = compute_rows([2, 1, 4], abort, compute)
    assert (first, second) == (0.5, 1.0)
    assert third != third


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_a_token_outside_the_vocabulary_spares_the_batch(transport):
    prompts = [(n, n + 1, n + 2) for n in range(4)]
    async with house(transport, blocks=64, chunk=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = [gateway.start(decode, prefill, work((f"r{n}", 1), p, 6)) for n, p in enumerate(prompts)]
        bad = gateway.start(decode, prefill, work(("bad", 1), (1, VOCABULARY + 7), 6))
        for one in (*heard, bad):
            await one.ended.wait()
        assert bad.last_words[0].endswith("FAILURE_REASON_ROW_FAILED")
        assert bad.tokens == []
        assert [tuple(one.tokens) for one in heard] == [greedy(p, 6) for p in prompts]
        gateway.lose()
        assert await made.empty() == []
        await gateway.close()
