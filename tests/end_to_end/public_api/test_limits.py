"""Limits through real sockets: that of the message, which gRPC itself holds, and some of its fields'."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from diptych.parameters import PARAMETERS
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from gateway import limits
from tests.end_to_end.stack import Stack
from tests.end_to_end.tiny_system import MODEL
from tests.gateway.failing_calls import check_http, told

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def stub(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.address) as channel:
        yield rpc.InferenceServiceStub(channel)


def refusal(stub: Any, request: pb.GenerateRequest) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(request)
    return caught.value


def test_the_message_at_its_limit_is_read_and_one_byte_more_is_not(stub: Any) -> None:
    padding = limits.MAX_MESSAGE_BYTES - pb.GenerateRequest(model=MODEL, text="x" * 2**21).ByteSize() + 2**21
    request = pb.GenerateRequest(model=MODEL, text="x" * padding)
    assert request.ByteSize() == limits.MAX_MESSAGE_BYTES
    assert told(refusal(stub, request)).fields == ["text"]
    request.text += "x"
    error = refusal(stub, request)
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "grpc-retry-pushback-ms" not in dict(error.trailing_metadata() or ())


@pytest.mark.parametrize("more", [0, 1])
def test_where_a_message_is_parsed_changes_nothing(stub: Any, more: int) -> None:
    """At this size it is parsed in a thread, below on the event loop."""
    request = pb.GenerateRequest(model=MODEL, text="a", stopping=pb.StoppingCriteria(max_tokens=2))
    request.stopping.stop.extend(["\x01" * 900, "\x02" * 900, "\x03" * 150])
    request.stopping.stop[2] += "\x01" * (limits.INLINE_PARSE_BYTES - 1 - request.ByteSize() + more)
    assert request.ByteSize() == limits.INLINE_PARSE_BYTES - 1 + more
    assert stub.Generate(request).usage.prompt_tokens == 1


AT_AND_ABOVE: dict[str, Any] = {
    "sampling.n": lambda more: {"sampling": {"n": PARAMETERS["n"].high + more}},
    "stopping.stop": lambda more: {"stopping": {"stop": ["\x01"] * (PARAMETERS["stop"].most + more)}},
    "response.logprobs": lambda more: {"response": {"logprobs": PARAMETERS["logprobs"].high + more}},
    "cache.salt": lambda more: {"cache": {"salt": "s" * (PARAMETERS["cache_salt"].longest + more)}},
    "request_id": lambda more: {"request_id": "r" * (PARAMETERS["request_id"].longest + more)},
}


@pytest.mark.parametrize("field", AT_AND_ABOVE)
def test_a_field_at_its_limit_is_answered_and_above_it_named(stub: Any, field: str) -> None:
    def request(more: int) -> pb.GenerateRequest:
        changes = AT_AND_ABOVE[field](more)
        changes.setdefault("stopping", {})["max_tokens"] = 1
        return pb.GenerateRequest(model=MODEL, token_ids={"ids": [3, 4]}, **changes)

    assert stub.Generate(request(0), timeout=60).usage.prompt_tokens == 2
    found = told(refusal(stub, request(1)))
    assert (found.code, found.reason, found.fields) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER", [field])


@pytest.mark.parametrize("more", [0, 1])
def test_a_body_at_its_limit_is_read_and_one_byte_more_is_not(stack: Stack, more: int) -> None:
    url = f"http://127.0.0.1:{stack.account['gateway']['http_port']}/v1/completions"
    start = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    data = start + b" " * (limits.MAX_BODY_BYTES - len(start) + more)
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if not more:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.status == 200
        return
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=60)
    with caught.value as error:
        assert error.code == 413
        assert check_http(413, error.read().decode(), dict(error.headers))["code"] == "body_too_large"
