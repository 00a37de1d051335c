"""Requests that no client sends by mistake, as hypothesis strategies: messages, bytes, JSON.

Most of a message is right, so that it comes far: a field or two are out of range, of a wrong kind, or huge.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.parameters import SAMPLING_NUMBERS
from diptych.v1 import inference_pb2 as pb
from tests.end_to_end.tiny_system import MODEL

NAN, INF = float("nan"), float("inf")
_ODD_FLOATS = st.sampled_from([NAN, INF, -INF, -1.0, 0.0, 1e-40, 1e38, 101.0]) | st.floats(width=32)
_ODD_COUNTS = st.sampled_from([0, 1, 2, 3, 16, 17, 128, 129, 2**31, 2**32 - 1])
_ODD_TEXT = st.text(max_size=30) | st.sampled_from(
    ["", "\x00", "<|im_end|>", "<s>", "\u202e", "a\u0301", "{{ 7*7 }}", "../x", "x" * 5000, "😀" * 300]
)
_SCHEMAS = st.sampled_from(
    [
        "{}",
        "[]",
        "null",
        '{"type": "object"}',
        '{"type": 7}',
        '{"$ref": "#"}',
        '{"items": ' * 70 + "{}" + "}" * 70,
        '{"enum": []}',
        '{"minimum": 1e999}',
        '{"pattern": "("}',
        '{"type": "string", "maxLength": 100000000}',
    ]
)
_REGEXES = _ODD_TEXT | st.sampled_from(
    ["(", "a{1000000}", "(a*)*b", "(?=a)", r"\1", "[z-a]", ".*" * 200, "x{0}"]
)
_GRAMMARS = _ODD_TEXT | st.sampled_from(
    ["root ::=", "root ::= root", 'root ::= "a" | b', "x ::= y", 'root ::= "a"{1,99999999}', "root ::= [^"]
)


def _some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of these fields."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


_IDS = st.lists(st.integers(0, 330) | _ODD_COUNTS, max_size=20)
_SAMPLING = _some(
    {
        **dict.fromkeys((name for name, row in SAMPLING_NUMBERS.items() if row.type is float), _ODD_FLOATS),
        **{name: st.integers(0, 4) | _ODD_COUNTS for name in ("n", "best_of", "beam_width")},
        "top_k": st.integers(-(2**31), 2**31 - 1),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logit_bias": st.dictionaries(st.integers(0, 330) | _ODD_COUNTS, _ODD_FLOATS, max_size=5),
        "allowed_token_ids": _IDS,
        "bad_words": st.lists(_ODD_TEXT, max_size=4),
    }
)
_STOPPING = _some(
    {
        "min_tokens": st.integers(0, 4) | _ODD_COUNTS,
        "stop": st.lists(_ODD_TEXT, max_size=18),
        "stop_token_ids": _IDS,
        "ignore_eos": st.booleans(),
        "include_stop_in_output": st.booleans(),
        "time_limit": st.fixed_dictionaries(
            {"seconds": st.integers(-2, 10**6), "nanos": st.integers(-(2**31), 2**31 - 1)}
        ),
    }
)
_RESPONSE = _some(
    {
        **{name: st.booleans() for name in ("text", "token_ids", "echo_prompt", "timings")},
        **{name: st.integers(0, 21) | _ODD_COUNTS for name in ("logprobs", "prompt_logprobs")},
        "skip_special_tokens": st.booleans(),
        "stream_interval": _ODD_COUNTS,
    }
)
_STRUCTURE = st.one_of(
    st.fixed_dictionaries({"json_schema": _SCHEMAS | _ODD_TEXT}),
    st.fixed_dictionaries({"regex": _REGEXES}),
    st.fixed_dictionaries({"ebnf_grammar": _GRAMMARS}),
    st.fixed_dictionaries({"choice": st.fixed_dictionaries({"values": st.lists(_ODD_TEXT, max_size=5)})}),
    st.fixed_dictionaries({"json_object": st.booleans()}),
    st.fixed_dictionaries({"structural_tag": _ODD_TEXT}),
)
_ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "", "<|im_start|>"])
_CALLS = st.lists(
    st.fixed_dictionaries({"id": _ODD_TEXT, "name": _ODD_TEXT, "arguments_json": _SCHEMAS}), max_size=2
)
_TURNS = st.fixed_dictionaries(
    {"role": _ROLES, "content": _ODD_TEXT},
    optional={"name": _ODD_TEXT, "tool_calls": _CALLS, "tool_call_id": _ODD_TEXT},
)
_TOOLS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "", "a b"]), "parameters_json_schema": _SCHEMAS | _ODD_TEXT}
)
_CHAT = st.fixed_dictionaries(
    {"messages": st.lists(_TURNS, max_size=4)},
    optional={
        "tools": st.lists(_TOOLS, max_size=3),
        "tool_choice": st.fixed_dictionaries(
            {"mode": st.integers(-1, 6), "name": st.sampled_from(["f", "x"])}
        ),
        "add_generation_prompt": st.booleans(),
        "template_kwargs": st.dictionaries(_ODD_TEXT, st.booleans() | _ODD_TEXT, max_size=2),
    },
)
_PROMPT = st.one_of(
    st.fixed_dictionaries({"text": _ODD_TEXT}),
    st.fixed_dictionaries({"token_ids": st.fixed_dictionaries({"ids": _IDS})}),
    st.fixed_dictionaries({"chat": _CHAT}),
    st.just({}),
)
_REST = st.fixed_dictionaries(
    {},
    optional={
        "structured_output": _STRUCTURE,
        "response": _RESPONSE,
        "cache": _some({"salt": _ODD_TEXT, "bypass_read": st.booleans(), "bypass_write": st.booleans()}),
        "priority": st.integers(-(2**31), 2**31 - 1),
        "request_id": _ODD_TEXT,
        "session_id": _ODD_TEXT,
        "lora": st.sampled_from(["", "", "", "x"]),
        "resume_token": st.sampled_from(["", "", "", "x"]),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """Short answers: what is hostile is the request."""
    model = draw(st.sampled_from([MODEL] * 9 + ["", "../x"]))
    stopping = {"max_tokens": draw(st.integers(1, 4)), **draw(_STOPPING)}
    fields = {**draw(_PROMPT), **draw(_REST)}
    return pb.GenerateRequest(model=model, sampling=draw(_SAMPLING), stopping=stopping, **fields)


@st.composite
def wire(draw: st.DrawFn) -> bytes:
    """Bytes of a message with some of them changed, cut off, repeated, or none of a message at all."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(draw(requests()).SerializeToString())
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(data)))
    return bytes(data[:cut] if draw(st.booleans()) else data + data[cut:])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _ODD_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_NAMES = (
    *("prompt", "messages", "model", "n", "best_of", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "echo", "stream", "user"),
    *("stream_options", "response_format", "tools", "tool_choice", "suffix", "priority", "cache_salt"),
    *("use_beam_search", "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "guided_regex"),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: of an object with some members of any kind, or of anything."""
    chat = draw(st.booleans())
    path = "/v1/chat/completions" if chat else "/v1/completions"
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=200))
    turns = [{"role": "user", "content": draw(_ODD_TEXT)}]
    body = {"model": MODEL, "max_tokens": 2, **({"messages": turns} if chat else {"prompt": "a"})}
    for name in draw(st.lists(st.sampled_from(_NAMES), max_size=4, unique=True)):
        body[name] = draw(_JSON)
    return path, json.dumps(body).encode("utf-8", "surrogatepass")


