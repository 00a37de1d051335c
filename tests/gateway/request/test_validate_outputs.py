"""How many outputs, and what is told of their tokens: at each limit, one above, and what excludes what."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.request.validate_outputs import Outputs, outputs


def checked(response: dict[str, Any] | None = None, **knobs: Any) -> Outputs:
    return outputs(pb.SamplingParams(**knobs), pb.ResponseOptions(**(response or {})))


def test_absent_is_one_output_without_scores() -> None:
    nothing = Outputs(n=1, best_of=None, beam_width=None, logprobs=None, prompt_logprobs=None, echo=False)
    assert checked() == nothing
    assert checked({"echo_prompt": False}, n=1, best_of=1, beam_width=1) == nothing


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"n": limits.MAX_N}, (limits.MAX_N, None, None)),
        ({"best_of": limits.MAX_N}, (1, limits.MAX_N, None)),
        ({"n": 3, "best_of": 3}, (3, None, None)),
        ({"n": 3, "best_of": 4}, (3, 4, None)),
        ({"beam_width": limits.MAX_BEAM_WIDTH}, (1, None, limits.MAX_BEAM_WIDTH)),
        ({"beam_width": 2, "n": 2, "best_of": 2, "temperature": 0.0}, (2, None, 2)),
        ({"beam_width": 4, "temperature": limits.GREEDY_BELOW_TEMPERATURE / 2}, (1, None, 4)),
        ({"n": 4, "temperature": 0.0}, (4, None, None)),  # the same text four times is a legal wish
    ],
)
def test_counts_at_their_limits(knobs: dict[str, Any], expected: tuple[object, ...]) -> None:
    made = checked(**knobs)
    assert (made.n, made.best_of, made.beam_width) == expected


@pytest.mark.parametrize(
    ("field", "knobs"),
    [
        ("n", {"n": 0}),
        ("n", {"n": limits.MAX_N + 1}),
        ("n", {"n": 2**32 - 1}),
        ("best_of", {"best_of": 0}),
        ("best_of", {"best_of": limits.MAX_N + 1}),
        ("best_of", {"n": 4, "best_of": 3}),
        ("best_of", {"n": 2, "best_of": 3, "beam_width": 4}),
        ("beam_width", {"beam_width": 0}),
        ("beam_width", {"beam_width": limits.MAX_BEAM_WIDTH + 1}),
        ("beam_width", {"beam_width": 3, "n": 4}),
        ("beam_width", {"beam_width": 1, "n": 2}),
        ("temperature", {"beam_width": 2, "temperature": 0.5}),
        ("seed", {"beam_width": 2, "seed": 0}),
    ],
)
def test_counts_beyond_are_refused_by_name(field: str, knobs: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        checked(**knobs)
    assert [violation.field for violation in caught.value.violations] == [f"sampling.{field}"]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_alternatives_beside_a_token(name: str) -> None:
    for count in (0, 1, limits.MAX_LOGPROBS):
        assert getattr(checked({name: count}), name) == count
    with pytest.raises(InvalidParameter) as caught:
        checked({name: limits.MAX_LOGPROBS + 1})
    assert [violation.field for violation in caught.value.violations] == [f"response.{name}"]


def test_the_prompt_comes_back_if_asked_for() -> None:
    assert checked({"echo_prompt": True}).echo
