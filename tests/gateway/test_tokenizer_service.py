"""Tokenize, Detokenize and the listing calls."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.parameters import PARAMETERS
from diptych.runtime.errors import DiptychError, InvalidParameter, UnknownModel, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.cooperative_yield import PORTION
from gateway.model.served_model import ServedModel
from gateway.request.field_checks import existing_request_id
from gateway.request.validation import parse_request
from gateway.tokenizer_service import Tokenized, check_list_models, detokenize, tokenize, tokenize_response
from tests.gateway.loop_turns import turns_beside

MODEL = "SmolLM2-135M-Instruct"
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])


@pytest.mark.parametrize("prompt", [{"text": "Hello <|im_end|>"}, {"chat": CHAT}])
def test_tokenize_returns_the_ids_of_a_generation(bundled: ServedModel, prompt: dict[str, Any]) -> None:
    found = tokenize(pb.TokenizeRequest(model=MODEL, **prompt), bundled)
    request = pb.GenerateRequest(model=MODEL, **prompt)
    assert tuple(found.ids) == parse_request(request, bundled).prompt_ids
    assert (found.tokens, found.offsets) == ([], [])


def test_tokenize_returns_tokens_and_offsets_on_request(bundled: ServedModel) -> None:
    request = pb.TokenizeRequest(model=MODEL, text="Hi 你", return_tokens=True, return_offsets=True)
    found = tokenize(request, bundled)
    assert found.tokens[:2] == ["Hi", "Ġ"]
    assert len(found.tokens) == len(found.offsets) == len(found.ids)
    assert found.offsets[0] == (0, 2)
    assert found.offsets[-1][1] == 4
    chat = tokenize(pb.TokenizeRequest(model=MODEL, chat=CHAT, return_tokens=True), bundled)
    assert chat.tokens[0] == "<|im_start|>"


def test_detokenize_inverts_tokenize(bundled: ServedModel) -> None:
    ids = tokenize(pb.TokenizeRequest(model=MODEL, text="naïve 😀"), bundled).ids
    assert detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=ids), bundled) == "naïve 😀"
    assert detokenize(pb.DetokenizeRequest(model=MODEL), bundled) == ""
    special = pb.DetokenizeRequest(model=MODEL, token_ids=[1])
    assert detokenize(special, bundled) == ""
    special.skip_special_tokens = False
    assert detokenize(special, bundled) == "<|im_start|>"


@pytest.mark.parametrize(
    ("kind", "field", "request_"),
    [
        (InvalidParameter, "model", pb.TokenizeRequest(text="a")),
        (InvalidParameter, "prompt", pb.TokenizeRequest(model=MODEL)),
        (InvalidParameter, "text", pb.TokenizeRequest(model=MODEL, text="")),
        (InvalidParameter, "text", pb.TokenizeRequest(model=MODEL, text="a" * (limits.MAX_PROMPT_BYTES + 1))),
        (InvalidParameter, "chat.messages", pb.TokenizeRequest(model=MODEL, chat=pb.ChatPrompt())),
        (
            UnsupportedFeature,
            "return_offsets",
            pb.TokenizeRequest(model=MODEL, chat=CHAT, return_offsets=True),
        ),
        (
            UnsupportedFeature,
            "add_special_tokens",
            pb.TokenizeRequest(model=MODEL, chat=CHAT, add_special_tokens=True),
        ),
    ],
)
def test_tokenize_names_the_bad_field(
    bundled: ServedModel, kind: type[DiptychError], field: str, request_: pb.TokenizeRequest
) -> None:
    with pytest.raises(kind) as caught:
        tokenize(request_, bundled)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_tokenize_can_omit_special_tokens(bundled: ServedModel) -> None:
    request = pb.TokenizeRequest(model=MODEL, chat=CHAT, add_special_tokens=False)
    assert tokenize(request, bundled).ids


def test_detokenize_names_the_bad_field(bundled: ServedModel) -> None:
    most = [33] * limits.MAX_DETOKENIZE_IDS
    assert detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=most), bundled)
    for field, ids in (("token_ids", [*most, 5]), ("token_ids[1]", [0, bundled.card.vocab_size])):
        with pytest.raises(InvalidParameter) as caught:
            detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=ids), bundled)
        assert [violation.field for violation in caught.value.violations] == [field]


def test_unknown_model_is_not_found(bundled: ServedModel) -> None:
    with pytest.raises(UnknownModel):
        tokenize(pb.TokenizeRequest(model="other", text="a"), bundled)
    with pytest.raises(UnknownModel):
        detokenize(pb.DetokenizeRequest(model="other", token_ids=[1]), bundled)


def test_list_models_has_one_page() -> None:
    check_list_models(pb.ListModelsRequest(page_size=10))
    for field, request in (
        ("page_size", pb.ListModelsRequest(page_size=-1)),
        ("page_token", pb.ListModelsRequest(page_token="next")),
    ):
        with pytest.raises(InvalidParameter) as caught:
            check_list_models(request)
        assert [violation.field for violation in caught.value.violations] == [field]


def test_cancel_request_requires_a_valid_id() -> None:
    assert existing_request_id("a-1") == "a-1"
    for bad in ("", "a b", "x" * (PARAMETERS["request_id"].longest + 1)):
        with pytest.raises(InvalidParameter, match="request_id"):
            existing_request_id(bad)


async def test_tokenize_response_yields_between_portions_of_offsets() -> None:
    count = 20 * PORTION
    found = Tokenized([7] * count, ["a"] * count, [(i, i + 1) for i in range(count)])
    response, turns = await turns_beside(tokenize_response(found, 99))
    assert [(offset.start, offset.end) for offset in response.offsets] == found.offsets
    assert (list(response.token_ids), list(response.tokens)) == (found.ids, found.tokens)
    assert response.max_context_length == 99
    assert turns >= 19
