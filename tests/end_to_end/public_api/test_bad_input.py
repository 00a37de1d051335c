"""Bad input through real sockets: the code, the reason and the field over gRPC, its name over HTTP.

No process may end of it (the fixture looks), and nothing that the server says or logs may hold a value of the
caller's. Bad credentials and another tenant's request are in tests/gateway/access/test_credentials.py, floods
of frames in test_transport.py.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end.stack import Stack
from tests.end_to_end.tiny_model import CONTEXT
from tests.end_to_end.tiny_system import MODEL
from tests.gateway.failing_calls import SECRET, check_http, told

Code = grpc.StatusCode
NAN, INF = float("nan"), float("inf")
SERVICE = "/diptych.v1.InferenceService"

DOUBLING = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
CIRCLE = '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'


def nested(depth: int) -> str:
    """A schema of arrays inside one another."""
    return '{"items":' * depth + "{}" + "}" * depth


# field → changes of a good request; the name over HTTP where there is one and JSON can say it
FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("text", {"text": ""}),
    ("token_ids.ids", {"token_ids": {}}),
    ("token_ids.ids[1]", {"token_ids": {"ids": [1, 2**32 - 1]}}),
    ("sampling.n", {"sampling": {"n": 0}}),
    ("sampling.n", {"sampling": {"n": 5_000_000}}),
    ("stopping.max_tokens", {"stopping": {"max_tokens": 0}}),
    ("sampling.temperature", {"sampling": {"temperature": NAN}}),
    ("sampling.temperature", {"sampling": {"temperature": INF}}),
    ("sampling.temperature", {"sampling": {"temperature": -1.0}}),
    ("sampling.top_p", {"sampling": {"top_p": 0.0}}),
    ("sampling.top_p", {"sampling": {"top_p": 1.5}}),
    ("sampling.top_p", {"sampling": {"top_p": NAN}}),
    ("sampling.top_k", {"sampling": {"top_k": -2}}),
    ("sampling.min_p", {"sampling": {"min_p": NAN}}),
    ("sampling.repetition_penalty", {"sampling": {"repetition_penalty": 0.0}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {2**32 - 1: 1.0}}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {1: 3e38}}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": dict.fromkeys(range(100_000), 1.0)}}),
    ("response.logprobs", {"response": {"logprobs": 1_000_000_000}}),
    ("structured_output.regex", {"structured_output": {"regex": f"({SECRET}"}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": '{"a":' * 5_000 + "1"}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": nested(6_000)}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": "[" * 10_000 + "]" * 10_000}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": '{"$ref": "#"}'}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": CIRCLE}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": '{"$ref": "http://a/b"}'}}),
    ("structured_output.regex", {"structured_output": {"regex": r"(a)\1"}}),
    ("structured_output.regex", {"structured_output": {"regex": "(" * 5_000 + "a" + ")" * 5_000}}),
    ("structured_output.ebnf_grammar", {"structured_output": {"ebnf_grammar": "root ::= root"}}),
    ("structured_output.ebnf_grammar", {"structured_output": {"ebnf_grammar": ""}}),
    ("structured_output.ebnf_grammar", {"structured_output": {"ebnf_grammar": f"root ::= {SECRET}"}}),
    ("stopping.stop", {"stopping": {"stop": ["x"] * 100_000}}),
    ("stopping.stop[0]", {"stopping": {"stop": [""]}}),
    ("stopping.stop[0]", {"stopping": {"stop": ["x" * 2**20]}}),
    ("cache.salt", {"cache": {"salt": f"{SECRET}\n"}}),
    ("cache.salt", {"cache": {"salt": "x" * 2**20}}),
    ("chat.template_kwargs", {"chat": {"messages": [{"role": "user"}], "template_kwargs": {SECRET: True}}}),
    ("chat.messages[0].role", {"chat": {"messages": [{"role": SECRET}]}}),
    ("chat.tool_choice.mode", {"chat": {"messages": [{"role": "user"}], "tool_choice": {"mode": 77}}}),
    ("request_id", {"request_id": f"{SECRET} {SECRET}"}),
    ("resume_token", {"resume_token": SECRET}),
    ("received_token_ids", {"received_token_ids": [1]}),
]
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("structured_output.structural_tag", {"structured_output": {"structural_tag": SECRET}}),
]
FINE: list[dict[str, Any]] = [
    {"sampling": {"temperature": 1e-40}},
    {"sampling": {"top_k": 2**31 - 1}},
    {"text": "<|im_end|><s>"},
    {"text": "a\x00b"},
    # Expressions are followed by derivatives: what is catastrophic to a backtracking matcher costs nothing.
    {"structured_output": {"regex": "(((a{500}){500}){500}){500}"}},
    {"structured_output": {"regex": "(a*)*b"}},
    {"text": "\u202eabc a\u0301\u0302"},
]


@pytest.fixture(scope="module")
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return rpc.InferenceServiceStub(channel)


def request(**changes: Any) -> pb.GenerateRequest:
    prompt = {} if changes.keys() & {"text", "token_ids", "chat"} else {"text": SECRET}
    fields = {"model": MODEL, **prompt, **changes}
    fields["stopping"] = {"max_tokens": 1, **fields.get("stopping", {})}
    return pb.GenerateRequest(**fields)


def refusal(call: Any, message: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=60)
    return caught.value


@pytest.mark.parametrize(
    ("field", "changes"), FIELDS, ids=[f"{i}-{case[0]}" for i, case in enumerate(FIELDS)]
)
def test_bad_field_is_named(stub: Any, field: str, changes: dict[str, Any]) -> None:
    found = told(refusal(stub.Generate, request(**changes)))
    assert (found.code, found.reason, found.fields) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER", [field])
    assert found.retry_s is None


@pytest.mark.parametrize(("field", "changes"), UNSUPPORTED)
def test_unsupported_field_is_refused_by_name_over_grpc(
    stub: Any, field: str, changes: dict[str, Any]
) -> None:
    found = told(refusal(stub.Generate, request(**changes)))
    assert (found.code, found.reason, found.fields) == (Code.INVALID_ARGUMENT, "UNSUPPORTED_FEATURE", [field])


@pytest.mark.parametrize("changes", FINE)
def test_odd_values_in_range_are_served(stub: Any, changes: dict[str, Any]) -> None:
    assert stub.Generate(request(**changes), timeout=60).usage.completion_tokens == 1


# What would take ages where it is followed by trying: each is answered, and its tokens cost what others do.
EXPLOSIVE: list[dict[str, Any]] = [
    {"regex": "(a+)+$"},
    {"regex": "(x+x+)+y"},
    {"regex": "(a|a)*b"},
    {"regex": "[ab]*a[ab]{25}"},
    {"json_schema": '{"type": "string", "pattern": "^(a+)+$"}'},
    {"json_schema": '{"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}'},
    {"json_schema": '{"type": "array", "items": {"type": "string"}, "minItems": 100000000}'},
    {"json_schema": json.dumps({"$defs": {**DOUBLING, "d30": {"type": "string"}}, "$ref": "#/$defs/d0"})},
    {"ebnf_grammar": 'root ::= root "a" | root root | "b"'},
]


@pytest.mark.parametrize("grammar", EXPLOSIVE)
def test_explosive_grammar_costs_little(stub: Any, grammar: dict[str, Any]) -> None:
    """As grammars go some are too complex: then they are refused by name, and at once."""
    wanted = request(structured_output=grammar, stopping={"max_tokens": 40})
    began = time.monotonic()
    try:
        stub.Generate(wanted, timeout=60)
    except grpc.RpcError as error:
        found = told(error)
        code, fields = found.code, found.fields
    else:
        code, fields = Code.OK, []
    assert code is Code.OK or fields == [f"structured_output.{next(iter(grammar))}"]
    assert time.monotonic() - began < 20


def test_unknown_fields_are_ignored(channel: grpc.Channel) -> None:
    data = request().SerializeToString() + b"\xfa\x3e\x03abc"  # field 1007
    call = channel.unary_unary(f"{SERVICE}/Generate")
    assert pb.GenerateResponse.FromString(call(data, timeout=60)).usage.completion_tokens == 1


def test_prompt_longer_than_the_context_is_refused(stub: Any) -> None:
    found = told(refusal(stub.Generate, request(token_ids={"ids": [1] * 500}, stopping={"max_tokens": 500})))
    assert (found.code, found.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert found.metadata == {"prompt_tokens": "500", "max_tokens": "500", "limit": str(CONTEXT)}


@pytest.mark.parametrize("name", ["other", "../../etc/passwd", "x" * 100_000])
def test_unknown_model_is_not_found(stub: Any, name: str) -> None:
    found = told(refusal(stub.Generate, request(model=name)))
    assert (found.code, found.reason) == (Code.NOT_FOUND, "UNKNOWN_MODEL")
    assert found.resource == ("model", name[:128])


GARBAGE = [b"\xff\xff\xff\x01", b"\x1a\x02\xff\xfe", b"\x2a" * 60_000, b"\x0a\xff\xff\xff\xff\x07" + b"x"]


@pytest.mark.parametrize("data", GARBAGE)
@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "CancelRequest", "GetModel"])
def test_garbage_over_grpc_is_an_invalid_argument(channel: grpc.Channel, method: str, data: bytes) -> None:
    found = told(refusal(channel.unary_unary(f"{SERVICE}/{method}"), data))
    assert found.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)


def test_large_metadata_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(request(), metadata=(("x-big", "x" * 65_536),), timeout=60)
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED


def test_public_port_has_no_admin_rpcs(channel: grpc.Channel) -> None:
    for method in ("AdminService/GetServerInfo", "AdminService/DrainWorker", "InferenceService/Nothing"):
        error = refusal(channel.unary_unary(f"/diptych.v1.{method}"), b"")
        assert error.code() is Code.UNIMPLEMENTED


def test_time_limit_ends_with_status_ok(stub: Any) -> None:
    soon = request(stopping={"max_tokens": 400, "ignore_eos": True, "time_limit": {"nanos": 1_000_000}})
    assert stub.Generate(soon, timeout=60).outputs[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT


HTTP: list[tuple[int, str, str | None, dict[str, Any]]] = [
    (400, "invalid_parameter", "prompt", {"prompt": ""}),
    (400, "invalid_parameter", "prompt[1]", {"prompt": [1, 2**32 - 1]}),
    (400, "invalid_parameter", "n", {"n": 0}),
    (400, "invalid_parameter", "temperature", {"temperature": -1}),
    (400, "invalid_parameter", "top_p", {"top_p": 1.5}),
    (400, "invalid_parameter", "logit_bias", {"logit_bias": {"1": 1e39}}),
    (400, "invalid_parameter", "stop[0]", {"stop": [""]}),
    (400, "invalid_parameter", "cache_salt", {"cache_salt": f"{SECRET}\n"}),
    (400, "context_length_exceeded", "max_tokens", {"prompt": [1] * 500, "max_tokens": 500}),
    (400, "context_length_exceeded", "prompt", {"prompt": [1] * 1000, "max_tokens": 500}),
    (404, "model_not_found", None, {"model": "../../etc/passwd"}),
]


@pytest.mark.parametrize(("status", "code", "param", "changes"), HTTP)
def test_http_error_names_the_member(
    stack: Stack, status: int, code: str, param: str | None, changes: dict[str, Any]
) -> None:
    body = {"model": MODEL, "prompt": SECRET, "max_tokens": 1, **changes}
    found = post(stack, json.dumps(body).encode(), status)
    assert (found["code"], found["param"]) == (code, param)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"a": NaN}', b"[" * 100_000, b'{"a": "\xff"}', b"\x00"])
def test_garbage_over_http_is_an_invalid_parameter(stack: Stack, data: bytes) -> None:
    assert post(stack, data, 400)["code"] == "invalid_parameter"


def post(stack: Stack, data: bytes, status: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{stack.account['gateway']['http_port']}/v1/completions"
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=60)
    with caught.value as error:
        assert error.code == status
        return check_http(status, error.read().decode(), dict(error.headers))


def test_log_holds_no_value_of_callers(stack: Stack) -> None:
    """The last of this module: all processes write to this one file."""
    assert SECRET not in stack.log.read_text(errors="replace")
