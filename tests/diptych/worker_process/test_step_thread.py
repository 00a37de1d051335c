"""One row that cannot be computed ends its own request and no other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from decode_worker.sequence import AttemptBlocks, DecodeSequence
from diptych.engine.batch import AbortWords
from diptych.engine.sampling import SampleFailure
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import GrammarState
from diptych.worker_process.step_thread import StepThread, compute_rows
from tests.diptych.worker_process.both_workers import VOCABULARY, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work


def halves(rows: Sequence[int], abort: AbortWords) -> list[float]:
    return [float("nan") if abort.is_aborted(n) else 1 / row for n, row in enumerate(rows)]


def nothing() -> None:
    """Do nothing at a retry."""


def test_good_rows_of_a_failed_step_are_computed():
    assert compute_rows([2, 0, 4], AbortWords(3), halves, nothing) == [
        0.5,
        SampleFailure("step failed: ZeroDivisionError"),
        0.25,
    ]


def test_an_abort_reaches_rows_that_are_computed_again():
    abort = AbortWords(3)

    def compute(rows: Sequence[int], words: AbortWords) -> list[float]:
        if len(rows) > 1:
            abort.abort(2)  # while the step runs
            raise ValueError
        return halves(rows, words)

    first, second, third = compute_rows([2, 1, 4], abort, compute, nothing)
    assert (first, second) == (0.5, 1.0)
    assert third != third


@pytest.mark.parametrize("bad", [[0], [13], [63], [13, 50], [*range(64)]])
def test_steps_to_isolate_bad_rows_are_few(bad: list[int]) -> None:
    rows = [0 if number in bad else 2 for number in range(64)]
    steps = 0

    def compute(rows: Sequence[int], abort: AbortWords) -> list[float]:
        nonlocal steps
        steps += 1
        return halves(rows, abort)

    results = compute_rows(rows, AbortWords(64), compute, nothing)
    assert [number for number, result in enumerate(results) if result != 0.5] == bad
    assert steps <= 1 + 2 * 6 * len(bad)


async def test_retried_parts_of_a_step_are_not_late() -> None:
    """Gateways give up a worker whose step is two seconds late: one bad row would move all others."""
    step_s = 0.12
    thread: StepThread[object] = StepThread()
    owners = [object() for _ in range(16)]

    def compute(rows: Sequence[int], abort: AbortWords) -> list[float]:
        time.sleep(step_s)
        return halves(rows, abort)

    await thread.compute(owners, [2] * 16, compute)
    again = asyncio.create_task(thread.compute(owners, [0] + [2] * 15, compute))
    late = 0.0
    while not again.done():
        await asyncio.sleep(0.01)
        late = max(late, thread.watchdog.late_s(time.monotonic()))
    assert late == 0.0
    thread.watchdog.begin(16, 0.0)
    assert thread.watchdog.late_s(2.0) > 0.0, "what took longer than one step says nothing about the next one"
    thread.close()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_a_token_outside_the_vocabulary_spares_the_batch(transport):
    prompts = [(n, n + 1, n + 2) for n in range(4)]
    async with house(transport, blocks=64, chunk=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = [gateway.start(decode, prefill, work((f"r{n}", 1), p, 6)) for n, p in enumerate(prompts)]
        bad = gateway.start(decode, prefill, work(("bad", 1), (1, VOCABULARY + 7), 6))
        for one in (*heard, bad):
            await one.ended.wait()
        assert bad.terminal_messages[0].endswith("FAILURE_REASON_COMPUTE_FAILED")
        assert bad.tokens == []
        assert [tuple(one.tokens) for one in heard] == [greedy(p, 6) for p in prompts]
        gateway.lose()
        assert await made.empty() == []
        await gateway.close()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("sampling", [{}, {"beam_width": 3}], ids=["choice", "beams"])
async def test_an_error_in_a_rows_result_fails_its_request_only(sampling, index, monkeypatch):
    """At the handoff or after a step: its request fails, and takes nothing with it that is not its own."""
    prompts = [(n, n + 1, n + 2) for n in range(3)]
    finish_reason, fork = Attempt.finish_reason, AttemptBlocks.fork
    forks = Counter()

    def failing(attempt: Attempt, token_id: int, count: int, grammar: GrammarState | None) -> Any:
        if attempt.key[0] == "bad" and count == index + 1:
            raise LookupError(token_id)
        return finish_reason(attempt, token_id, count, grammar)

    def forking(blocks: AttemptBlocks, parent: DecodeSequence, child: DecodeSequence) -> None:
        forks[len(child.output_ids)] += 1
        if forks[index + 1] == 2:  # one beam has its blocks already
            raise LookupError
        fork(blocks, parent, child)

    monkeypatch.setattr(Attempt, "finish_reason", failing)
    monkeypatch.setattr(AttemptBlocks, "fork", forking)
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = [gateway.start(decode, prefill, work((f"r{n}", 1), p, 9)) for n, p in enumerate(prompts)]
        bad = gateway.start(decode, prefill, work(("bad", 1), (9, 8, 7), 9, sampling=sampling))
        for one in (*heard, bad):
            await one.ended.wait()
        assert bad.terminal_messages == ["decode FAILURE_REASON_INTERNAL"]
        assert [tuple(one.tokens) for one in heard] == [greedy(p, 9) for p in prompts]
        assert await made.empty() == []
        await gateway.close()
