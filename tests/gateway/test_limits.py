"""Every limit of `gateway.limits`, at the limit and above; a new one without a test fails here."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diptych.parameters import GREEDY_BELOW, PARAMETERS, Parameter
from diptych.runtime.errors import InvalidParameter
from diptych.runtime.tokenizer.control_tokens import ControlTokens
from diptych.v1 import inference_pb2 as pb
from gateway import limits, tokenizer_service
from gateway.frontends.openai.chat_request import read_chat
from gateway.frontends.openai.completions_request import read_completions
from gateway.model.chat_template import ChatTemplate, Message, RenderRefused
from gateway.model.served_model import ServedModel
from gateway.request.validation import parse_request

TESTS = Path(__file__).parents[1]
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """``make(value)`` is a request that has ``value`` of what is bounded; ``above`` the first that is bad."""

    field: str
    make: Callable[[Any], Changes]
    above: Any = None  # default: one more


def next_float32(value: float, step: int = 1) -> float:
    """Return the neighbour of a positive float32, away from zero."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    (neighbour,) = struct.unpack("<f", struct.pack("<i", bits + step))
    return float(neighbour)


def sampling(name: str) -> Callable[[Any], Changes]:
    return lambda value: {"sampling": {name: value}}


def stopping(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Changes]:
    return lambda value: {"stopping": {name: make(value)}}


def turns(count: int) -> Changes:
    return {"chat": {"messages": [{"role": "user", "content": "a"}] * count}}


def schema(depth: int) -> str:
    """Objects inside one another."""
    return '{"items": ' * (depth - 1) + "{}" + "}" * (depth - 1)


def nanoseconds(count: int) -> dict[str, int]:
    return dict(zip(("seconds", "nanos"), divmod(count, 10**9), strict=True))


