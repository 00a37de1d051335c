"""Beam search across both workers: the answers of the same search in one piece, and blocks that balance."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.diptych.worker_process import oracle
from tests.diptych.worker_process.both_workers import VOCABULARY, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
STOP = tuple(range(0, VOCABULARY, 7))


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("seed", range(6))
async def test_beams_equal_a_search_by_the_engine_alone(transport, seed):
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 14)))
    width, max_tokens = rng.randint(1, 6), rng.randint(1, 14)
    count, stop = rng.randint(1, width), STOP if seed % 2 else ()
    rules = {"logit_bias": {5: 2.0, 9: -3.0}} if seed % 3 == 0 else {}
    min_tokens = rng.randint(0, 3)
    async with house(transport, blocks=80) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        sampling = {"beam_width": width, "logprobs": 1, **rules}
        limits = {"stop": stop, "min_tokens": min_tokens}
        message = work(("r", 1), prompt, max_tokens, choices=range(count), sampling=sampling, **limits)
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        best = oracle.beams(prompt, width, count, max_tokens, **limits, logprobs=1, **rules)
        assert heard.terminal_messages == ["decode finished"] * count
        for rank, beam in enumerate(best):
            assert heard.outputs[rank] == list(beam.token_ids)
            told = [score.logprob for score in heard.scores[rank]]
            assert told == pytest.approx([score.logprob for score in beam.scores], abs=1e-4)
        assert await made.empty() == []
        await gateway.close()


async def test_beams_and_choices_share_steps():
    async with house("shared_memory", blocks=120) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        plain = [gateway.start(decode, prefill, work((f"p{n}", 1), PROMPT[n:], 25)) for n in range(4)]
        beams = [
            gateway.start(
                decode,
                prefill,
                work((f"b{n}", 1), PROMPT[n:], 25, choices=range(3), sampling={"beam_width": 3}),
            )
            for n in range(3)
        ]
        for heard in (*plain, *beams):
            await heard.ended.wait()
        assert [heard.tokens for heard in plain] == [list(greedy(PROMPT[n:], 25)) for n in range(4)]
        for number, heard in enumerate(beams):
            best = oracle.beams(PROMPT[number:], 3, 3, 25)
            assert list(heard.outputs.values()) == [list(beam.token_ids) for beam in best]
            assert not any(heard.scores.values())
        assert await made.empty() == []
        await gateway.close()


async def test_beams_are_sent_at_the_end_without_cancelled_ranks():
    async with house("shared_memory", blocks=120) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 1), PROMPT, 60, choices=range(3), sampling={"beam_width": 4})
        heard = gateway.start(decode, prefill, message)
        await until(lambda: decode.loop.num_running == 4)
        steps = decode.loop.steps
        await until(lambda: decode.loop.steps > steps + 5)
        assert not any(heard.outputs.values())
        decode.loop.requests.cancel(("r", 1), [1])
        await until(lambda: bool(heard.words[0] and heard.words[2]))
        assert heard.outputs[1] == []
        assert not heard.words[1]
        best = oracle.beams(PROMPT, 4, 3, 60)
        assert [heard.outputs[rank] for rank in (0, 2)] == [list(best[rank].token_ids) for rank in (0, 2)]
        assert await made.empty() == []
        await gateway.close()


async def test_a_beam_search_is_preempted_as_a_whole_and_repeats_its_result():
    async with house("shared_memory", blocks=24) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        old = gateway.start(decode, prefill, work(("old", 1), PROMPT, 80))
        await until(lambda: len(old.tokens) > 20)
        sampling = {"beam_width": 4}
        words = set()
        for attempt in range(1, 20):
            message = work(("r", attempt), PROMPT, 24, choices=range(2), sampling=sampling)
            heard = gateway.start(decode, prefill, message)
            await heard.ended.wait()
            words |= set(heard.terminal_messages)
            if "decode finished" in heard.terminal_messages:
                break
            assert not any(heard.outputs.values())
        assert words == {"decode preempted", "decode finished"}
        best = oracle.beams(PROMPT, 4, 2, 24)
        assert list(heard.outputs.values()) == [list(beam.token_ids) for beam in best]
        await old.ended.wait()
        assert old.tokens == list(greedy(PROMPT, 80))
        assert await made.empty() == []
        await gateway.close()


async def test_a_reserved_beam_search_needs_no_block_that_others_have_taken():
    async with house("shared_memory", blocks=60) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 1), PROMPT, 40, choices=range(2), sampling={"beam_width": 4}, reserve=True)
        heard = gateway.start(decode, prefill, message)
        await until(lambda: decode.loop.num_running == 4)
        taken = decode.pool.allocate(decode.pool.available())
        assert taken
        while not heard.ended.is_set():  # and what it gives up
            await asyncio.sleep(0)
            taken += decode.pool.allocate(decode.pool.available())
        assert heard.terminal_messages == ["decode finished"] * 2
        best = oracle.beams(PROMPT, 4, 2, 40)
        assert list(heard.outputs.values()) == [list(beam.token_ids) for beam in best]
        decode.pool.release(taken)
        assert await made.empty() == []
        await gateway.close()


async def test_a_beam_search_larger_than_the_pool_fails_with_exceeds_kv_capacity():
    async with house("shared_memory", blocks=10) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 1), PROMPT, 25, choices=range(3), sampling={"beam_width": 8}, reserve=True)
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode FAILURE_REASON_EXCEEDS_KV_CAPACITY"] * 3
        assert await made.empty() == []
        await gateway.close()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_a_beam_search_without_a_valid_token_fails_with_no_valid_token(transport):
    async with house(transport, blocks=40) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        sampling = {"beam_width": 2, "allowed_token_ids": [7]}
        message = work(("r", 1), PROMPT, 6, choices=[0], sampling=sampling, stop=[7], min_tokens=2)
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        assert heard.terminal_messages[0].endswith("FAILURE_REASON_NO_VALID_TOKEN")
        decode.loop.requests.cancel(("r", 1))
        assert await made.empty() == []
        await gateway.close()


async def test_rows_of_step_groups_that_are_computed_one_by_one_give_the_same_tokens(monkeypatch):
    """A whole step is computed so when one of its rows raises."""
    async with house("shared_memory", blocks=80) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        step, alone = decode.loop._pipeline._runner.step, 0

        def fussy(sequences, abort):
            nonlocal alone
            if len(sequences) > 1:
                raise RuntimeError("too many for me")
            alone += 1
            return step(sequences, abort)

        monkeypatch.setattr(decode.loop._pipeline._runner, "step", fussy)
        beams = work(("b", 1), PROMPT, 9, choices=range(2), sampling={"beam_width": 3})
        heard = gateway.start(decode, prefill, beams)
        plain = gateway.start(decode, prefill, work(("p", 1), PROMPT, 9))
        await heard.ended.wait()
        await plain.ended.wait()
        assert alone > 20
        best = oracle.beams(PROMPT, 3, 2, 9)
        assert list(heard.outputs.values()) == [list(beam.token_ids) for beam in best]
        assert plain.tokens == list(greedy(PROMPT, 9))
        assert await made.empty() == []
        await gateway.close()
