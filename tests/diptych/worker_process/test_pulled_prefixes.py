"""Prompts whose prefix only the decode worker has, on real loops over tcp: the same tokens, computed once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvtransfer.protocol import pull_rates
from kvtransfer.transports import pull_frames
from tests.diptych.worker_process.both_workers import BLOCK, Prefill, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

PROMPT = tuple(range(20))
ANSWER = 18
QUESTION = (7, 5, 3)


def computed(prefill: Prefill) -> list[int]:
    """Return the tokens that each ended request started from."""
    return [request.granted.computed_tokens for request, _ in prefill.ended if request.granted is not None]


def ends_of(prefill: Prefill) -> Counter[str]:
    """Return a counter of the ends of the worker's pulls over links to come, which goes on to count."""
    ends: Counter[str] = Counter()

    def count(outcome: str, blocks: int, seconds: float) -> None:
        ends[outcome] += 1

    prefill.client._on_pull_end = count
    return ends


@pytest.fixture
def patient(monkeypatch):
    """Let no pull be late: a starved machine makes some so, which cost tokens but no test."""
    monkeypatch.setattr(pull_rates, "LEAST_DEADLINE_S", 20.0)


@pytest.mark.usefixtures("patient")
async def test_second_turn_of_a_chat_computes_only_what_is_new():
    answer = greedy(PROMPT, ANSWER)
    second = PROMPT + answer + QUESTION
    async with house("tcp", blocks=64, scratch=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        first = gateway.start(decode, prefill, work(("first", 1), PROMPT, ANSWER))
        await first.ended.wait()
        assert tuple(first.tokens) == answer
        then = gateway.start(decode, prefill, work(("second", 1), second, 6))
        await then.ended.wait()
        assert tuple(then.tokens) == greedy(second, 6)
        # The last token of an answer is sampled and never fed: its KV is nowhere.
        assert computed(prefill) == [0, (len(PROMPT) + ANSWER - 1) // BLOCK * BLOCK]
        pulled = [request.times().HasField("kv_pull") for request, _ in prefill.ended]
        assert pulled == [False, True], "a pull is a phase of its own, and no wait for blocks"
        assert await made.empty() == []
        await gateway.close()


@pytest.mark.usefixtures("patient")
async def test_second_prefill_worker_computes_no_shared_prefix_again():
    prompts = [tuple(range(24)) + (50 + n,) * 3 for n in range(6)]
    async with house("tcp", prefills=2, blocks=64, scratch=64) as made:
        gateway, (decode,) = Gateway(made), made.decodes
        for number, prompt in enumerate(prompts):
            prefill = made.prefills[number % 2]
            heard = gateway.start(decode, prefill, work((f"r{number}", 1), prompt, 4))
            await heard.ended.wait()
            assert tuple(heard.tokens) == greedy(prompt, 4)
        assert [computed(prefill) for prefill in made.prefills] == [[0, 24, 24], [24, 24, 24]]
        assert await made.empty() == []
        await gateway.close()


async def outputs_of_damaged_pulls(monkeypatch, damage, answer, second):
    """Return six tokens after `second`, which goes on after PROMPT and its answer of so many tokens, where
    each pulled block is damaged: with digests, and without them.
    """
    outputs = []
    for verified in (True, False):
        async with house("tcp", blocks=64, scratch=64) as made:
            gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
            await gateway.start(decode, prefill, work(("first", 1), PROMPT, answer)).ended.wait()
            prefill.client.flush_prefix_cache()
            with monkeypatch.context() as patch:
                patch.setattr(pull_frames, "damage_payload", damage)
                if not verified:
                    patch.setattr(pull_frames, "pulled_block_digest", lambda *_: bytes(16))
                heard = gateway.start(decode, prefill, work(("second", 1), second, 6))
                await heard.ended.wait()
            outputs.append(tuple(heard.tokens))
            await gateway.close()
    return outputs


@pytest.mark.usefixtures("patient")
async def test_pull_without_verification_gives_wrong_tokens(monkeypatch):
    """The control: a damaged block is caught by its digest alone."""

    def damage(payload):
        damaged = bytearray(payload)
        damaged[::4] = bytes(len(damaged[::4]))
        damaged[3::4] = b"\x41" * len(damaged[3::4])
        return memoryview(damaged)

    second = PROMPT + greedy(PROMPT, ANSWER) + QUESTION
    outputs = await outputs_of_damaged_pulls(monkeypatch, damage, ANSWER, second)
    assert outputs[0] == greedy(second, 6)
    assert outputs[1] != greedy(second, 6)


@pytest.mark.parametrize("how", ["cancel", "gateway lost", "abort", "link breaks", "late"])
async def test_end_in_the_middle_of_a_pull_leaves_nothing(monkeypatch, how):
    let, waiting, real = asyncio.Event(), asyncio.Event(), pull_frames.fetch_block

    async def held(*args):
        waiting.set()
        await let.wait()
        return await real(*args)

    second = PROMPT + greedy(PROMPT, ANSWER) + QUESTION
    async with house("tcp", blocks=64, scratch=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        ends = ends_of(prefill)
        await gateway.start(decode, prefill, work(("first", 1), PROMPT, ANSWER)).ended.wait()
        monkeypatch.setattr(pull_frames, "fetch_block", held)
        heard = gateway.start(decode, prefill, work(("second", 1), second, 6))
        await waiting.wait()
        match how:
            case "cancel":
                decode.loop.requests.cancel(("second", 1))
                prefill.loop.requests.cancel(("second", 1))
            case "gateway lost":
                gateway.lose()
            case "abort":
                key = decode.loop.requests.grants.abort_newest_grant()
                assert key is not None
                decode.loop.requests.preempt_request(key)
            case "link breaks":
                next(iter(prefill.client._links.values()))[0].close()
            case "late":
                await heard.ended.wait()
                assert tuple(heard.tokens) == greedy(second, 6)
                assert ends == {"late": 1}
        if how in ("abort", "link breaks"):
            await heard.ended.wait()
            assert not heard.tokens
        let.set()
        assert await made.empty() == []
        if how != "gateway lost":
            await until(lambda: bool(prefill.client._links))
            again = gateway.start(decode, prefill, work(("again", 1), second, 6))
            await again.ended.wait()
            assert tuple(again.tokens) == greedy(second, 6)
            await gateway.close()
        assert await made.empty() == []
