"""Several choices of one attempt: one handoff, shared blocks, each the answer that it would be alone."""

from __future__ import annotations

import pytest

from diptych.engine.sampling import Sampled
from diptych.worker.v1 import work_pb2
from tests.diptych.worker_process import oracle
from tests.diptych.worker_process.both_workers import BLOCK, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work
from tests.kvtransfer.conftest import until

SAMPLED = {"temperature": 1.0, "seed": 11}
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)  # two blocks and a token


def ids(answer: list[Sampled]) -> list[int]:
    return [sampled.token_id for sampled in answer]


def check_scores(heard: list[work_pb2.Score], answer: list[Sampled]) -> None:
    for told, sampled in zip(heard, answer, strict=True):
        assert sampled.score is not None
        assert told.rank == sampled.score.rank
        assert told.logprob == pytest.approx(sampled.score.logprob, abs=1e-4)
        assert [one.token_id for one in told.top] == [token for token, _ in sampled.score.top]


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("prompt_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
async def test_each_choice_equals_a_request_of_its_own(transport, prompt_tokens):
    prompt = tuple(range(7, 7 + prompt_tokens))
    async with house(transport, blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 1), prompt, 9, choices=range(4), sampling={**SAMPLED, "logprobs": 2})
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode finished"] * 4
        answers = oracle.choices(prompt, 4, 9, **SAMPLED, logprobs=2)
        assert len({tuple(ids(answer)) for answer in answers}) > 1
        for choice, answer in enumerate(answers):
            assert heard.outputs[choice] == ids(answer)
            check_scores(heard.scores[choice], answer)
        assert await made.empty() == []
        await gateway.close()


async def test_stop_tokens_end_one_choice_and_min_tokens_forbid_them_in_all():
    stop = tuple(range(0, 61, 4))
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 1), PROMPT, 12, choices=range(5), sampling=SAMPLED, stop=stop, min_tokens=3)
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        answers = oracle.choices(PROMPT, 5, 12, **SAMPLED, stop=stop, min_tokens=3)
        assert [heard.outputs[choice] for choice in range(5)] == [ids(answer) for answer in answers]
        assert len({len(answer) for answer in answers}) > 1
        assert min(len(answer) for answer in answers) > 3
        await gateway.close()
        assert await made.empty() == []


async def test_greedy_choices_are_equal_and_without_logprobs():
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 10, choices=(5, 2, 9)))
        await heard.ended.wait()
        assert heard.outputs == {choice: list(greedy(PROMPT, 10)) for choice in (5, 2, 9)}
        assert not any(heard.scores.values())
        await gateway.close()


async def test_choices_share_the_blocks_of_the_prompt():
    prompt = tuple(range(40))  # ten blocks: eight times that would not fit
    async with house("shared_memory", blocks=20) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), prompt, 4, choices=range(8), sampling=SAMPLED))
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode finished"] * 8
        assert [heard.outputs[c] for c in range(8)] == [
            ids(answer) for answer in oracle.choices(prompt, 8, 4, **SAMPLED)
        ]
        assert await made.empty() == []
        await gateway.close()


async def test_a_cancelled_choice_ends_and_the_others_continue():
    async with house("shared_memory", blocks=200) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 60, choices=range(3), sampling=SAMPLED))
        await until(lambda: len(heard.outputs[1]) > 3)
        decode.loop.requests.cancel(("r", 1), [1, 7])
        length = len(heard.outputs[1])
        await until(lambda: bool(heard.words[0] and heard.words[2]))
        assert not heard.words[1]
        assert len(heard.outputs[1]) <= length + 1
        answers = oracle.choices(PROMPT, 3, 60, **SAMPLED)
        assert heard.outputs[0] == ids(answers[0])
        assert heard.outputs[2] == ids(answers[2])
        assert await made.empty() == []
        await gateway.close()


async def test_a_choice_cancelled_before_the_handoff_sends_nothing():
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        message = work(("r", 1), PROMPT, 6, choices=range(3), sampling=SAMPLED)
        heard = gateway.start(decode, prefill, message)
        for attempts in (decode.loop.requests, prefill.loop.requests):
            attempts.cancel(("r", 1), [0])
        await until(lambda: bool(heard.words[1] and heard.words[2]))
        assert heard.outputs[0] == []
        assert heard.outputs[2] == ids(oracle.choices(PROMPT, 3, 6, **SAMPLED)[2])
        assert await made.empty() == []
        await gateway.close()