FIELDS = {
    "request_id.longest": [Case("request_id", lambda n: {"request_id": "a" * n})],
    "cache_salt.longest": [Case("cache.salt", lambda n: {"cache": {"salt": "a" * n}})],
    "session_id.longest": [Case("session_id", lambda n: {"session_id": "a" * n})],
    "lora.longest": [Case("lora", lambda n: {"lora": "a" * n})],
    "MAX_MESSAGES": [Case("chat.messages", turns)],
    "logit_bias.most": [
        Case("sampling.logit_bias", lambda n: {"sampling": {"logit_bias": dict.fromkeys(range(n), 1.0)}})
    ],
    "logit_bias.high": [
        Case(
            "sampling.logit_bias", lambda bias: {"sampling": {"logit_bias": {1: bias}}}, next_float32(100.0)
        ),
        Case(
            "sampling.logit_bias", lambda bias: {"sampling": {"logit_bias": {1: -bias}}}, next_float32(100.0)
        ),
    ],
    "allowed_token_ids.most": [
        Case("sampling.allowed_token_ids", lambda n: {"sampling": {"allowed_token_ids": range(n)}})
    ],
    "bad_words.most": [Case("sampling.bad_words", lambda n: {"sampling": {"bad_words": ["no"] * n}})],
    "bad_words.longest": [
        Case("sampling.bad_words[0]", lambda n: {"sampling": {"bad_words": ["a" * n]}}),
    ],
    "stop.most": [Case("stopping.stop", stopping("stop", lambda n: ["a"] * n))],
    "stop.longest": [Case("stopping.stop[0]", stopping("stop", lambda n: ["a" * n]))],
    "stop_token_ids.most": [Case("stopping.stop_token_ids", stopping("stop_token_ids", lambda n: [1] * n))],
    "time_limit_s.high": [
        Case(
            "stopping.time_limit",
            stopping("time_limit", lambda seconds: nanoseconds(round(seconds * 10**9))),
            24 * 3600 + 1e-9 * 2**14,  # the next that a double and a whole nanosecond both have
        )
    ],
    "MAX_GRAMMAR_BYTES": [
        Case("structured_output.regex", lambda n: {"structured_output": {"regex": "a" * n}}),
        Case(
            "structured_output.choice.values",
            lambda n: {"structured_output": {"choice": {"values": ["a" * (n - 1), "b"]}}},
        ),
    ],
    "MAX_SCHEMA_DEPTH": [
        Case("structured_output.json_schema", lambda n: {"structured_output": {"json_schema": schema(n)}})
    ],
    "MAX_CHOICES": [
        Case(
            "structured_output.choice.values",
            lambda n: {"structured_output": {"choice": {"values": ["a"] * n}}},
        )
    ],
}
# What no field of a generation request shows: the functions below, and the tests of a neighbour, which name
# the limit and one above it.
HERE = {
    "MAX_PROMPT_BYTES": "test_prompt_bytes_are_limited",
    "MAX_DETOKENIZE_IDS": "test_detokenize_ids_are_limited",
    "MAX_RENDER_SECONDS": "test_template_rendering_time_is_limited",
    "MAX_PROMPTS": "test_number_of_prompts_in_a_body_is_limited",
    "MAX_JSON_IDS": "test_number_of_ids_in_a_body_is_limited",
    "MAX_JSON_LIST": "test_list_lengths_in_a_body_are_limited",
    "MAX_COPIED_BYTES": "test_bytes_shared_by_several_prompts_are_limited",
    "MAX_TEMPLATE_KWARGS_DEPTH": "test_depth_of_template_kwargs_is_limited",
}
ELSEWHERE = {
    "MAX_MESSAGE_BYTES": "end_to_end/public_api/test_limits.py",
    "INLINE_PARSE_BYTES": "end_to_end/public_api/test_limits.py",
    "MAX_BODY_BYTES": "gateway/frontends/openai/test_bodies.py",
    "MAX_JSON_COMMAS": "gateway/frontends/openai/test_bodies.py",
    "MAX_JSON_COLONS": "gateway/frontends/openai/test_bodies.py",
    "MAX_JSON_NUMBERS": "gateway/frontends/openai/test_bodies.py",
    "MAX_TIMEOUT_MS": "gateway/frontends/openai/test_routes.py",
    "MAX_MESSAGE_NAME_CHARS": "gateway/request/test_validate_prompt.py",
    "MAX_RENDERED_CHARS": "gateway/model/test_chat_template.py",
    "MAX_TEMPLATE_BYTES": "gateway/model/test_chat_template.py",
    "MAX_CALLS": "gateway/test_bursts.py",
    "MAX_TEMPLATE_REFUSAL_CHARS": "gateway/model/test_chat_template.py",
    "MAX_TOOLS": "gateway/tools/test_validate_tools.py",
    "MAX_TOOL_NAME_CHARS": "gateway/tools/test_validate_tools.py",
    "MAX_TOOL_CALLS": "gateway/tools/test_validate_tools.py",
    "MAX_TOOL_CALL_ID_CHARS": "gateway/tools/test_validate_tools.py",
}


def parse(model: ServedModel, changes: Changes) -> Any:
    prompt = {} if "chat" in changes else {"token_ids": {"ids": [1, 2]}}
    return parse_request(pb.GenerateRequest(model=model.card.name, **prompt, **changes), model)


def limit_of(name: str) -> Any:
    """Return a constant of `gateway.limits`, or a column of a parameter: ``stop.longest``."""
    parameter, _, column = name.partition(".")
    return getattr(PARAMETERS[parameter], column) if column else getattr(limits, name)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in FIELDS.items() for case in cases])
def test_field_is_accepted_at_its_limit_and_refused_above(
    bundled: ServedModel, name: str, case: Case
) -> None:
    limit = limit_of(name)
    try:
        parse(bundled, case.make(limit))
    except InvalidParameter as error:
        pytest.fail(f"{name} itself is refused: {error}")
    except Exception as error:  # the context is shorter than some limits
        if type(error).__name__ != "ContextLengthExceeded":
            raise
    with pytest.raises(InvalidParameter) as caught:
        parse(bundled, case.make(limit + 1 if case.above is None else case.above))
    assert [violation.field for violation in caught.value.violations] == [case.field]


