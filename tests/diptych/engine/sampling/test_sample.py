"""Sampling against transformers' logits processors, and its draws against chance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diptych.engine.sampling import (
    Sampled,
    SampleFailure,
    SampleRow,
    SamplingParams,
    distribution,
    sample,
    uniform,
)

VOCAB = 211
GREEDY = SamplingParams(temperature=0.0)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def tokens(results: list[Sampled | SampleFailure]) -> list[int]:
    assert all(isinstance(result, Sampled) for result in results)
    return [result.token_id for result in results if isinstance(result, Sampled)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_k=VOCAB + 100),
        SamplingParams(temperature=1.9, top_p=0.8),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=2.0, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.05),
    ],
)
def test_the_distribution_is_that_of_transformers(params: SamplingParams) -> None:
    for seed in range(20):
        scores = logits(1, seed)
        expected = TemperatureLogitsWarper(params.temperature)(None, scores)
        if params.top_k:
            expected = TopKLogitsWarper(params.top_k)(None, expected)
        if params.top_p < 1:
            expected = TopPLogitsWarper(params.top_p)(None, expected)
        if params.min_p:
            expected = MinPLogitsWarper(params.min_p)(None, expected)
        ids, weights = distribution(scores[0].numpy(), params)
        got = torch.zeros(VOCAB, dtype=torch.float64)
        got[torch.tensor(ids)] = torch.from_numpy(weights / weights.sum())
        torch.testing.assert_close(got, torch.softmax(expected[0], -1).double(), atol=1e-6, rtol=1e-4)


def test_repetition_penalty_is_that_of_transformers() -> None:
    prompt, output = [3, 5, 5, 9], [7, 3]
    scores = logits(40)
    scores[:, [3, 5, 7, 9]] += 4.0  # so that the penalty decides in many rows
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt + output] * 40), scores.clone())
    rows = [SampleRow(replace(GREEDY, repetition_penalty=1.8), prompt, output)] * 40
    assert tokens(sample(scores, rows)) == expected.argmax(-1).tolist() != scores.argmax(-1).tolist()


def test_frequency_counts_and_presence_does_not() -> None:
    scores = torch.zeros(1, VOCAB)
    scores[0, 4], scores[0, 8], scores[0, 15] = 10.0, 9.0, 8.0

    def best(**penalties: float) -> int:
        row = SampleRow(replace(GREEDY, **penalties), prompt_ids=[4, 4, 4], output_ids=[4, 4, 4, 8])
        return tokens(sample(scores, [row]))[0]

    assert best() == 4
    assert best(presence_penalty=0.5) == 4, "both lose the same"
    assert best(frequency_penalty=0.6) == 8, "three times 0.6 against once 0.6"
    assert best(presence_penalty=2.5) == 15


def test_an_empty_history_penalises_nothing() -> None:
    params = replace(GREEDY, repetition_penalty=1.5, frequency_penalty=1.0)
    scores = logits(1)
    assert tokens(sample(scores, [SampleRow(params, [], [])])) == scores.argmax(-1).tolist()


def test_rows_do_not_see_one_another() -> None:
    scores = logits(9)
    rows = [
        SampleRow(SamplingParams(temperature=t, top_k=k, top_p=p, seed=i), [1], [2] * i, (3,) * (i % 2))
        for i, (t, k, p) in enumerate([(0.0, 0, 1.0), (0.8, 0, 1.0), (1.2, 7, 0.9)] * 3)
    ]
    together = sample(scores, rows)
    alone = [sample(scores[i : i + 1], rows[i : i + 1])[0] for i in range(9)]
    assert together == alone
    assert scores.equal(logits(9)), "the input is not changed"


def test_sampled_tokens_follow_the_probabilities() -> None:
    scores = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125])).repeat(4000, 1)
    params = SamplingParams(temperature=1.0, seed=77)
    drawn = tokens(sample(scores, [SampleRow(params, [], range(i)) for i in range(4000)]))
    counts = torch.bincount(torch.tensor(drawn), minlength=4).double()
    expected = torch.tensor([2000.0, 1000.0, 500.0, 500.0], dtype=torch.float64)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3, "p = 0.001 at three degrees of freedom"


def test_the_sampled_token_is_a_function_of_seed_and_counter() -> None:
    draws = {uniform(seed, counter) for seed in range(50) for counter in range(50)}
    assert len(draws) == 2500
    assert all(0 <= u < 1 for u in draws)
    assert uniform(2**64 - 1, 3) == uniform(-1, 3)


def test_denormal_temperature_is_greedy() -> None:
    scores = logits(1)
    params = SamplingParams(temperature=5e-324, seed=3)
    assert tokens(sample(scores, [SampleRow(params, [], [])])) == scores.argmax(-1).tolist()


def test_logprob_is_that_of_the_model() -> None:
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    row = SampleRow(replace(GREEDY, repetition_penalty=1.1, logprobs=1), [], [], suppress=[0])
    (result,) = sample(scores, [row])
    assert isinstance(result, Sampled)
    assert result.score is not None
    assert (result.token_id, result.score.rank) == (1, 2)
    assert result.score.logprob == pytest.approx(math.log(0.3))
    assert result.score.top == ((0, pytest.approx(math.log(0.5))),)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)])
def test_a_bad_row_fails_alone(bad: float, params: SamplingParams) -> None:
    scores = logits(3)
    scores[1, 40] = bad
    results = sample(scores, [SampleRow(params, [], [])] * 3)
    assert isinstance(results[1], SampleFailure)
    assert results[0] == sample(scores[:1], [SampleRow(params, [], [])])[0]
    assert isinstance(results[2], Sampled)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=4)])
def test_a_row_with_every_token_forbidden_fails(params: SamplingParams) -> None:
    row = SampleRow(params, [], [], suppress=range(VOCAB))
    (result,) = sample(logits(1), [row])
    assert result == SampleFailure("every token is forbidden", by_request=True)
    assert sample(torch.empty(0, VOCAB), []) == []
