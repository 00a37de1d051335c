"""Requests that a smaller model answers."""

from __future__ import annotations

import pytest

from diptych.v1 import inference_pb2 as pb
from gateway.model.small_requests import SmallRequests, parse_small_requests, prompt_bytes


def test_rules_are_parsed() -> None:
    assert parse_small_requests("chat=tiny:2000,big=org/m:1:7") == (
        SmallRequests("chat", "tiny", 2000),
        SmallRequests("big", "org/m:1", 7),
    )
    assert parse_small_requests("") == ()


@pytest.mark.parametrize("text", ["chat=tiny", "chat", "a=a:1", "a=b:0", "a=b:1,a=c:1", "a=b:x", " =b:1"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME=MODEL:BYTES|the name|the bytes"):
        parse_small_requests(text)


def test_size_of_a_prompt_is_that_of_all_that_it_holds() -> None:
    chat = pb.GenerateRequest()
    chat.chat.messages.add(role="user", content="x" * 100)
    assert 100 < prompt_bytes(chat) < 130
    assert prompt_bytes(pb.GenerateRequest(text="\u00e9" * 10)) == 20
    assert prompt_bytes(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))) == 12
    assert prompt_bytes(pb.GenerateRequest()) == 0
