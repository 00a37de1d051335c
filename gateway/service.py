"""``diptych.v1.InferenceService``: one function per RPC, none of them with logic of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from diptych.v1 import inference_pb2 as pb
from gateway.call import Calls
from gateway.generate import Generator
from gateway.grpc_service import Body, add_service
from gateway.text_rpcs import TextRpcs

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE = DESCRIPTOR.full_name


def add_inference_service(
    server: grpc.aio.Server, calls: Calls, generator: Generator, text: TextRpcs
) -> None:
    """Register every RPC of the public service."""
    bodies: dict[str, Body] = {
        "StreamGenerate": partial(generator.stream, resumable=True),
        "Generate": generator.whole,
        "Tokenize": _plain(text.tokenize),
        "Detokenize": _plain(text.detokenize),
        "ListModels": _plain(text.list_models),
        "GetModel": _plain(text.get_model),
        "CancelRequest": _plain(text.cancel_request),
    }
    add_service(server, calls, DESCRIPTOR, bodies)


def _plain(body: Callable[[Any], Awaitable[Message]]) -> Body:
    """For what needs to know nothing of its call."""
    return lambda request, _: body(request)
