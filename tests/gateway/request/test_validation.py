"""Every field of GenerateRequest: what is read, what is refused by name, and nothing left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.struct_pb2 import Struct
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.parameters import PARAMETERS, Sampling
from diptych.runtime.errors import (
    ContextLengthExceeded,
    DiptychError,
    InvalidParameter,
    UnknownModel,
    UnsupportedFeature,
)
from diptych.runtime.grammar.grammar import Grammar, Kind
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.served_model import ServedModel
from gateway.request.parsed_request import ParsedRequest
from gateway.request.validation import parse_message, parse_request

MODEL = "SmolLM2-135M-Instruct"
MOST_INTERVAL = PARAMETERS["stream_interval"].high


def valid(**changes: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"model": MODEL, "text": "Hello"} | changes))


def chat(*turns: tuple[str, str], **changes: Any) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(model=MODEL, chat=pb.ChatPrompt(messages=messages, **changes))


def parsed(model: ServedModel, request: pb.GenerateRequest, **options: Any) -> ParsedRequest:
    return parse_request(request, model, fresh_id=lambda: "fresh", fresh_seed=lambda: 7, **options)


def refusal(model: ServedModel, request: pb.GenerateRequest, **options: Any) -> DiptychError:
    with pytest.raises(DiptychError) as caught:
        parsed(model, request, **options)
    assert caught.value.code.name in ("INVALID_ARGUMENT", "NOT_FOUND")
    return caught.value


def field_of(error: DiptychError) -> str:
    (violation,) = error.violations
    return violation.field


def test_a_bare_request_takes_every_default(bundled: ServedModel) -> None:
    request = parsed(bundled, valid())
    assert request.request_id == "fresh"
    assert request.model == MODEL
    assert list(request.prompt_ids) == bundled.tokenizer.encode("Hello")
    assert request.sampling == Sampling(0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, 7)
    assert (request.n, request.best_of, request.beam_width) == (1, None, None)
    assert (request.logprobs, request.prompt_logprobs, request.echo) == (None, None, False)
    assert (request.max_tokens, request.min_tokens, request.stop, request.stop_token_ids) == (None, 0, (), ())
    assert not request.ignore_eos
    assert not request.include_stop
    assert request.want_text
    assert request.want_token_ids
    assert request.skip_special
    assert request.want_timings
    assert request.cache_read
    assert request.cache_write
    assert (request.stream_interval, request.priority, request.time_limit_s) == (1, 0, None)
    assert (request.salt, request.session_id) == ("", "")


def grammar(request: ParsedRequest) -> Grammar | None:
    return request.constraint.grammar if request.constraint is not None else None


# Each implemented field: a request with it set, and what it becomes.
IMPLEMENTED: dict[str, tuple[dict[str, Any], Callable[[ParsedRequest], object], object]] = {
    "request_id": ({"request_id": "A-z_0.9"}, lambda r: r.request_id, "A-z_0.9"),
    "model": ({"model": f"{MODEL}.Q4_1"}, lambda r: r.model, MODEL),
    "text": ({"text": "abc"}, lambda r: len(r.prompt_ids) > 0, True),
    "token_ids.ids": ({"text": None, "token_ids": pb.TokenIds(ids=[5, 0])}, lambda r: r.prompt_ids, (5, 0)),
    "priority": ({"priority": -3}, lambda r: r.priority, -3),
    "session_id": ({"session_id": "s é"}, lambda r: r.session_id, "s é"),
    "sampling.temperature": ({"sampling": {"temperature": 0.5}}, lambda r: r.sampling.temperature, 0.5),
    "sampling.top_p": ({"sampling": {"top_p": 0.25}}, lambda r: r.sampling.top_p, 0.25),
    "sampling.top_k": ({"sampling": {"top_k": 40}}, lambda r: r.sampling.top_k, 40),
    "sampling.min_p": ({"sampling": {"min_p": 0.125}}, lambda r: r.sampling.min_p, 0.125),
    "sampling.frequency_penalty": (
        {"sampling": {"frequency_penalty": -0.5}}, lambda r: r.sampling.frequency_penalty, -0.5,
    ),
    "sampling.presence_penalty": (
        {"sampling": {"presence_penalty": 0.5}}, lambda r: r.sampling.presence_penalty, 0.5,
    ),
    "sampling.repetition_penalty": (
        {"sampling": {"repetition_penalty": 1.5}}, lambda r: r.sampling.repetition_penalty, 1.5,
    ),
    "sampling.logit_bias": (
        {"sampling": {"logit_bias": {7: -0.5}}}, lambda r: r.sampling.logit_bias, {7: -0.5},
    ),
    "sampling.allowed_token_ids": (
        {"sampling": {"allowed_token_ids": [9, 4, 9]}}, lambda r: r.sampling.allowed_token_ids, (9, 4),
    ),
    "sampling.bad_words": (
        {"sampling": {"bad_words": ["a", "a"]}}, lambda r: r.sampling.bad_words, ((81,), (253,)),
    ),
    "sampling.seed": ({"sampling": {"seed": -1}}, lambda r: r.sampling.seed, 2**64 - 1),
    "sampling.n": ({"sampling": {"n": 3}}, lambda r: r.n, 3),
    "sampling.best_of": ({"sampling": {"best_of": 3}}, lambda r: r.best_of, 3),
    "sampling.beam_width": ({"sampling": {"beam_width": 4}}, lambda r: r.beam_width, 4),
    "sampling.top_n_sigma": ({"sampling": {"top_n_sigma": 1.5}}, lambda r: r.sampling.top_n_sigma, 1.5),
    "stopping.max_tokens": ({"stopping": {"max_tokens": 9}}, lambda r: r.max_tokens, 9),
    "stopping.min_tokens": ({"stopping": {"min_tokens": 3}}, lambda r: r.min_tokens, 3),
    "stopping.stop": ({"stopping": {"stop": ["x", "y", "x"]}}, lambda r: r.stop, ("x", "y")),
    "stopping.stop_token_ids": (
        {"stopping": {"stop_token_ids": [4, 0, 4]}}, lambda r: r.stop_token_ids, (4, 0),
    ),
    "stopping.ignore_eos": ({"stopping": {"ignore_eos": True}}, lambda r: r.ignore_eos, True),
    "stopping.include_stop_in_output": (
        {"stopping": {"include_stop_in_output": True}}, lambda r: r.include_stop, True,
    ),
    "stopping.time_limit": (
        {"stopping": {"time_limit": {"seconds": 1, "nanos": 500_000_000}}}, lambda r: r.time_limit_s, 1.5,
    ),
    "response.text": ({"response": {"text": False}}, lambda r: r.want_text, False),
    "response.token_ids": ({"response": {"token_ids": False}}, lambda r: r.want_token_ids, False),
    "response.skip_special_tokens": (
        {"response": {"skip_special_tokens": False}}, lambda r: r.skip_special, False,
    ),
    "response.logprobs": ({"response": {"logprobs": 0}}, lambda r: r.logprobs, 0),
    "response.prompt_logprobs": ({"response": {"prompt_logprobs": 2}}, lambda r: r.prompt_logprobs, 2),
    "response.echo_prompt": ({"response": {"echo_prompt": True}}, lambda r: r.echo, True),
    "response.stream_interval": ({"response": {"stream_interval": 8}}, lambda r: r.stream_interval, 8),
    "response.timings": ({"response": {"timings": False}}, lambda r: r.want_timings, False),
    "cache.salt": ({"cache": {"salt": "é"}}, lambda r: r.salt, "é"),
    "cache.bypass_read": ({"cache": {"bypass_read": True}}, lambda r: r.cache_read, False),
    "cache.bypass_write": ({"cache": {"bypass_write": True}}, lambda r: r.cache_write, False),
    "structured_output.json_schema": (
        {"structured_output": {"json_schema": "{}"}}, grammar, Grammar(Kind.JSON_SCHEMA, "{}"),
    ),
    "structured_output.regex": ({"structured_output": {"regex": "a+"}}, grammar, Grammar(Kind.REGEX, "a+")),
    "structured_output.ebnf_grammar": (
        {"structured_output": {"ebnf_grammar": 'root ::= "a"'}},
        grammar,
        Grammar(Kind.REGEX, r"[\x{61}-\x{61}]"),
    ),
    "structured_output.choice.values": (
        {"structured_output": {"choice": {"values": ["a", "b.c"]}}},
        grammar,
        Grammar(Kind.REGEX, r"a|b\x{2e}c"),
    ),
    "structured_output.json_object": (
        {"structured_output": {"json_object": True}},
        grammar,
        Grammar(Kind.JSON_SCHEMA, '{"type": "object"}'),
    ),
}  # fmt: skip

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "structured_output.structural_tag": {"structured_output": {"structural_tag": "t"}},
}
IN_TEST_VALIDATE_PROMPT = {
    "chat.messages.role", "chat.messages.content", "chat.messages.name", "chat.messages.tool_call_id",
    "chat.messages.tool_calls", "chat.template_kwargs", "chat.add_generation_prompt", "chat.tools",
    "chat.tool_choice", "chat.messages.reasoning_content", "chat.messages.parts",
}  # fmt: skip
IN_TEST_RESUME_TOKEN = {"resume_token", "received_token_ids"}
IN_TEST_ADAPTERS = {"lora"}


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        path = prefix + field.name
        whole = path in UNSUPPORTED or path in IN_TEST_VALIDATE_PROMPT
        inner = field.message_type
        if inner is None or whole or inner.full_name.startswith("google.") or inner.GetOptions().map_entry:
            yield path
        else:
            yield from leaves(inner, f"{path}.")


def test_no_field_of_the_protocol_is_forgotten() -> None:
    """A new field fails here until it is either read or refused."""
    covered = IMPLEMENTED.keys() | UNSUPPORTED.keys() | IN_TEST_VALIDATE_PROMPT
    covered |= IN_TEST_RESUME_TOKEN | IN_TEST_ADAPTERS
    assert set(leaves(pb.GenerateRequest.DESCRIPTOR)) == covered


@pytest.mark.parametrize("path", IMPLEMENTED)
def test_an_implemented_field_is_read(bundled: ServedModel, path: str) -> None:
    changes, read, expected = IMPLEMENTED[path]
    result = read(parsed(bundled, valid(**changes)))
    assert result == expected
    assert type(result) is type(expected)
    if path not in ("text",):
        assert read(parsed(bundled, valid())) != expected or path == "model"


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_an_unsupported_field_is_refused_by_name(bundled: ServedModel, path: str) -> None:
    error = refusal(bundled, valid(**UNSUPPORTED[path]))
    assert isinstance(error, UnsupportedFeature)
    assert field_of(error) == path


def test_stop_strings_are_refused_with_several_beams_only(bundled: ServedModel) -> None:
    stopping = {"stop": ["."], "stop_token_ids": [4]}
    error = refusal(bundled, valid(sampling={"beam_width": 2}, stopping=stopping))
    assert isinstance(error, UnsupportedFeature)
    assert field_of(error) == "stopping.stop"
    assert parsed(bundled, valid(sampling={"beam_width": 1}, stopping=stopping)).stop == (".",)
    ids = {"stop_token_ids": [4]}
    assert parsed(bundled, valid(sampling={"beam_width": 2}, stopping=ids)).stop_token_ids == (4,)


def test_harmless_values_of_unsupported_fields_pass(bundled: ServedModel) -> None:
    assert parsed(bundled, valid(sampling={"n": 1, "best_of": 1}, response={"echo_prompt": False}))


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("model", {"model": ""}),
        ("request_id", {"request_id": "a" * (PARAMETERS["request_id"].longest + 1)}),
        ("request_id", {"request_id": "a b"}),
        ("request_id", {"request_id": "a\n"}),
        ("request_id", {"request_id": "é"}),
        ("sampling.n", {"sampling": {"n": 0}}),
        ("sampling.best_of", {"sampling": {"best_of": 0}}),
        ("sampling.logit_bias", {"sampling": {"logit_bias": {2**32 - 1: 1.0}}}),
        (
            "sampling.allowed_token_ids",
            {"sampling": {"allowed_token_ids": [2]}, "stopping": {"min_tokens": 1}},
        ),
        ("sampling.bad_words[1]", {"sampling": {"bad_words": ["a", ""]}}),
        ("cache.salt", {"cache": {"salt": "x" * (PARAMETERS["cache_salt"].longest + 1)}}),
        ("cache.salt", {"cache": {"salt": "é" * (PARAMETERS["cache_salt"].longest // 2 + 1)}}),
        ("cache.salt", {"cache": {"salt": "x" * 1_000_000}}),
        ("cache.salt", {"cache": {"salt": "a\x00b"}}),
        ("cache.salt", {"cache": {"salt": "\x7f"}}),
        ("cache.salt", {"cache": {"salt": "\x85"}}),
        ("session_id", {"session_id": "x" * (PARAMETERS["session_id"].longest + 1)}),
        ("session_id", {"session_id": "a\r\nb"}),
        ("response.stream_interval", {"response": {"stream_interval": 0}}),
        (
            "response.stream_interval",
            {"response": {"stream_interval": MOST_INTERVAL + 1}},
        ),
    ],
)
def test_bad_field_is_named(bundled: ServedModel, path: str, changes: dict[str, Any]) -> None:
    error = refusal(bundled, valid(**changes))
    assert isinstance(error, InvalidParameter)
    assert field_of(error) == path


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "a" * PARAMETERS["request_id"].longest},
        {"cache": {"salt": "é" * (PARAMETERS["cache_salt"].longest // 2)}},
        {"session_id": "x" * PARAMETERS["session_id"].longest},
        {"response": {"stream_interval": PARAMETERS["stream_interval"].high}},
        {"priority": -(2**31)},
        {"response": {"text": False, "token_ids": False}},
    ],
)
def test_a_field_at_its_limit_is_fine(bundled: ServedModel, changes: dict[str, Any]) -> None:
    assert parsed(bundled, valid(**changes))


@pytest.mark.parametrize(
    "name", ["gpt-5", "../../etc/passwd", "/models/x.gguf", "x" * 1_000_000, MODEL.lower()]
)
def test_any_other_model_is_not_found(bundled: ServedModel, name: str) -> None:
    error = refusal(bundled, valid(model=name))
    assert isinstance(error, UnknownModel)
    assert str(error) == f"the model '{name[:128]}' is not served here; served: {MODEL}"


def test_the_request_id_comes_from_the_field_then_the_header(bundled: ServedModel) -> None:
    assert parsed(bundled, valid(request_id="f"), header_request_id="h").request_id == "f"
    assert parsed(bundled, valid(), header_request_id="h").request_id == "h"
    first, second = parse_request(valid(), bundled), parse_request(valid(), bundled)
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed


def test_prompt_and_output_share_the_context(bundled: ServedModel) -> None:
    prompt = bundled.tokenizer.encode("Hello")
    room = bundled.card.max_context - len(prompt)
    assert parsed(bundled, valid(stopping={"max_tokens": room})).max_tokens == room
    error = refusal(bundled, valid(stopping={"max_tokens": room + 1}))
    assert isinstance(error, ContextLengthExceeded)
    assert error.metadata == {
        "prompt_tokens": str(len(prompt)), "max_tokens": str(room + 1), "limit": "8192",
    }  # fmt: skip
    assert isinstance(refusal(bundled, valid(stopping={"min_tokens": room + 1})), ContextLengthExceeded)
    assert isinstance(refusal(bundled, valid(stopping={"max_tokens": 2**32 - 1})), ContextLengthExceeded)


def test_a_pool_smaller_than_the_context_is_the_limit(bundled: ServedModel) -> None:
    request = valid(text=None, token_ids=pb.TokenIds(ids=[1] * 60), stopping={"max_tokens": 4})
    assert parsed(bundled, request, token_limit=64)
    error = refusal(bundled, request, token_limit=63)
    assert error.metadata["limit"] == "63"
    assert parsed(bundled, request, token_limit=10**9)
    open_ended = valid(text=None, token_ids=pb.TokenIds(ids=[1] * 63))
    assert parsed(bundled, open_ended, token_limit=64).max_tokens is None
    assert isinstance(refusal(bundled, open_ended, token_limit=63), ContextLengthExceeded)


def test_nothing_the_caller_wrote_is_in_repr_or_error(bundled: ServedModel) -> None:
    request = valid(
        text="sentinel", session_id="sentinel", cache={"salt": "sentinel"}, stopping={"stop": ["sentinel"]}
    )
    assert "sentinel" not in repr(parsed(bundled, request))
    for bad in (
        valid(request_id="sentinel sentinel"),
        valid(cache={"salt": "sentinel\n"}),
        valid(stopping={"stop": ["sentinel" * 1000]}),
        chat(("sentinel", "x")),
        chat(("user", "x"), template_kwargs=_struct(sentinel=True)),
    ):
        error = refusal(bundled, bad)
        assert "sentinel" not in f"{error} {error.violations} {error.metadata}"


def _struct(**values: Any) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


def _delimited(tag: bytes, data: bytes) -> bytes:
    """A length-delimited protobuf field, written by hand: the library refuses to build what is tested."""
    size, length = len(data), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return tag + length + bytes([size]) + data


def _deep_template_kwargs(depth: int) -> bytes:
    struct = b""
    for _ in range(depth):
        value = _delimited(b"\x2a", struct)  # Value.struct_value
        struct = _delimited(b"\x0a", b"\x0a\x01a" + _delimited(b"\x12", value))  # Struct.fields["a"]
    return _delimited(b"\x2a", _delimited(b"\x12", struct))  # GenerateRequest.chat.template_kwargs


def test_parse_message_refuses_garbage(bundled: ServedModel) -> None:
    deep = chat(("user", "x")).SerializeToString() + _deep_template_kwargs(10_000)
    invalid_utf8 = valid().SerializeToString() + b"\x1a\x02\xff\xfe"
    for data in (b"\xff" * 50, deep, invalid_utf8, b"\x0a\x7f"):
        with pytest.raises(InvalidParameter) as caught:
            parse_message(pb.GenerateRequest, data)
        assert field_of(caught.value) == "request"
        assert "GenerateRequest" in str(caught.value)
    shallow = chat(("user", "x")).SerializeToString() + _deep_template_kwargs(3)
    assert field_of(refusal(bundled, parse_message(pb.GenerateRequest, shallow))) == "chat.template_kwargs"


def test_unknown_fields_are_fine(bundled: ServedModel) -> None:
    data = valid().SerializeToString() + b"\xa2\x1f\x05hello"  # field 500
    assert parsed(bundled, parse_message(pb.GenerateRequest, data))


def test_a_request_round_trips_through_bytes() -> None:
    assert parse_message(pb.GenerateRequest, valid().SerializeToString()) == valid()


@settings(max_examples=300)
@given(data=st.data())
def test_any_message_is_parsed_or_refused(bundled: ServedModel, data: st.DataObject) -> None:
    """Generated messages over all fields: a result or an answer, never another exception."""
    floats = st.floats(width=32) | st.just(0.0)
    words = st.text(max_size=8)
    ids = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 50_000), max_size=4)
    whole = st.integers(0, 2**32 - 1) | st.integers(0, 20)
    knobs = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), floats)
    integers = {
        "top_k": st.integers(-(2**31), 2**31 - 1),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "n": whole,
        "best_of": whole,
        "beam_width": whole,
        "logit_bias": st.dictionaries(st.integers(0, 2**32 - 1) | st.integers(0, 50_000), floats, max_size=3),
        "allowed_token_ids": ids,
        "bad_words": st.lists(words, max_size=3),
    }
    sampling = st.fixed_dictionaries({}, optional=knobs | integers)
    response = st.fixed_dictionaries({}, optional={"logprobs": whole, "prompt_logprobs": whole})
    stopping = st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": whole,
            "min_tokens": whole,
            "stop": st.lists(words, max_size=3),
            "stop_token_ids": ids,
            "time_limit": st.builds(
                lambda s, n: {"seconds": s, "nanos": n},
                st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1),
            ),
        },
    )  # fmt: skip
    message = st.builds(
        pb.ChatMessage, role=st.sampled_from(["user", "system", "tool", "", "x"]), content=words
    )
    prompt = st.one_of(
        st.fixed_dictionaries({"text": st.text(max_size=50)}),
        st.fixed_dictionaries({"token_ids": ids.map(lambda found: pb.TokenIds(ids=found))}),
        st.fixed_dictionaries(
            {"chat": st.lists(message, max_size=3).map(lambda m: pb.ChatPrompt(messages=m))}
        ),
        st.just({}),
    )
    rest = st.fixed_dictionaries(
        {},
        optional={
            "sampling": sampling,
            "stopping": stopping,
            "response": response,
            "request_id": words,
            "session_id": words,
        },
    )
    request = pb.GenerateRequest(model=MODEL, **data.draw(prompt), **data.draw(rest))
    try:
        result = parse_request(request, bundled)
    except DiptychError as error:
        assert error.code.name == "INVALID_ARGUMENT"  # noqa: PT017
        assert len(error.message) <= 1000  # noqa: PT017
    else:
        assert result.prompt_ids
        assert result.output_budget(bundled.card.max_context) >= max(1, result.min_tokens)
        assert 1 <= result.n <= result.choices <= PARAMETERS["n"].high
        assert result.beam_width is None or result.n <= result.beam_width <= PARAMETERS["beam_width"].high
        assert all(len(word) for word in result.sampling.bad_words)


def test_bad_requests_are_answered_within_50_ms(bundled: ServedModel) -> None:
    requests = [
        valid(text=None, token_ids=pb.TokenIds(ids=[2**32 - 1] * 700_000)),
        valid(text="a" * limits.MAX_PROMPT_BYTES),
        valid(text="^" * (limits.MAX_PROMPT_BYTES + 1)),
        valid(stopping={"stop": ["x"] * 100_000}),
        valid(sampling={"logit_bias": dict.fromkeys(range(100000), 1.0)}),
        chat(*[("user", "")] * (limits.MAX_MESSAGES + 1)),
        chat(("user", "a" * (limits.MAX_PROMPT_BYTES + 1))),
    ]
    for request in requests:
        assert min(_seconds_to_refuse(bundled, request) for _ in range(3)) < 0.05


def _seconds_to_refuse(model: ServedModel, request: pb.GenerateRequest) -> float:
    """Processor time: other processes of a busy machine do not count."""
    begun = time.process_time()
    refusal(model, request)
    return time.process_time() - begun


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_alternatives_have_a_limit(bundled: ServedModel, name: str) -> None:
    most = int(PARAMETERS[name].high or 0)
    for count in (0, 1, most):
        assert getattr(parsed(bundled, valid(response={name: count})), name) == count
    assert field_of(refusal(bundled, valid(response={name: most + 1}))) == f"response.{name}"


def test_echo_is_read(bundled: ServedModel) -> None:
    assert parsed(bundled, valid(response={"echo_prompt": True})).echo
    assert not parsed(bundled, valid()).echo
