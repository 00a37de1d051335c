"""The attempt that a worker reads from the gateway's message."""

from __future__ import annotations

from diptych.engine.sampling import SamplingParams, choice_seed
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt

OFF = {"top_p": 1.0, "repetition_penalty": 1.0}


def read(sampling: work_pb2.Sampling, **fields: object) -> Attempt:
    work = work_pb2.Work(
        id=work_pb2.AttemptId(request_id="r", attempt=2),
        token_ids=[5, 6, 7, 8],
        prompt_tokens=3,
        sampling=sampling,
        stopping=work_pb2.Stopping(max_tokens=50, min_tokens=2, stop_token_ids=[2]),
        **fields,  # type: ignore[arg-type]
    )
    return Attempt.from_work(work, max_context=20)


def test_every_sampling_parameter_is_read() -> None:
    attempt = read(
        work_pb2.Sampling(
            temperature=0.5,
            top_p=0.75,
            top_k=4,
            min_p=0.125,
            frequency_penalty=-0.5,
            presence_penalty=0.25,
            repetition_penalty=1.5,
            seed=11,
            logit_bias={4: -1.5},
            allowed_token_ids=[9, 4],
            bad_words=[work_pb2.TokenSequence(ids=[1, 2]), work_pb2.TokenSequence(ids=[3])],
            logprobs=0,
            top_n_sigma=1.5,
        )
    )
    assert attempt.params == SamplingParams(
        0.5, 0.75, 4, 0.125, -0.5, 0.25, 1.5, 11, {4: -1.5}, (9, 4), ((1, 2), (3,)), 1.5, logprobs=0
    )
    assert len(attempt.params.logits_processors) == 5, "each of them is applied"


def test_absent_parameters_are_off() -> None:
    attempt = read(work_pb2.Sampling(**OFF))  # type: ignore[arg-type]
    assert attempt.params == SamplingParams(temperature=0.0)
    assert attempt.params.logits_processors == ()
    assert attempt.prompt_logprobs is None
    assert attempt.grammar is None
    assert (attempt.prompt_ids, attempt.delivered_ids) == ([5, 6, 7], [8])
    assert attempt.max_tokens == 17, "the context ends there"


def test_choices_have_seeds_of_their_own() -> None:
    sampling = work_pb2.Sampling(temperature=1.0, seed=11, **OFF)  # type: ignore[arg-type]
    attempt = read(sampling, choices=[0, 3])
    assert {choice: params.seed for choice, params in attempt.choices.items()} == {
        0: 11,
        3: choice_seed(11, 3),
    }
    assert read(sampling).choices.keys() == {0}


def test_stop_tokens_are_forbidden_below_min_tokens() -> None:
    attempt = read(work_pb2.Sampling(**OFF))  # type: ignore[arg-type]
    assert attempt.sample_row(attempt.params, [8]).suppress == (2,)
    assert attempt.sample_row(attempt.params, [8, 9]).suppress == ()


def test_the_attempt_number_is_part_of_the_key() -> None:
    attempt = read(work_pb2.Sampling())
    assert attempt.key == ("r", 2)
    assert attempt.delivered_ids == [8]
