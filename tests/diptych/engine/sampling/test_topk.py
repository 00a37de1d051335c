"""Log-probabilities, ranks and alternatives against torch, and the candidates of beams."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.sampling import (
    Candidate,
    Sampled,
    SampleFailure,
    SampleRow,
    SamplingParams,
    candidates,
    choice_seed,
    sample,
    token_logprobs,
    top_logprobs,
)
from diptych.engine.sampling.topk import topk

VOCAB = 4099  # no multiple of anything


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_topk_equals_a_sort(data: st.DataObject) -> None:
    size, count = data.draw(st.integers(1, 700)), data.draw(st.integers(0, 720))
    seed, spread = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from([2, 50, 10**6]))
    rng = np.random.default_rng(seed)
    row = rng.integers(0, spread, size).astype(np.float32)  # few values: many ties
    row[rng.random(size) < data.draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))] = -np.inf
    expected = [int(i) for i in np.argsort(-row, kind="stable")[:count] if row[i] > -np.inf]
    assert topk(row, count).tolist() == expected


def test_top_logprobs_are_log_probabilities() -> None:
    row = logits(1)[0]
    logs, ids = row.log_softmax(-1).topk(20)
    found = top_logprobs(row.numpy(), 20)
    assert [token for token, _ in found] == ids.tolist()
    assert [log for _, log in found] == pytest.approx(logs.tolist(), abs=1e-5)


def test_token_logprobs_equal_torch() -> None:
    scores = logits(30)
    logs = scores.log_softmax(-1)
    told = [n * 131 % VOCAB for n in range(29)] + [int(scores[29].argmax())]
    for row, token, score in zip(logs, told, token_logprobs(scores, told, 5), strict=True):
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert score.rank == int((row > row[token]).sum()) + 1
        assert [token for token, _ in score.top] == row.topk(5).indices.tolist()
        assert [log for _, log in score.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-5)
    assert score.rank == 1
    assert token_logprobs(scores, [4], 0)[0].top == ()
    assert token_logprobs(scores, [], 3) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_token_logprobs_refuses_rows_that_are_not_finite(bad: float) -> None:
    scores = logits(2)
    scores[1, 9] = bad
    assert len(token_logprobs(scores, [1], 0)) == 1
    with pytest.raises(ValueError, match="finite"):
        token_logprobs(scores, [1, 1], 0)
    good, failed = candidates(scores, [SampleRow(SamplingParams(), [], [])] * 2, 3)
    assert isinstance(good, list)
    assert isinstance(failed, SampleFailure)
    assert not failed.by_request


def test_logprobs_come_where_asked_for_and_ignore_processors() -> None:
    scores = logits(3)
    best = int(scores[0].argmax())
    plain, scored, biased = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=3.0, logprobs=1, logit_bias={best: -50.0}, repetition_penalty=3.0, seed=5),
    )
    same = scores[:1].repeat(3, 1)
    results = sample(same, [SampleRow(params, [1, 2], [3]) for params in (plain, scored, biased)])
    assert results[0] == Sampled(best)
    for result in results[1:]:
        assert isinstance(result, Sampled)
        assert [result.score] == token_logprobs(same, [result.token_id], 1)
        assert result.score is not None
        assert result.score.top[0][0] == best


def test_candidates_are_the_likeliest_after_logits_processors() -> None:
    scores = logits(2)
    logs = scores.log_softmax(-1)
    first = int(logs[0].argmax())
    params = SamplingParams(temperature=0.0, logit_bias={first: -30.0, 17: 40.0}, logprobs=2)
    plain, ruled = candidates(scores, [SampleRow(SamplingParams(), [], []), SampleRow(params, [], [])], 6)
    assert isinstance(plain, list)
    assert [one.token_id for one in plain] == logs[0].topk(6).indices.tolist()
    assert [one.logprob for one in plain] == pytest.approx(logs[0].topk(6).values.tolist(), abs=1e-5)
    assert {one.score for one in plain} == {None}
    assert isinstance(ruled, list)
    changed = logs[1].clone()
    changed[first] -= 30.0
    changed[17] += 40.0
    assert [one.token_id for one in ruled] == changed.topk(6).indices.tolist()
    assert ruled[0].token_id == 17
    assert ruled[0].logprob == pytest.approx(float(changed[17]), abs=1e-4), "what the beam's score grows by"
    assert [one.score for one in ruled] == token_logprobs(
        scores[1:].repeat(6, 1), [one.token_id for one in ruled], 2
    )


def test_fewer_candidates_where_processors_allow_fewer() -> None:
    few = SamplingParams(allowed_token_ids=(5, 9, 12), bad_words=((9,),))
    none = SamplingParams(allowed_token_ids=(9,), bad_words=((9,),))
    some, nothing = candidates(logits(2), [SampleRow(few, [], []), SampleRow(none, [], [])], 8)
    assert isinstance(some, list)
    assert {one.token_id for one in some} == {5, 12}
    assert all(isinstance(one, Candidate) for one in some)
    assert isinstance(nothing, SampleFailure)
    assert nothing.by_request


def test_each_choice_has_a_seed_of_its_own() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(-1, 0) == 2**64 - 1
    seeds = {choice_seed(seed, choice) for seed in range(30) for choice in range(128)}
    assert len(seeds) == 30 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(-1, 5) == choice_seed(2**64 - 1, 5)
