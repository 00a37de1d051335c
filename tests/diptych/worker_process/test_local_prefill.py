"""Prompts that a decode worker computes itself: the tokens are those of a prefill worker whatever happens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.local_prefill import LocalPrefills, LocalPrompt
from decode_worker.local_schedule import LocalBounds
from diptych.engine.batch import SequenceStep
from diptych.engine.runner import Runner
from diptych.worker.v1 import work_pb2
from diptych.worker_process.prompt_chunk import PromptChunk
from kvtransfer.protocol.messages import SendGrant
from tests.diptych.worker_process import oracle
from tests.diptych.worker_process.both_workers import BLOCK, VOCABULARY, House, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work

Patch = pytest.MonkeyPatch
SHORT, FALLBACK = work_pb2.LOCAL_PREFILL_SHORT, work_pb2.LOCAL_PREFILL_FALLBACK
TOO_MANY_NEW = "decode FAILURE_REASON_TOO_MANY_NEW"
PROMPT = tuple((7 * n + 3) % VOCABULARY for n in range(37))
SAMPLED = {"temperature": 1.2, "seed": 5}
MAX_TOKENS = 12


@pytest.fixture(params=["torch", "device", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def local(made: House, name: str, prompt: Sequence[int], **changes: Any) -> Heard:
    """Have a prompt computed by the decode worker, and wait for its end."""
    gateway = Gateway(made)
    changes = {"local": FALLBACK, **changes}
    heard = gateway.start_local(made.decodes[0], work((name, 1), tuple(prompt), MAX_TOKENS, **changes))
    async with asyncio.timeout(20):
        await heard.ended.wait()
    await asyncio.sleep(0)
    return heard


async def finished(made: House, name: str, prompt: Sequence[int], **changes: Any) -> Heard:
    heard = await local(made, name, prompt, **changes)
    assert set(heard.terminal_messages) == {"decode finished"}
    return heard


async def running(stream: Heard) -> None:
    """Wait until a stream has some tokens."""
    for _ in range(10_000):
        if len(stream.tokens) >= 3:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no tokens came")


class Steps:
    """The steps of a runner: tokens of each row."""

    def __init__(self, patch: Patch) -> None:
        self.rows: list[list[int]] = []
        real = Runner._check

        def check(runner: Runner, sequences: Sequence[SequenceStep], abort: Any) -> None:
            self.rows.append([len(one.token_ids) for one in sequences])
            real(runner, sequences, abort)

        patch.setattr(Runner, "_check", check)


# ---- the same tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 8, 37])
async def test_greedy_output_equals_the_oracle(backend: str, length: int) -> None:
    async with house("shared_memory", backend=backend) as made:
        heard = await finished(made, "a", PROMPT[:length])
        assert tuple(heard.tokens) == greedy(PROMPT[:length], MAX_TOKENS)
        assert await made.empty() == []


@pytest.mark.parametrize("suffix", [0, 1, BLOCK, 9])
async def test_cached_prefix_is_read_and_its_end_computed(backend: str, suffix: int) -> None:
    async with house("shared_memory", backend=backend) as made:
        await finished(made, "before", PROMPT[:24])
        prompt = (*PROMPT[:24], *range(suffix))
        heard = await finished(made, "a", prompt, local=SHORT)
        assert tuple(heard.tokens) == greedy(prompt, MAX_TOKENS)
        times = made.decodes[0].ended[-1].times
        assert times.local_prefill
        assert times.cached_tokens == (24 if suffix else 20)  # one token is computed, for its logits
        assert await made.empty() == []


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_prefix_computed_by_either_worker_serves_the_other(transport: str) -> None:
    async with house(transport) as made:
        gateway = Gateway(made)
        await finished(made, "local", PROMPT[:24])
        remote = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), PROMPT[:32], MAX_TOKENS))
        await remote.ended.wait()
        assert tuple(remote.tokens) == greedy(PROMPT[:32], MAX_TOKENS)
        again = await finished(made, "again", PROMPT, local=SHORT)
        assert tuple(again.tokens) == greedy(PROMPT, MAX_TOKENS)
        # Over tcp the prefill worker pulls what the decode worker computed.
        assert [one.times.cached_tokens for one in made.decodes[0].ended] == [0, 24, 32]


async def test_choices_and_seeds_equal_the_oracle(backend: str) -> None:
    async with house("shared_memory", backend=backend) as made:
        heard = await finished(made, "a", PROMPT, choices=range(4), sampling=SAMPLED)
        answers = oracle.choices(PROMPT, 4, MAX_TOKENS, **SAMPLED)
        assert [heard.outputs[c] for c in range(4)] == [
            [one.token_id for one in answer] for answer in answers
        ]
        assert len({tuple(output) for output in heard.outputs.values()}) > 1
        assert await made.empty() == []


async def test_beams_equal_the_oracle(backend: str) -> None:
    async with house("shared_memory", backend=backend, blocks=40) as made:
        heard = await finished(made, "a", PROMPT, choices=range(3), sampling={"beam_width": 3})
        best = oracle.beams(PROMPT, 3, 3, MAX_TOKENS)
        assert [heard.outputs[rank] for rank in range(3)] == [list(beam.token_ids) for beam in best]


async def test_penalties_and_logprobs_equal_the_oracle(backend: str) -> None:
    rules = {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "logprobs": 2}
    async with house("shared_memory", backend=backend) as made:
        heard = await finished(made, "a", PROMPT, sampling=rules, stop=(3, 17), min_tokens=6)
        (answer,) = oracle.choices(PROMPT, 1, MAX_TOKENS, stop=(3, 17), min_tokens=6, **rules)
        assert heard.tokens == [one.token_id for one in answer]
        wanted = [one.score.logprob for one in answer if one.score is not None]
        assert [score.logprob for score in heard.scores[0]] == pytest.approx(wanted, abs=1e-5)


async def test_prompt_logprobs_equal_the_oracle(backend: str) -> None:
    async with house("shared_memory", backend=backend) as made:
        await finished(made, "before", PROMPT)
        heard = await finished(made, "a", PROMPT, prompt_logprobs=1)
        wanted = oracle.scores_of_prompt(PROMPT, 1)
        assert [score.rank for score in heard.prompt_scores] == [score.rank for score in wanted]
        assert [score.logprob for score in heard.prompt_scores] == pytest.approx(
            [score.logprob for score in wanted], abs=1e-5
        )
        assert tuple(heard.tokens) == greedy(PROMPT, MAX_TOKENS)


async def test_resumed_output_continues_at_the_next_token(backend: str) -> None:
    async with house("shared_memory", backend=backend) as made:
        delivered = greedy(PROMPT, 5)
        heard = await finished(made, "a", PROMPT, delivered=delivered)
        assert (*delivered, *heard.tokens) == greedy(PROMPT, MAX_TOKENS)


# ---- controls ----------------------------------------------------------------------------------------------


def skips_the_last_token(patch: Patch) -> None:
    """The last new token is not computed: its logits are those of the token before."""

    def sequence(self: PromptChunk) -> SequenceStep:
        step = real(self)
        if not self.last or self.tokens < 2:
            return step
        return SequenceStep(
            step.memory, step.block_table, step.start, step.token_ids[:-1], step.wants_logits, step.trailing
        )

    real = PromptChunk.sequence
    patch.setattr(PromptChunk, "sequence", sequence)


def starts_a_block_late(patch: Patch) -> None:
    """Rows of a block that nobody computed are taken for cached."""

    def granted(self: LocalPrefills, grant: SendGrant) -> None:
        late = grant.cached_tokens + BLOCK
        fits = late < len(self._prompts[grant.ref.key].token_ids)
        real(self, replace(grant, cached_tokens=late) if fits else grant)

    real = LocalPrefills._granted
    patch.setattr(LocalPrefills, "_granted", granted)


@pytest.mark.parametrize("bug", [skips_the_last_token, starts_a_block_late])
async def test_control_wrong_chunk_changes_the_tokens(
    bug: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    bug(monkeypatch)
    async with house("shared_memory") as made:
        heard = await local(made, "a", PROMPT)
        assert tuple(heard.tokens) != greedy(PROMPT, MAX_TOKENS)


# ---- bounds ------------------------------------------------------------------------------------------------


async def test_too_many_new_tokens_are_answered_at_once() -> None:
    async with house("shared_memory") as made:
        heard = await local(made, "a", PROMPT, local=SHORT, choices=(0, 1))
        assert heard.terminal_messages == [TOO_MANY_NEW] * 2
        assert await made.empty() == []
        assert made.decodes[0].loop.steps == 0


async def test_prefix_evicted_before_the_grant_is_answered_likewise() -> None:
    async with house("shared_memory", blocks=16) as made:
        decode, gateway = made.decodes[0], Gateway(made)
        await finished(made, "before", PROMPT[:24])
        held = decode.pool.allocate(9)
        heard = gateway.start_local(decode, work(("a", 1), PROMPT, MAX_TOKENS, local=SHORT))
        await asyncio.sleep(0.05)
        assert not heard.ended.is_set()  # 13 new tokens; it waits for blocks
        decode.loop.flush_prefix_cache()
        decode.pool.release(held)
        decode.handoff.blocks_freed()
        await heard.ended.wait()
        assert heard.terminal_messages == [TOO_MANY_NEW]
        assert await made.empty() == []


async def test_no_prompt_is_local_where_the_bound_is_zero() -> None:
    async with house("shared_memory", bounds=LocalBounds(short=0, fallback=0)) as made:
        assert (await local(made, "a", PROMPT[:1], local=SHORT)).terminal_messages == [TOO_MANY_NEW]


async def test_chunks_beside_a_stream_are_bounded(backend: str, monkeypatch: Patch) -> None:
    steps = Steps(monkeypatch)
    async with house("shared_memory", backend=backend, blocks=60) as made:
        gateway = Gateway(made)
        stream = gateway.start_local(made.decodes[0], work(("s", 1), PROMPT[:4], 60, local=SHORT))
        await running(stream)
        begun, steps.rows = len(stream.tokens), []
        prompt = PROMPT[::-1]
        heard = await finished(made, "a", prompt)
        computing = list(steps.rows)
        assert not stream.ended.is_set()
        await stream.ended.wait()
        assert tuple(stream.tokens) == greedy(PROMPT[:4], 60)
        assert tuple(heard.tokens) == greedy(prompt, MAX_TOKENS)
        assert begun < 55
        assert max(tokens for rows in computing for tokens in rows) == 3
        chunks = [rows for rows in computing if max(rows) > 1]
        assert len(chunks) >= len(PROMPT) // 3
        if backend == "native":
            assert all(1 in rows for rows in chunks), "the stream takes part in every step"
        else:  # no two steps without the stream follow each other
            alone = [rows == [3] for rows in computing]
            assert not any(one and other for one, other in itertools.pairwise(alone))


# ---- ends in the middle of a chunk -------------------------------------------------------------------------


class Chunks:
    """Sets `reached` when so many chunks were planned; the last of them is being computed then."""

    def __init__(self, patch: Patch, chunks: int) -> None:
        self.reached = asyncio.Event()
        real, left = LocalPrefills.plan, [chunks]

        def plan(prefills: LocalPrefills, *args: Any) -> list[LocalPrompt]:
            planned = real(prefills, *args)
            if planned:
                left[0] -= 1
                if left[0] == 0:
                    self.reached.set()
            return planned

        patch.setattr(LocalPrefills, "plan", plan)


@pytest.mark.parametrize("how", ["cancel", "drain", "preempt", "gateway lost", "flush"])
async def test_end_in_the_middle_of_a_chunk_gives_all_blocks_back(
    backend: str, how: str, monkeypatch: Patch
) -> None:
    chunks = Chunks(monkeypatch, 2)
    async with house("shared_memory", backend=backend) as made:
        decode, gateway = made.decodes[0], Gateway(made)
        requests = decode.loop.requests
        heard = gateway.start_local(decode, work(("a", 1), PROMPT, MAX_TOKENS, local=FALLBACK))
        await chunks.reached.wait()
        await asyncio.sleep(0)
        match how:
            case "cancel":
                requests.cancel(("a", 1))
            case "drain":
                decode.loop.draining = True
                requests.hand_back()
            case "preempt":
                key = decode.handoff.abort_newest_grant()
                assert key == ("a", 1)
                requests.preempt_request(key)
            case "gateway lost":
                gateway.lose()
            case "flush":
                decode.loop.flush_prefix_cache()
        if how == "flush":
            await heard.ended.wait()
            assert tuple(heard.tokens) == greedy(PROMPT, MAX_TOKENS)
        assert await made.empty() == []
        assert len(decode.loop.local) == 0
        words = {"drain": "decode FAILURE_REASON_DRAINING", "preempt": "decode preempted"}
        await asyncio.sleep(0.01)
        if how in words:
            assert heard.terminal_messages == [words[how]]


async def test_deadline_ends_a_local_prompt(monkeypatch: Patch) -> None:
    async with house("shared_memory", blocks=12) as made:
        decode, gateway = made.decodes[0], Gateway(made)
        held = decode.pool.allocate(10)  # it waits for blocks
        heard = gateway.start_local(decode, work(("a", 1), PROMPT, MAX_TOKENS, local=FALLBACK, seconds=0.05))
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode FAILURE_REASON_DEADLINE"]
        decode.pool.release(held)
        assert await made.empty() == []


async def test_failed_chunk_fails_its_prompt_alone(backend: str, monkeypatch: Patch) -> None:
    async with house("shared_memory", backend=backend) as made:
        gateway = Gateway(made)
        stream = gateway.start_local(made.decodes[0], work(("s", 1), PROMPT[:4], 40, local=SHORT))
        await running(stream)

        def forward(real: Callable[..., Any]) -> Callable[..., Any]:
            def compute(self: Any, sequences: Sequence[SequenceStep], *rest: Any) -> Any:
                if any(60 in one.token_ids for one in sequences):
                    raise RuntimeError("planted")
                return real(self, sequences, *rest)

            return compute

        monkeypatch.setattr(Runner, "_compute", forward(Runner._compute))
        heard = await local(made, "a", (60, 60, 60, 60, 60))
        assert heard.terminal_messages == ["decode FAILURE_REASON_COMPUTE_FAILED"]
        await stream.ended.wait()
        assert tuple(stream.tokens) == greedy(PROMPT[:4], 40)
        assert await made.empty() == []
