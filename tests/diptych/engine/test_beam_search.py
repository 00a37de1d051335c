"""Beam search against transformers' own on small random models, and against every possible answer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.engine.beam_search import Beam, BeamSearch, Fork, candidates_wanted, deciding
from diptych.engine.generate import GenerationFailed, generate, generate_choices
from diptych.engine.generate_beams import generate_beams
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model, load_model
from diptych.engine.runner import Runner
from diptych.engine.sampling import Candidate, SamplingParams, TokenLogprob
from tests.forms import sampled

VOCAB = 29
STOP = 3
STOPS = (STOP, 11, 20)
GREEDY = SamplingParams(temperature=0.0)

# ---- a model made of nothing but random numbers


def log_probabilities(seed: int, prefix: Sequence[int], vocab: int) -> list[float]:
    """Return a distribution that depends on all of the prefix."""
    rng = random.Random(f"{seed} {prefix}")
    weights = [rng.expovariate(1.0) for _ in range(vocab)]
    total = sum(weights)
    return [math.log(weight / total) for weight in weights]


def searched(seed: int, width: int, vocab: int, max_tokens: int, stop_ids: Sequence[int]) -> BeamSearch:
    search = BeamSearch(width, stop_ids=stop_ids, max_tokens=max_tokens)
    wanted = candidates_wanted(width, stop_ids)
    while not search.done:
        search.advance(
            [
                sorted(
                    itertools.starmap(Candidate, enumerate(log_probabilities(seed, beam.token_ids, vocab))),
                    key=lambda candidate: -candidate.logprob,
                )[:wanted]
                for beam in search.live
            ]
        )
    return search


def every_answer(
    seed: int, vocab: int, max_tokens: int, stop_ids: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """Return all complete answers with their log-probability per token."""
    open_ends, complete = {(): 0.0}, {}
    for length in range(1, max_tokens + 1):
        longer = {}
        for prefix, total in open_ends.items():
            for token, log in enumerate(log_probabilities(seed, prefix, vocab)):
                if token in stop_ids or length == max_tokens:
                    complete[(*prefix, token)] = (total + log) / length
                else:
                    longer[(*prefix, token)] = total + log
        open_ends = longer
    return complete


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), vocab=st.integers(2, 4), max_tokens=st.integers(1, 4), stops=st.integers(0, 2)
)
def test_beams_as_wide_as_the_world_find_the_best_answers_of_all(
    seed: int, vocab: int, max_tokens: int, stops: int
) -> None:
    stop_ids = range(min(stops, vocab - 1))
    complete = every_answer(seed, vocab, max_tokens, stop_ids)
    found = searched(seed, len(complete), vocab, max_tokens, stop_ids).result(len(complete))
    expected = sorted(complete, key=lambda answer: -complete[answer])
    assert [beam.token_ids for beam in found] == expected
    assert [beam.normalised for beam in found] == pytest.approx([complete[answer] for answer in expected])


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 6),
    vocab=st.integers(2, 9),
    max_tokens=st.integers(1, 8),
    stops=st.integers(0, 3),
)
def test_any_search_ends_with_different_answers_that_are_complete(
    seed: int, width: int, vocab: int, max_tokens: int, stops: int
) -> None:
    stop_ids = range(min(stops, vocab - 1))
    found = searched(seed, width, vocab, max_tokens, stop_ids).result(width)
    answers = list(dict.fromkeys(beam.token_ids for beam in found))
    complete = every_answer(seed, vocab, min(max_tokens, 4), stop_ids)
    assert len(answers) == width or len(complete) < width
    assert [beam.normalised for beam in found] == sorted((b.normalised for b in found), reverse=True)
    for answer in answers:
        assert answer[-1] in stop_ids or len(answer) == max_tokens
        assert not set(answer[:-1]) & set(stop_ids)


# ---- details


def candidates_of(**logprobs: float) -> list[Candidate]:
    return [Candidate(int(name[1:]), log) for name, log in logprobs.items()]


def test_forks_name_the_beam_they_continue() -> None:
    search = BeamSearch(2, stop_ids=[9], max_tokens=5)
    assert search.first(candidates_of(t1=-1.0, t2=-2.0, t3=-3.0)) == [Fork(0, 1), Fork(0, 2)]
    forks = search.advance([candidates_of(t4=-3.0, t5=-9.0), candidates_of(t6=-1.0, t7=-1.5)])
    assert forks == [Fork(1, 6), Fork(1, 7)]
    assert [beam.token_ids for beam in search.live] == [(2, 6), (2, 7)]


def test_a_stop_beyond_the_first_width_is_not_kept() -> None:
    search = BeamSearch(2, stop_ids=[9], max_tokens=5)
    assert search.first(candidates_of(t1=-1.0, t2=-2.0, t9=-3.0)) == [Fork(0, 1), Fork(0, 2)]
    assert search.result(2) == []
    search = BeamSearch(2, stop_ids=[9], max_tokens=5)
    search.first(candidates_of(t1=-1.0, t9=-2.0, t2=-3.0))
    assert [beam.token_ids for beam in search.result(1)] == [(9,)]


def test_search_ends_when_no_live_beam_beats_the_worst_answer() -> None:
    search = BeamSearch(1, stop_ids=[9], max_tokens=50)
    assert search.first(candidates_of(t9=-0.5, t1=-0.6)) == []
    assert search.done
    search = BeamSearch(1, stop_ids=[9], max_tokens=50)
    assert search.first(candidates_of(t1=-1.0, t9=-1.1)) == [Fork(0, 1)]
    assert not search.advance([candidates_of(t9=-0.1, t2=-3.0)]), "-1.1 / 2 beats -4 / 2"
    assert [beam.token_ids for beam in search.result(1)] == [(1, 9)]


def test_processors_that_allow_fewer_answers_repeat_the_last() -> None:
    search = BeamSearch(3, stop_ids=[9], max_tokens=2)
    search.first(candidates_of(t1=-1.0))
    search.advance([candidates_of(t9=-1.0, t2=-2.0)])
    assert [beam.token_ids for beam in search.result(3)] == [(1, 9), (1, 2), (1, 2)]
    search = BeamSearch(3, stop_ids=[9], max_tokens=2)
    assert search.first([]) == []
    assert search.done
    assert search.result(3) == []


def test_scores_travel_with_their_tokens() -> None:
    search = BeamSearch(1, stop_ids=[], max_tokens=2)
    one, two = TokenLogprob(-1.0, 1, ()), TokenLogprob(-2.0, 3, ((4, -0.5),))
    search.first([Candidate(1, -1.0, one)])
    search.advance([[Candidate(2, -0.5, two)]])
    assert search.result(1) == [Beam((1, 2), -1.5, (one, two))]


def test_beam_search_refuses_bad_arguments() -> None:
    for width, max_tokens in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            BeamSearch(width, stop_ids=[], max_tokens=max_tokens)
    search = BeamSearch(2, stop_ids=[], max_tokens=3)
    search.first(candidates_of(t1=-1.0, t2=-2.0))
    with pytest.raises(ValueError, match="2 are live"):
        search.advance([candidates_of(t1=-1.0)])


# ---- transformers


@pytest.fixture(scope="module", params=sampled(range(3), [0]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(request.param)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        initializer_range=0.2,
        eos_token_id=STOP,
        bos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, torch.float32, backend="torch")


def ours(
    model: Model,
    prompt: list[int],
    width: int,
    stop_ids: Sequence[int],
    params: SamplingParams,
    **options: int,
) -> list[Beam]:
    memory, pool = KVMemory(model.kv_layout(16), 96), BlockPool(96)
    beams = generate_beams(
        Runner(model, 1), memory, pool, prompt, params, width=width, count=width, stop_ids=stop_ids, **options
    )
    assert pool.available() == pool.total
    return beams


def theirs(
    oracle: Any, prompt: list[int], width: int, stop_ids: Sequence[int], **options: Any
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Answers with what follows a stop token cut off, and their scores."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    answers = []
    for row in whole.sequences[:, len(prompt) :].tolist():
        ends = [n for n, token in enumerate(row) if token in stop_ids]
        answers.append(tuple(row[: ends[0] + 1] if ends else row))
    return answers, whole.sequences_scores.tolist()


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]


@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("stop_ids", [(), (STOP,), STOPS])
def test_answers_and_scores_are_those_of_transformers(
    oracle: Any, model: Model, width: int, stop_ids: tuple[int, ...]
) -> None:
    if not stop_ids:
        oracle.generation_config.eos_token_id = None
    lengths = set()
    for seed in range(5):
        prompt = prompt_of(seed)
        expected, scores = theirs(oracle, prompt, width, stop_ids, max_new_tokens=14)
        found = ours(model, prompt, width, stop_ids, GREEDY, max_tokens=14)
        assert [beam.token_ids for beam in found] == expected
        assert [beam.normalised for beam in found] == pytest.approx(scores, abs=1e-4)
        lengths |= {len(answer) for answer in expected}
    assert (len(lengths) > 1) == (stop_ids == STOPS) or len(stop_ids) == 1, "stop tokens should occur"


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        (
            {"bad_words": ((5,), (7, 8), (9, 2, 6))},
            {"bad_words_ids": [[5], [7, 8], [9, 2, 6]]},
        ),
        (
            {"logit_bias": {STOP: 1.5, 4: -2.0}},
            {"sequence_bias": [[[STOP], 1.5], [[4], -2.0]]},
        ),
        ({"min_tokens": 11}, {"min_new_tokens": 11}),
    ],
)
def test_logits_processors_change_the_beams_as_in_transformers(
    oracle: Any, model: Model, rules: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    rules = dict(rules)
    min_tokens = rules.pop("min_tokens", 0)
    plain = 0
    for seed in range(4):
        prompt = prompt_of(100 + seed)
        expected, _ = theirs(oracle, prompt, 4, STOPS, max_new_tokens=12, **options)
        params = SamplingParams(temperature=0.0, **rules)
        found = ours(model, prompt, 4, STOPS, params, max_tokens=12, min_tokens=min_tokens)
        assert [beam.token_ids for beam in found] == expected
        plain += theirs(oracle, prompt, 4, STOPS, max_new_tokens=12)[0] == expected
    assert plain < 4, "the rule should have changed something"


def test_scores_are_the_models_own(model: Model) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias={4: 3.0})
    prompt = prompt_of(1)
    for beam in ours(model, prompt, 3, (STOP,), params, max_tokens=6):
        memory, pool = KVMemory(model.kv_layout(16), 8), BlockPool(8)
        logs = []
        for n, token in enumerate(beam.token_ids):
            before = [*prompt, *beam.token_ids[:n]]
            only = SamplingParams(temperature=0.0, allowed_token_ids=(token,), logprobs=2)
            ((one,),) = generate_choices(Runner(model, 1), memory, pool, before, only, count=1, max_tokens=1)
            assert one.score is not None
            logs.append(one.score.logprob)
        assert [score.logprob for score in beam.scores if score] == pytest.approx(logs, abs=1e-5)
        assert all(score and len(score.top) == 2 for score in beam.scores)


def test_generate_beams_of_one_allowed_answer_and_of_none(model: Model) -> None:
    only = SamplingParams(temperature=0.0, allowed_token_ids=(7,))
    assert [beam.token_ids for beam in ours(model, [1, 2], 3, (), only, max_tokens=4)] == [(7,) * 4] * 3
    nothing = SamplingParams(temperature=0.0, allowed_token_ids=(7,), bad_words=((7,),))
    with pytest.raises(GenerationFailed, match="forbidden"):
        ours(model, [1, 2], 3, (), nothing, max_tokens=4)
    memory, pool = KVMemory(model.kv_layout(16), 8), BlockPool(8)
    with pytest.raises(GenerationFailed, match="forbidden"):
        generate(Runner(model, 1), memory, pool, [1, 2], nothing, max_tokens=4)


@pytest.mark.parametrize("seed", range(60))
def test_a_few_candidates_decide_as_all_of_them_do(seed: int) -> None:
    rng = random.Random(seed)
    vocab, width, max_tokens = rng.choice([8, 40]), rng.choice([1, 2, 5]), rng.choice([1, 3, 6])
    stop_ids = rng.sample(range(vocab), rng.choice([0, 1, 3, vocab - 1]))
    whole, thinned = (BeamSearch(width, stop_ids=stop_ids, max_tokens=max_tokens) for _ in range(2))
    while not whole.done:
        beams = [
            sorted(
                itertools.starmap(Candidate, enumerate(log_probabilities(seed, beam.token_ids, vocab))),
                key=lambda candidate: -candidate.logprob,
            )[: candidates_wanted(width, stop_ids)]
            for beam in whole.live
        ]
        few = [
            [beam[place] for place in deciding([one.token_id for one in beam], width, stop_ids)]
            for beam in beams
        ]
        assert max(map(len, few)) <= 2 * width
        assert whole.advance(beams) == thinned.advance(few)
    assert whole.result(width) == thinned.result(width)
