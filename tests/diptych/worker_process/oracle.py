"""The oracle of the workers' answers: the same model in one process, each answer alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from diptych.engine.beam_search import Beam
from diptych.engine.generate import generate_choices, prompt_token_logprobs
from diptych.engine.generate_beams import generate_beams
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SamplingParams, TokenLogprob
from tests.diptych.worker_process.both_workers import layout, model


@cache
def _engine(blocks: int) -> tuple[Runner, KVMemory, BlockPool]:
    return Runner(model(), 1), KVMemory(layout(), blocks), BlockPool(blocks)


def choices(
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    *,
    stop: Collection[int] = (),
    min_tokens: int = 0,
    **sampling: Any,
) -> list[list[Sampled]]:
    return generate_choices(
        *_engine(80),
        prompt,
        SamplingParams(**sampling),
        count=count,
        max_tokens=max_tokens,
        stop_ids=stop,
        min_tokens=min_tokens,
    )


def beams(
    prompt: Sequence[int],
    width: int,
    count: int,
    max_tokens: int,
    *,
    stop: Collection[int] = (),
    min_tokens: int = 0,
    **sampling: Any,
) -> list[Beam]:
    return generate_beams(
        *_engine(400),
        prompt,
        SamplingParams(temperature=0.0, **sampling),
        width=width,
        count=count,
        max_tokens=max_tokens,
        stop_ids=stop,
        min_tokens=min_tokens,
    )


def scores_of_prompt(prompt: Sequence[int], count: int) -> list[TokenLogprob]:
    return prompt_token_logprobs(*_engine(80), prompt, count)