NUMBERS = [row for row in PARAMETERS.values() if row.type in (int, float) and row.rule and not row.duration]


def changes(row: Parameter, value: float) -> Changes:
    group, _, name = row.wire.partition(".")
    return {group: {name: value}}


@pytest.mark.parametrize("row", NUMBERS, ids=[row.name for row in NUMBERS])
def test_a_number_at_the_ends_of_its_range_and_beyond(bundled: ServedModel, row: Parameter) -> None:
    step = 1 if row.type is int else 0
    beyond = [math.nan] if row.type is float else []
    for end, sign in ((row.low, -1), (row.high, 1)):
        if end is None:
            continue
        value = int(end) if step else end
        next_one = next_float32(abs(value), sign if value > 0 else -sign) if value else sign * 1e-45
        beyond.append(value + sign * step if step else math.copysign(next_one, value or sign))
        try:
            parse(bundled, changes(row, value))
        except InvalidParameter as error:
            pytest.fail(f"{row.name} of {value} is refused: {error}")
    if row.above is not None:
        beyond.append(row.above)
    for value in beyond:
        if row.type is int and not row.fits[0] <= value <= row.fits[1]:
            continue
        with pytest.raises(InvalidParameter) as caught:
            parse(bundled, changes(row, value))
        (violation,) = caught.value.violations
        assert (violation.field, violation.description) == (row.wire, f"must be {row.rule}")


def test_temperature_below_the_threshold_is_greedy(bundled: ServedModel) -> None:
    edge = next_float32(GREEDY_BELOW)
    assert parse(bundled, {"sampling": {"temperature": edge}}).sampling.temperature == pytest.approx(edge)
    below = {"sampling": {"temperature": GREEDY_BELOW * 0.999}}
    assert parse(bundled, below).sampling.temperature == 0.0


def test_prompt_bytes_are_limited(bundled: ServedModel) -> None:
    def ids(length: int) -> list[int]:
        text = ("a " * length)[:length]
        request = pb.TokenizeRequest(model=bundled.card.name, text=text)
        return tokenizer_service.tokenize(request, bundled).ids

    assert ids(limits.MAX_PROMPT_BYTES)
    with pytest.raises(InvalidParameter, match=r"^text: "):
        ids(limits.MAX_PROMPT_BYTES + 1)


def test_detokenize_ids_are_limited(bundled: ServedModel) -> None:
    def text(count: int) -> str:
        request = pb.DetokenizeRequest(model=bundled.card.name, token_ids=[30] * count)
        return tokenizer_service.detokenize(request, bundled)

    assert len(text(limits.MAX_DETOKENIZE_IDS)) >= limits.MAX_DETOKENIZE_IDS
    with pytest.raises(InvalidParameter, match=r"^token_ids: "):
        text(limits.MAX_DETOKENIZE_IDS + 1)


