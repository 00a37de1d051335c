"""Checks of what a client says it has of a stream that broke."""

from __future__ import annotations

from dataclasses import replace

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway.request.parsed_request import ParsedRequest
from gateway.request.resume_token import Opened

FIELD = "received_token_ids"


def refuse_stray_ids(request: pb.GenerateRequest) -> None:
    """Raises `InvalidParameter`: ids received of which stream?"""
    if request.received_token_ids and not request.resume_token:
        raise InvalidParameter(FIELD, "goes with resume_token only")


def resumable(request: ParsedRequest) -> bool:
    """Whether a stream of it can be gone on with: the ids that a client has say all that it has."""
    return request.choices == 1 and request.beam_width is None and request.want_token_ids


def refuse_several(request: ParsedRequest) -> None:
    """Raises `UnsupportedFeature` for outputs that do not stream one by one."""
    for path, wanted in (
        ("sampling.n", request.n > 1),
        ("sampling.best_of", request.best_of is not None),
        ("sampling.beam_width", request.beam_width is not None),
    ):
        if wanted:
            raise UnsupportedFeature(path, "a stream of several outputs cannot be resumed")


def resumed(
    request: ParsedRequest, opened: Opened, received: tuple[int, ...], vocab_size: int
) -> ParsedRequest:
    """The request as it goes on after ``received``. What came with its first message does not come again.

    Raises `InvalidParameter` for ids that this request cannot have got.
    """
    if len(received) > opened.max_tokens:
        raise InvalidParameter(FIELD, "has more ids than max_tokens")
    if any(one >= vocab_size for one in received):
        raise InvalidParameter(FIELD, f"every id must be below {vocab_size}")
    return replace(
        request, received=received, output_limit=opened.max_tokens, prompt_logprobs=None, echo=False
    )
