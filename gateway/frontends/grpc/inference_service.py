"""``diptych.v1.InferenceService``: one function per RPC, none of them with logic of its own."""

from __future__ import annotations

from functools import partial

import grpc

from diptych.v1 import inference_pb2 as pb
from gateway.call import Calls
from gateway.frontends.grpc.grpc_service import Body, add_service
from gateway.served_models.router import ModelRouter

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE = DESCRIPTOR.full_name


def add_inference_service(server: grpc.aio.Server, calls: Calls, router: ModelRouter) -> None:
    """Register every RPC of the public service."""
    bodies: dict[str, Body] = {
        "StreamGenerate": partial(router.stream, resumable=True),
        "Generate": router.collect,
        "Tokenize": router.tokenize,
        "Detokenize": router.detokenize,
        "ListModels": router.list_models,
        "GetModel": router.get_model,
        "CancelRequest": router.cancel_request,
    }
    add_service(server, calls, DESCRIPTOR, bodies)