async def test_the_attempt_ends_when_all_choices_are_cancelled_one_by_one():
    async with house("tcp", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        kept = decode.pool.allocate(64)  # nothing is granted
        gateway.start(decode, prefill, work(("r", 1), PROMPT, 6, choices=range(3), sampling=SAMPLED))
        for choice in range(3):
            decode.loop.requests.cancel(("r", 1), [choice])
            prefill.loop.requests.cancel(("r", 1), [choice])
        assert decode.loop.num_waiting == 0
        decode.pool.release(kept)
        assert await made.empty() == []
        await gateway.close()


async def test_a_failure_before_the_handoff_ends_every_choice():
    async with house("shared_memory", blocks=4) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), tuple(range(30)), 6, choices=range(3)))
        await until(lambda: all(heard.words.values()))
        assert all("decode FAILURE_REASON_EXCEEDS_KV_CAPACITY" in words for words in heard.words.values())
        decode.loop.draining = True
        heard = gateway.start(decode, prefill, work(("r", 2), PROMPT, 6, choices=range(2)))
        await heard.ended.wait()
        assert heard.words == {0: ["decode FAILURE_REASON_DRAINING"], 1: ["decode FAILURE_REASON_DRAINING"]}
        prefill.loop.requests.cancel(("r", 2))
        assert await made.empty() == []
        await gateway.close()


async def finish_all(made, gateway: Gateway, heard: Heard, prompt: tuple[int, ...], max_tokens: int) -> int:
    """Resume preempted choices, each alone, until all are done; return how often that was needed."""
    attempts, pending = 1, [(heard, choice) for choice in heard.choices]
    delivered: dict[int, list[int]] = {choice: [] for choice in heard.choices}
    while pending:
        heard, choice = pending.pop()
        await until(lambda heard=heard, choice=choice: bool(heard.words[choice]), 20)
        delivered[choice] += heard.outputs[choice]
        if heard.words[choice] == ["decode finished"]:
            continue
        assert heard.words[choice] == ["decode preempted"]
        attempts += 1
        message = work(
            ("r", attempts),
            prompt,
            max_tokens,
            delivered=delivered[choice],
            choices=[choice],
            sampling=SAMPLED,
        )
        pending.append((gateway.start(made.decodes[0], made.prefills[0], message), choice))
    answers = oracle.choices(prompt, len(delivered), max_tokens, **SAMPLED)
    assert [delivered[c] for c in sorted(delivered)] == [ids(answer) for answer in answers]
    return attempts - 1


async def test_choices_are_preempted_one_by_one_and_give_the_same_tokens():
    async with house("shared_memory", blocks=14) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 30, choices=range(5), sampling=SAMPLED))
        assert await finish_all(made, gateway, heard, PROMPT, 30) > 0
        assert heard.words[0] == ["decode finished"], "the oldest choice is never the victim"
        assert await made.empty() == []
        await gateway.close()


async def test_a_reserve_finishes_the_choices_that_fit_and_preempts_the_others():
    async with house("shared_memory", blocks=24) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        # Two full blocks are shared; eight more each: two fit, and three do not.
        message = work(("r", 1), PROMPT, 31, choices=range(3), sampling=SAMPLED, reserve=True)
        heard = gateway.start(decode, prefill, message)
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode finished", "decode finished", "decode preempted"]
        assert heard.outputs[2] == []
        assert [heard.outputs[c] for c in (0, 1)] == [
            ids(answer) for answer in oracle.choices(PROMPT, 2, 31, **SAMPLED)
        ]
        assert await made.empty() == []
        await gateway.close()


async def test_output_blocks_of_a_choice_are_found_in_the_prefix_cache():
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 20, choices=range(3), sampling=SAMPLED))
        await heard.ended.wait()
        for number, output in enumerate(heard.outputs.values()):
            told = gateway.start(decode, prefill, work((f"again {number}", 1), (*PROMPT, *output, 1), 2))
            await told.ended.wait()
            assert decode.ended[-1].times.cached_tokens == (len(PROMPT) + 20 - 1) // BLOCK * BLOCK
        assert await made.empty() == []
        await gateway.close()


async def test_more_choices_than_a_step_has_rows_take_turns():
    async with house("shared_memory", blocks=120) as made:  # eight rows a step
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 8, choices=range(20), sampling=SAMPLED))
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode finished"] * 20
        assert [heard.outputs[c] for c in range(20)] == [
            ids(answer) for answer in oracle.choices(PROMPT, 20, 8, **SAMPLED)
        ]
        assert await made.empty() == []
        await gateway.close()
