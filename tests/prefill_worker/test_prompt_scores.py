"""Log-probabilities of the prompt's tokens: complete, in order, and before the output."""

from __future__ import annotations

import pytest

from tests.diptych.worker_process import oracle
from tests.diptych.worker_process.both_workers import greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 30])
async def test_every_prompt_token_but_the_first_has_a_logprob(transport, length):
    prompt = tuple((7 * n) % 61 for n in range(length))
    async with house(transport, blocks=64, chunk=8) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 1), prompt, 5, prompt_logprobs=3)
        await gateway.start(decode, prefill, work(("before", 1), prompt, 1)).ended.wait()
        neighbour = gateway.start(decode, prefill, work(("other", 1), prompt[::-1], 5))
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        await neighbour.ended.wait()
        expected = oracle.scores_of_prompt(prompt, 3)
        assert len(expected) == length - 1
        assert [told.rank for told in heard.prompt_scores] == [score.rank for score in expected]
        logprobs = [told.logprob for told in heard.prompt_scores]
        assert logprobs == pytest.approx([score.logprob for score in expected], abs=1e-4)
        tops = [[one.token_id for one in told.top] for told in heard.prompt_scores]
        assert tops == [[token for token, _ in score.top] for score in expected]
        assert heard.tokens == list(greedy(prompt, 5))
        assert neighbour.prompt_scores == []
        assert await made.empty() == []
        await gateway.close()


async def test_delivered_tokens_have_no_prompt_logprobs():
    prompt, delivered = tuple(range(10)), greedy(tuple(range(10)), 7)
    async with house("shared_memory", blocks=64, chunk=8) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 2), prompt, 12, delivered=delivered, prompt_logprobs=0)
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        assert len(heard.prompt_scores) == len(prompt) - 1
        assert delivered + tuple(heard.tokens) == greedy(prompt, 12)
        await gateway.close()
