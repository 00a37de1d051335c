"""Log-probabilities of given tokens, against transformers and against one prefix at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.engine.batch import BatchError, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model, load_model
from diptych.engine.prompt_logprobs import prompt_logits, prompt_logprobs, target_logprobs
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample

VOCAB = 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["torch", "native"])
def model(folder: Path, request: pytest.FixtureRequest) -> Model:
    return load_model(folder, torch.float32, backend=request.param)


def text(count: int) -> list[int]:
    tokens: list[int] = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return tokens


def scored(model: Model, tokens: list[int], chunk: int) -> np.ndarray:
    memory = KVMemory(model.kv_layout(16), 6)
    return prompt_logprobs(Runner(model, 1), memory, [4, 1, 5, 0, 2, 3], tokens, chunk)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_every_position_is_what_transformers_says(folder: Path, model: Model, chunk: int) -> None:
    tokens = text(50)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logs = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = logs[torch.arange(49), torch.tensor(tokens[1:])]
    actual = scored(model, tokens, chunk)
    assert actual.shape == (49,)
    torch.testing.assert_close(torch.from_numpy(actual), expected, atol=2e-4, rtol=0)


def test_a_sampled_token_has_the_same_log_probability(model: Model) -> None:
    memory, tokens = KVMemory(model.kv_layout(16), 4), text(20)
    logits = Runner(model, 1).step([SequenceStep(memory, [0, 1], 0, tokens, True)])
    (one,) = sample(logits, [SampleRow(SamplingParams(temperature=0.0, logprobs=0), tokens, [])])
    assert isinstance(one, Sampled)
    assert one.score is not None
    assert scored(model, [*tokens, one.token_id], 32)[-1] == pytest.approx(one.score.logprob, abs=1e-5)


def test_chunks_come_in_order_with_a_row_for_each_token(model: Model) -> None:
    memory = KVMemory(model.kv_layout(16), 4)
    parts = list(prompt_logits(Runner(model, 1), memory, range(4), text(37), 16))
    assert [(start, tuple(logits.shape)) for start, logits in parts] == [
        (0, (16, VOCAB)),
        (16, (16, VOCAB)),
        (32, (5, VOCAB)),
    ]


def test_one_token_has_nothing_to_be_judged_by(model: Model) -> None:
    assert scored(model, [5], 8).shape == (0,)
    assert scored(model, [], 8).shape == (0,)


def test_a_text_that_does_not_fit_is_refused(model: Model) -> None:
    with pytest.raises(BatchError, match="do not fit"):
        scored(model, text(97), 16)
    with pytest.raises(BatchError, match="vocabulary"):
        scored(model, [1, VOCAB], 16)
    with pytest.raises(ValueError, match="chunk"):
        scored(model, text(3), 0)


def test_extreme_logits_neither_overflow_nor_lose_the_rest() -> None:
    logits = torch.tensor([[1e30, 0.0, -1e30], [-200.0, -201.0, -202.0], [0.0, float("-inf"), 0.0]])
    expected = [0.0, -1.4076059, float("-inf")]
    assert target_logprobs(logits, [0, 1, 1]) == pytest.approx(expected)


def test_rows_that_are_not_finite_give_nan_and_spare_their_neighbours() -> None:
    logits = torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0], [0.0, 0.0], [9.0, 9.0]])
    scores = target_logprobs(logits, [0, 1, 1])
    assert np.isnan(scores[:2]).all()
    assert scores[2] == pytest.approx(np.log(0.5))