_PARAMETERS = st.dictionaries(
    st.sampled_from([*_NAMES, "timeout", "sampling_parameters", "exclude_input_in_output", "x"]),
    st.one_of(
        st.fixed_dictionaries({"int64_param": st.integers(-(2**63), 2**63 - 1)}),
        st.fixed_dictionaries({"double_param": _ODD_FLOATS}),
        st.fixed_dictionaries({"string_param": _ODD_TEXT | _SCHEMAS}),
        st.fixed_dictionaries({"bool_param": st.booleans()}),
    ),
    max_size=4,
)
_SHAPES = st.lists(st.integers(-1, 3) | st.just(2**40), max_size=3)


@st.composite
def infers(draw: st.DrawFn) -> oip.ModelInferRequest:
    """By KServe's protocol: a tensor or two that may not hold what they say, and parameters of any kind."""
    message = oip.ModelInferRequest(model_name=draw(st.sampled_from([MODEL] * 9 + [""])), id=draw(_ODD_TEXT))
    message.parameters["max_tokens"].int64_param = 2
    for name, value in draw(_PARAMETERS).items():
        message.parameters[name].MergeFrom(oip.InferParameter(**value))
    for name in draw(
        st.lists(st.sampled_from(["text_input", "token_ids", "n", "x"]), min_size=1, max_size=2)
    ):
        kind = draw(st.sampled_from(["BYTES", "BYTES", "INT64", "INT32", "FP32", "BOOL", "x"]))
        tensor = message.inputs.add(name=name, datatype=kind, shape=draw(st.just([1]) | _SHAPES))
        if draw(st.booleans()):
            message.raw_input_contents.append(draw(st.binary(max_size=24)))
        else:
            tensor.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=8), max_size=2)))
            tensor.contents.int64_contents.extend(draw(st.lists(st.integers(-5, 400), max_size=2)))
    return message
