"""Several choices, beams and scores: the whole system against transformers and against one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from diptych.engine.generate import generate_choices
from diptych.engine.sampling import SamplingParams
from diptych.v1 import inference_pb2 as pb
from tests.end_to_end import reference, tiny_model
from tests.end_to_end.http_requests import teach_short_outputs
from tests.end_to_end.tiny_system import PROMPTS, Served, tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_seeded_choices_are_those_of_one_process(served: Served, streamed: bool) -> None:
    knobs = {"temperature": 0.9, "top_p": 0.95, "seed": 77, "repetition_penalty": 1.2}
    answers = served.ask(PROMPTS, streamed=streamed, sampling={**knobs, "n": 4}, stopping={"max_tokens": 40})
    engine = tiny_model.aggregated(served.folder)
    params = SamplingParams(**knobs)  # type: ignore[arg-type]
    for ids, answer in zip(PROMPTS, answers, strict=True):
        expected = generate_choices(*engine, ids, params, count=4, max_tokens=40, stop_ids=served.ends)
        assert tokens(answer) == [[one.token_id for one in choice] for choice in expected]
        assert len({tuple(choice) for choice in tokens(answer)}) == 4
        assert answer.usage.completion_tokens == sum(map(len, expected))
        assert answer.usage.prompt_tokens == len(ids)


def test_the_first_of_several_choices_is_what_comes_alone(served: Served) -> None:
    knobs = {"temperature": 1.0, "seed": 5}
    several = served.ask(PROMPTS, sampling={**knobs, "n": 3}, stopping={"max_tokens": 12})
    alone = served.ask(PROMPTS, sampling=knobs, stopping={"max_tokens": 12})
    assert [tokens(answer)[0] for answer in several] == [tokens(answer)[0] for answer in alone]
    greedy = served.ask(PROMPTS, sampling={"temperature": 0.0, "n": 3}, stopping={"max_tokens": 12})
    for answer in greedy:
        first, *others = tokens(answer)
        assert others == [first, first]


def test_the_best_of_several_choices(served: Served) -> None:
    knobs = {"temperature": 1.3, "seed": 9}
    kept = served.ask(PROMPTS, sampling={**knobs, "n": 2, "best_of": 6}, stopping={"max_tokens": 10})
    everything = served.ask(
        PROMPTS, sampling={**knobs, "n": 6}, stopping={"max_tokens": 10}, response={"logprobs": 0}
    )
    for best, made in zip(kept, everything, strict=True):
        totals = [sum(one.logprob for one in output.logprobs) for output in made.outputs]
        order = sorted(range(6), key=lambda index: -totals[index])
        assert tokens(best) == [tokens(made)[index] for index in order[:2]]
        assert best.usage.completion_tokens == made.usage.completion_tokens, "all that was made is billed"
        assert not best.outputs[0].logprobs


@pytest.mark.parametrize(("width", "n"), [(2, 1), (4, 4), (7, 3)])
def test_beams_are_those_of_transformers(served: Served, width: int, n: int) -> None:
    answers = served.ask(
        PROMPTS, streamed=n == 4, sampling={"beam_width": width, "n": n}, stopping={"max_tokens": 16}
    )
    ended = 0
    for ids, answer in zip(PROMPTS, answers, strict=True):
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            found = tiny_model.oracle(served.folder).generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=width,
                num_return_sequences=n,
                do_sample=False,
                max_new_tokens=16,
                pad_token_id=0,
                eos_token_id=served.ends,
            )
        expected = [without_padding(row, served.ends) for row in found[:, len(ids) :].tolist()]
        assert tokens(answer) == expected
        for output in answer.outputs:
            stopped = output.token_ids[-1] in served.ends
            ended += stopped
            assert output.finish_reason == (pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH)
    assert ended or n == 1, "some answers should end by themselves"


def without_padding(token_ids: list[int], ends: list[int]) -> list[int]:
    """What a beam of transformers holds up to its end."""
    length = next((place + 1 for place, token in enumerate(token_ids) if token in ends), None)
    return token_ids[:length]


@pytest.mark.parametrize("sampling", [{"temperature": 1.0, "seed": 3, "n": 2}, {"beam_width": 3, "n": 2}])
def test_scores_of_output_and_prompt_are_those_of_transformers(
    served: Served, sampling: dict[str, Any]
) -> None:
    answers = served.ask(
        PROMPTS,
        streamed=True,
        sampling=sampling,
        stopping={"max_tokens": 8},
        response={"logprobs": 4, "prompt_logprobs": 2, "echo_prompt": True},
    )
    for ids, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.prompt.token_ids) == ids
        first, *others = answer.prompt.logprobs
        assert first.token_id == ids[0]
        assert not first.HasField("logprob")
        check(others, ids[1:], tiny_model.log_softmax(served.folder, ids), 2)
        for output in answer.outputs:
            logs = tiny_model.log_softmax(served.folder, [*ids, *output.token_ids])
            check(output.logprobs, output.token_ids, logs[len(ids) - 1 :], 4)


def check(records: Sequence[pb.TokenLogprob], token_ids: Sequence[int], logs: torch.Tensor, top: int) -> None:
    """Each record against the row of log-probabilities that its token was chosen from."""
    assert [record.token_id for record in records] == list(token_ids)
    for record, row in zip(records, logs, strict=False):
        own = float(row[record.token_id])
        assert record.logprob == pytest.approx(own, abs=1e-4)
        # Another token may lie within rounding.
        assert int((row > own + 1e-4).sum()) < record.rank <= int((row > own - 1e-4).sum()) + 1
        best = row.topk(top)
        assert [one.logprob for one in record.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [one.rank for one in record.top] == list(range(1, top + 1))
        assert [float(row[one.token_id]) for one in record.top] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


def test_choices_and_beams_under_pressure_are_preempted_and_right(served: Served) -> None:
    prompts = [tiny_model.prompt(50 + n, 90) for n in range(6)]
    knobs = {"temperature": 1.0, "seed": 1, "n": 6}
    teach_short_outputs(served.stack.address)
    answers = served.ask(prompts, sampling=knobs, stopping={"max_tokens": 60, "ignore_eos": True})
    beams = served.ask(prompts, sampling={"beam_width": 6}, stopping={"max_tokens": 24, "ignore_eos": True})
    engine = tiny_model.aggregated(served.folder)
    params = SamplingParams(temperature=1.0, seed=1)
    for ids, answer, found in zip(prompts, answers, beams, strict=True):
        expected = generate_choices(*engine, ids, params, count=6, max_tokens=60)
        assert tokens(answer) == [[one.token_id for one in choice] for choice in expected]
        assert len(tokens(found)[0]) == 24
    assert served.stack.metric("decode", "diptych_preemptions_total") > 0, "the pool was not too small"


def test_bytes_over_tcp_make_no_difference(both_transports: tuple[Served, Served]) -> None:
    prompts = [reference.prompts()[index] for index in (0, 6, 13, 18, 22)]
    asked: list[dict[str, Any]] = [
        {
            "sampling": {"temperature": 1.0, "seed": 4, "n": 3},
            "response": {"logprobs": 1, "prompt_logprobs": 1},
        },
        {"sampling": {"beam_width": 4, "n": 2}, "response": {"logprobs": 1}},
    ]
    for options in asked:
        # Cold, so that there is something to hand over.
        asking = {"stopping": {"max_tokens": 20}, "cache": {"salt": f"bytes {options}"}, **options}
        here, there = (one.ask(prompts, **asking) for one in both_transports)
        assert [answer.outputs for answer in here] == [answer.outputs for answer in there]
        assert [answer.prompt.logprobs for answer in here] == [answer.prompt.logprobs for answer in there]
        assert all(answer.timings.kv_bytes_transferred for answer in there)
        assert not any(answer.timings.kv_bytes_transferred for answer in here)
