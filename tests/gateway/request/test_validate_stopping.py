"""Stopping criteria at their bounds and just beyond them."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.parameters import PARAMETERS
from diptych.runtime.errors import ContextLengthExceeded, InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.request.validate_stopping import Stopping, TokenBudget, prompt_budget, read_stopping

VOCAB = 1000
MOST_SECONDS = int(PARAMETERS["time_limit_s"].high)


def checked(**criteria: Any) -> Stopping:
    return read_stopping(pb.StoppingCriteria(**criteria), VOCAB)


@pytest.mark.parametrize(
    ("path", "criteria"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
        ("stop", {"stop": [str(index) for index in range(PARAMETERS["stop"].most + 1)]}),
        ("stop", {"stop": ["x"] * 100_000}),
        ("stop[1]", {"stop": ["x", ""]}),
        ("stop[0]", {"stop": ["x" * (PARAMETERS["stop"].longest + 1)]}),
        ("stop[0]", {"stop": ["é" * (PARAMETERS["stop"].longest // 2 + 1)]}),
        ("stop[0]", {"stop": ["x" * 1_000_000]}),
        ("stop_token_ids", {"stop_token_ids": [1] * (PARAMETERS["stop_token_ids"].most + 1)}),
        ("stop_token_ids[2]", {"stop_token_ids": [1, 2, VOCAB]}),
        ("time_limit", {"time_limit": {}}),
        ("time_limit", {"time_limit": {"seconds": -1}}),
        ("time_limit", {"time_limit": {"seconds": 1, "nanos": -1}}),
        ("time_limit", {"time_limit": {"seconds": 1, "nanos": 1_000_000_000}}),
        ("time_limit", {"time_limit": {"seconds": MOST_SECONDS, "nanos": 1}}),
        ("time_limit", {"time_limit": {"seconds": 2**63 - 1}}),
    ],
)
def test_bad_field_is_named(path: str, criteria: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        checked(**criteria)
    (violation,) = caught.value.violations
    assert violation.field == f"stopping.{path}"


@pytest.mark.parametrize(
    ("criteria", "field", "expected"),
    [
        ({"max_tokens": 1}, "max_tokens", 1),
        ({"max_tokens": 4, "min_tokens": 4}, "min_tokens", 4),
        ({"stop": ["x" * PARAMETERS["stop"].longest]}, "stop", ("x" * PARAMETERS["stop"].longest,)),
        ({"stop_token_ids": [VOCAB - 1] * PARAMETERS["stop_token_ids"].most}, "stop_token_ids", (VOCAB - 1,)),
        ({"time_limit": {"nanos": 1}}, "time_limit_s", 1e-9),
        ({"time_limit": {"seconds": MOST_SECONDS}}, "time_limit_s", PARAMETERS["time_limit_s"].high),
    ],
)
def test_a_field_at_its_limit_is_fine(criteria: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(checked(**criteria), field) == expected


def test_as_many_stop_strings_as_allowed() -> None:
    stops = [str(index) for index in range(PARAMETERS["stop"].most)]
    assert checked(stop=stops).stop == tuple(stops)


@pytest.mark.parametrize(
    ("criteria", "wanted"),
    [({}, 1), ({"max_tokens": 5}, 5), ({"min_tokens": 3}, 3), ({"max_tokens": 5, "min_tokens": 3}, 5)],
)
def test_what_a_request_insists_on(criteria: dict[str, Any], wanted: int) -> None:
    field = "stopping.max_tokens" if "max_tokens" in criteria else "stopping.min_tokens"
    assert prompt_budget(checked(**criteria), limit=100) == TokenBudget(100, wanted, field)


def test_a_budget_at_its_limit_and_one_over() -> None:
    TokenBudget(limit=10, wanted=4).check("text", 6)
    with pytest.raises(ContextLengthExceeded) as caught:
        TokenBudget(limit=10, wanted=4).check("text", 7)
    assert caught.value.metadata == {"prompt_tokens": "7", "max_tokens": "4", "limit": "10"}
    assert [violation.field for violation in caught.value.violations] == ["stopping.max_tokens"]
    with pytest.raises(ContextLengthExceeded) as caught:
        TokenBudget(limit=10, wanted=1).check("text", 10)  # with no output beside it
    assert [violation.field for violation in caught.value.violations] == ["text"]
