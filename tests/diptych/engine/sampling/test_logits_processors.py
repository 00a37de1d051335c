"""Logits processors against transformers' of the same name, and the order in which they apply."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from diptych.engine.sampling import SampleFailure, SampleRow, SamplingParams, sample
from diptych.engine.sampling.logits_processor import Scores

VOCAB = 97


def scores_of(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def after(
    params: SamplingParams, scores: torch.Tensor, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """Scores after all logits processors of `params`."""
    changed = scores[0].numpy().copy()
    row = SampleRow(params, prompt, output)
    for processor in params.logits_processors:
        processor.apply(changed, row)
    return torch.from_numpy(changed)[None]


def tokens(rng: random.Random, count: int, below: int = VOCAB) -> list[int]:
    return [rng.randrange(below) for _ in range(count)]


def test_default_params_have_no_logits_processor() -> None:
    assert SamplingParams().logits_processors == ()
    assert SamplingParams(temperature=0.3, top_k=4, logprobs=3).logits_processors == ()


@pytest.mark.parametrize("seed", range(10))
def test_logit_bias_adds_to_chosen_tokens(seed: int) -> None:
    rng = random.Random(seed)
    bias = {token: rng.uniform(-100, 100) for token in tokens(rng, 9)}
    processor = SequenceBiasLogitsProcessor([[[token], amount] for token, amount in bias.items()])
    scores = scores_of(seed)
    expected = processor(torch.tensor([[1, 2]]), scores)
    assert torch.allclose(after(SamplingParams(logit_bias=bias), scores, [1], [2]), expected)


@pytest.mark.parametrize("seed", range(10))
def test_allowed_tokens_forbids_all_others(seed: int) -> None:
    allowed = tokens(random.Random(seed), 7)
    processor = SuppressTokensLogitsProcessor([token for token in range(VOCAB) if token not in allowed])
    scores = scores_of(seed)
    expected = processor(torch.tensor([[1]]), scores)
    assert after(SamplingParams(allowed_token_ids=tuple(allowed)), scores, [1], []).equal(expected)


def test_bad_words_wherever_prompt_and_output_meet() -> None:
    """Few tokens and many words, so that words of every length end here and there."""
    forbidden = 0
    for seed in range(300):
        rng = random.Random(seed)
        words = [tokens(rng, rng.randint(1, 4), 3) for _ in range(rng.randint(1, 5))]
        prompt, output = tokens(rng, rng.randint(0, 4), 3), tokens(rng, rng.randint(0, 4), 3)
        if not prompt and not output:
            prompt = [0]
        scores = scores_of(seed)
        expected = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([96]))(
            torch.tensor([prompt + output]), scores
        )
        params = SamplingParams(bad_words=tuple(map(tuple, words)))
        assert after(params, scores, prompt, output).equal(expected), (words, prompt, output)
        forbidden += int((expected == -torch.inf).sum())
    assert forbidden > 200


def test_a_bad_word_needs_what_is_before_it() -> None:
    params = SamplingParams(bad_words=((4, 5), (6,)))
    for prompt, output, gone in (([], [], {6}), ([4], [], {5, 6}), ([], [4], {5, 6}), ([4], [1], {6})):
        changed = after(params, torch.zeros(1, VOCAB), prompt, output)
        assert set(np.flatnonzero(changed[0].numpy() == -np.inf).tolist()) == gone


@pytest.mark.parametrize("seed", range(10))
def test_repetition_penalty_counts_prompt_and_output_once(seed: int) -> None:
    rng = random.Random(seed)
    prompt, output = tokens(rng, 40), tokens(rng, 30)
    scores = scores_of(seed)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), scores.clone())
    assert torch.allclose(after(SamplingParams(repetition_penalty=1.7), scores, prompt, output), expected)


def test_frequency_and_presence_count_the_output_alone() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25)
    changed = after(params, torch.zeros(1, VOCAB), [8, 9], [3, 4, 3, 3])
    expected = torch.zeros(1, VOCAB)
    expected[0, 3], expected[0, 4] = 0.25 - 1.5, 0.25 - 0.5
    assert changed.equal(expected)


def test_bias_comes_before_the_penalty_of_repetition() -> None:
    params = SamplingParams(logit_bias={5: 4.0}, repetition_penalty=2.0, frequency_penalty=0.5)
    scores = torch.full((1, VOCAB), -3.0)
    assert after(params, scores, [5, 6], [5])[0, 5] == (-3.0 + 4.0) / 2.0 - 0.5
    assert after(params, scores, [5, 6], [5])[0, 6] == -3.0 * 2.0


class OnlyEven:
    """A mask."""

    def apply(self, scores: Scores) -> None:
        scores[1::2] = -np.inf


def chosen(row: SampleRow, scores: torch.Tensor) -> Any:
    (result,) = sample(scores, [row])
    return result


def test_forbidden_tokens_stay_forbidden() -> None:
    params = SamplingParams(
        temperature=0.0,
        logit_bias={7: 100.0, 8: 90.0, 10: 80.0, 12: 70.0, 14: 60.0},
        allowed_token_ids=(7, 8, 10, 12, 14),
        bad_words=((8,), (1, 10)),
        repetition_penalty=0.5,
        presence_penalty=-2.0,
    )
    scores = torch.zeros(1, VOCAB)
    assert chosen(SampleRow(params, [2], []), scores).token_id == 7
    assert chosen(SampleRow(params, [2], [], mask=OnlyEven()), scores).token_id == 10
    assert chosen(SampleRow(params, [8], [1, 8, 1], mask=OnlyEven()), scores).token_id == 12
    assert chosen(SampleRow(params, [1], [], suppress=(12,), mask=OnlyEven()), scores).token_id == 14
    nothing = chosen(SampleRow(params, [1], [], suppress=(12, 14), mask=OnlyEven()), scores)
    assert isinstance(nothing, SampleFailure)
    assert nothing.by_request


def test_sampling_never_gives_a_forbidden_token() -> None:
    params = SamplingParams(temperature=5.0, allowed_token_ids=(3, 4, 5, 6), bad_words=((4,),), seed=3)
    rows = [SampleRow(params, [1], range(n), mask=OnlyEven()) for n in range(200)]
    drawn = {chosen(row, scores_of(1)).token_id for row in rows}
    assert drawn == {6}
    drawn = {chosen(SampleRow(params, [1], range(n)), scores_of(1)).token_id for n in range(200)}
    assert drawn == {3, 5, 6}
