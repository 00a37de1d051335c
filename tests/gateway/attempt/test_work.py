"""The `Work` message of an attempt: every parameter of the request, and no other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diptych.parameters import Sampling
from diptych.worker.v1 import work_pb2
from gateway.attempt.work import Attempt, Job, TraceParent, build_work
from gateway.request.parsed_request import ParsedRequest

PLAIN = Sampling(0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, seed=5)
REQUEST = ParsedRequest(
    request_id="r",
    model="m",
    prompt_ids=(7, 8, 9),
    sampling=PLAIN,
    max_tokens=20,
    min_tokens=0,
    stop=(),
    stop_token_ids=(),
    ignore_eos=False,
    include_stop=False,
    time_limit_s=None,
    want_text=True,
    want_token_ids=True,
    skip_special=True,
    stream_interval=1,
    want_timings=True,
    salt="",
    cache_read=True,
    cache_write=True,
    priority=0,
    session_id="",
)


def built(
    attempt: Attempt | None = None, deadline: float | None = None, waited_s: float = 0.0, **changes: Any
) -> work_pb2.Work:
    request = dataclasses.replace(REQUEST, **changes)
    job = Job("r~1", request, 20, (2,), deadline, TraceParent("parent", "state"))
    return build_work(job, attempt or Attempt(1, (7, 8, 9), False), b"n" * 32, 100.0, waited_s)


def test_plain_request_sets_no_optional_field() -> None:
    work = built()
    assert (work.id.request_id, work.id.attempt) == ("r~1", 1)
    assert (list(work.token_ids), work.prompt_tokens) == ([7, 8, 9], 3)
    assert list(work.choices) == [0]
    assert work.sampling.seed == 5
    assert not work.sampling.HasField("logprobs")
    assert not work.HasField("prompt_logprobs")
    assert not work.HasField("time_left")
    assert not work.sampling.HasField("grammar")
    assert (work.traceparent, work.tracestate) == ("parent", "state")


def test_every_sampling_parameter_is_sent() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.75,
        top_k=4,
        min_p=0.125,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        seed=2**64 - 1,
        logit_bias={4: -1.5, 9: 2.0},
        allowed_token_ids=(9, 4),
        bad_words=((1, 2), (3,)),
        top_n_sigma=1.5,
    )
    message = built(sampling=sampling, logprobs=3).sampling
    for field in dataclasses.fields(Sampling):
        value, sent = getattr(sampling, field.name), getattr(message, field.name)
        if field.name == "logit_bias":
            assert dict(sent) == value
        elif field.name == "bad_words":
            assert tuple(tuple(word.ids) for word in sent) == value
        else:
            assert (tuple(sent) if isinstance(value, tuple) else sent) == value, field.name
    assert message.logprobs == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"logprobs": 0}, 0),
        ({"logprobs": 7}, 7),
        ({"best_of": 4}, 0),  # the best are chosen by their log-probabilities
        ({"best_of": 4, "logprobs": 2}, 2),
        ({"beam_width": 4}, None),
    ],
)
def test_logprobs_are_requested_where_needed(changes: dict[str, Any], expected: int | None) -> None:
    message = built(**changes).sampling
    assert (message.logprobs if message.HasField("logprobs") else None) == expected


def test_beam_width_choices_and_prompt_logprobs_are_sent() -> None:
    attempt = Attempt(4, (7, 8, 9, 11), True, choices=(1, 3))
    work = built(attempt, beam_width=6, n=4, prompt_logprobs=0)
    assert (work.id.attempt, work.sampling.beam_width, list(work.choices)) == (4, 6, [1, 3])
    assert (list(work.token_ids), work.prompt_tokens) == ([7, 8, 9, 11], 3)
    assert work.reserve_worst_case
    assert work.HasField("prompt_logprobs")
    assert work.prompt_logprobs == 0


def test_stopping_and_time_left_are_sent() -> None:
    work = built(deadline=101.5, min_tokens=30, cache_read=False, priority=-4)
    assert (work.stopping.max_tokens, work.stopping.min_tokens) == (20, 20)
    assert list(work.stopping.stop_token_ids) == [2]
    assert work.time_left.ToTimedelta().total_seconds() == pytest.approx(1.5)
    assert built(deadline=99.0).time_left.ToTimedelta().total_seconds() == 0.0
    assert (work.cache_read, work.cache_write, work.priority) == (False, True, -4)


def test_queue_wait_is_sent_when_it_is_long_enough() -> None:
    assert built(waited_s=1.25).waited.ToTimedelta().total_seconds() == 1.25
    assert not built(waited_s=0.001).HasField("waited")
