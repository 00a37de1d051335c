"""``diptych.v1.InferenceService``: one function per RPC, none of them with logic of its own."""

from __future__ import annotations

from functools import partial

import grpc

from diptych.v1 import inference_pb2 as pb
from gateway.call import Calls
from gateway.frontends.grpc.grpc_service import Body, add_service
from gateway.generate import Generator
from gateway.tokenizer_service import TokenizerService

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE = DESCRIPTOR.full_name


def add_inference_service(
    server: grpc.aio.Server, calls: Calls, generator: Generator, text: TokenizerService
) -> None:
    """Register every RPC of the public service."""
    bodies: dict[str, Body] = {
        "StreamGenerate": partial(generator.stream, resumable=True),
        "Generate": generator.collect,
        "Tokenize": text.tokenize,
        "Detokenize": text.detokenize,
        "ListModels": text.list_models,
        "GetModel": text.get_model,
        "CancelRequest": text.cancel_request,
    }
    add_service(server, calls, DESCRIPTOR, bodies)