def test_template_rendering_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by a hundredth of the limit at each reading."""
    looks = [0]

    def clock() -> float:
        looks[0] += 1
        return looks[0] * limits.MAX_RENDER_SECONDS / 100

    monkeypatch.setattr("gateway.model.chat_template.time.monotonic", clock)
    control = ControlTokens([])

    def render(steps: int) -> object:
        looks[0] = 0
        source = f"{{% for i in range({steps}) %}}x{{{{ i }}}}{{% endfor %}}"
        return ChatTemplate(source, control, {}).render([Message("user", "a")], add_generation_prompt=False)

    assert render(20)
    with pytest.raises(RenderRefused, match="too much"):
        render(2000)


def body(**members: Any) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(json.dumps({"model": "m", "prompt": "x", **members}))
    return parsed


def test_number_of_prompts_in_a_body_is_limited() -> None:
    assert len(read_completions(body(prompt=["x"] * limits.MAX_PROMPTS)).builders) == limits.MAX_PROMPTS
    with pytest.raises(InvalidParameter, match=r"^prompt: "):
        read_completions(body(prompt=["x"] * (limits.MAX_PROMPTS + 1)))


def test_number_of_ids_in_a_body_is_limited() -> None:
    builder = read_completions(body(prompt=[1] * limits.MAX_JSON_IDS)).builders[0]
    assert len(builder.request.token_ids.ids) == limits.MAX_JSON_IDS
    with pytest.raises(InvalidParameter, match=r"^prompt: "):
        read_completions(body(prompt=[1] * (limits.MAX_JSON_IDS + 1)))


def test_depth_of_template_kwargs_is_limited() -> None:
    def chat(depth: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(depth - 1):
            value = [value]
        turns = [{"role": "user", "content": "x"}]
        return {"model": "m", "messages": turns, "chat_template_kwargs": {"x": value}}

    assert read_chat(chat(limits.MAX_TEMPLATE_KWARGS_DEPTH))
    with pytest.raises(InvalidParameter, match=r"^chat_template_kwargs: .*too deeply"):
        read_chat(chat(limits.MAX_TEMPLATE_KWARGS_DEPTH + 1))


def test_list_lengths_in_a_body_are_limited() -> None:
    def chat(parts: int) -> dict[str, Any]:
        content = [{"type": "text", "text": "x"}] * parts
        return {"model": "m", "messages": [{"role": "user", "content": content}]}

    assert read_chat(chat(limits.MAX_JSON_LIST))
    with pytest.raises(InvalidParameter, match=r"^messages\[0\].content: "):
        read_chat(chat(limits.MAX_JSON_LIST + 1))


@pytest.mark.parametrize(
    ("name", "most", "make"),
    [
        ("allowed_token_ids", PARAMETERS["allowed_token_ids"].most, lambda n: [1] * n),
        ("stop_token_ids", PARAMETERS["stop_token_ids"].most, lambda n: [1] * n),
        ("stop", PARAMETERS["stop"].most, lambda n: ["x"] * n),
        ("bad_words", PARAMETERS["bad_words"].most, lambda n: ["x"] * n),
        ("logit_bias", PARAMETERS["logit_bias"].most, lambda n: {str(i): 1 for i in range(n)}),
        ("guided_choice", limits.MAX_CHOICES, lambda n: ["x"] * n),
    ],
)
def test_lists_shared_by_several_prompts_are_limited(
    name: str, most: int, make: Callable[[int], Any]
) -> None:
    """Check the limit before each prompt gets its copy."""
    prompts = ["x"] * limits.MAX_PROMPTS
    assert read_completions(body(prompt=prompts, **{name: make(most)}))
    with pytest.raises(InvalidParameter, match=rf"^{name}: .*at most {most} "):
        read_completions(body(prompt=prompts, **{name: make(most + 1)}))


def test_bytes_shared_by_several_prompts_are_limited() -> None:
    """Texts are the core's to measure, but not when there are too many copies of them."""
    model_and_limit = 16
    room = limits.MAX_COPIED_BYTES // limits.MAX_PROMPTS - model_and_limit
    shared = {"guided_regex": "a" * room}
    assert read_completions(body(prompt=["x"] * (limits.MAX_PROMPTS - 1), **shared))
    with pytest.raises(InvalidParameter, match=r"^body: "):
        read_completions(body(prompt=["x"] * limits.MAX_PROMPTS, **shared))


def test_every_limit_has_a_test() -> None:
    declared = {name for name in vars(limits) if name.isupper()}
    for row in PARAMETERS.values():
        columns = ("most", "longest") if row in NUMBERS else ("most", "longest", "high")
        declared |= {f"{row.name}.{column}" for column in columns if getattr(row, column)}
    assert declared == set(FIELDS) | set(HERE) | set(ELSEWHERE)
    assert len(FIELDS) + len(HERE) + len(ELSEWHERE) == len(declared)
    for function in HERE.values():
        assert callable(globals()[function])
    for name, path in ELSEWHERE.items():
        assert re.search(rf"limits\.{name}\b", (TESTS / path).read_text()), f"{path} does not test {name}"
