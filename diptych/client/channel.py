"""Channels of the client: message sizes, and the calls that gRPC itself repeats.

A call that failed with UNAVAILABLE or RESOURCE_EXHAUSTED before its first message came is repeated by gRPC,
as the server's rule allows: nothing was delivered. The wait is the server's hint where it gave one (the
trailer `grpc-retry-pushback-ms`), else a random time that doubles. Once a message has come gRPC repeats
nothing. Deadlines bound all attempts together. Source: gRFC A6,
https://github.com/grpc/proposal/blob/master/A6-client-retries.md

CANCELLED is repeated as well: no gateway says it, but gRPC's server does in its name when it stops, of
calls that had come and that no handler had begun (https://github.com/grpc/grpc/issues/41785). What the caller
itself cancels never gets so far: gRPC repeats nothing of that.
"""

import json
from typing import Any

MAX_RETRIES = 4  # gRPC makes five attempts at most, whatever it is told
_MAX_RECEIVED_BYTES = 64 << 20  # an answer with all its token ids and scores is longer than gRPC's default
_RETRY_BUFFER_BYTES = 4 << 20  # of the longest request: gRPC does not repeat what it could not keep
_SERVICE = "diptych.v1.InferenceService"


def channel_options(retries: int) -> list[tuple[str, Any]]:
    """Raise ValueError for a number of retries that gRPC would not make."""
    if not 0 <= retries <= MAX_RETRIES:
        raise ValueError(f"retries must be from 0 to {MAX_RETRIES}")
    options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", _MAX_RECEIVED_BYTES)]
    if retries == 0:
        return [*options, ("grpc.enable_retries", 0)]
    return [
        *options,
        ("grpc.enable_retries", 1),
        ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
        ("grpc.service_config", json.dumps(_service_config(retries))),
    ]


def _service_config(retries: int) -> dict[str, Any]:
    policy = {
        "maxAttempts": retries + 1,
        "initialBackoff": "0.2s",
        "maxBackoff": "5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
    }
    return {"methodConfig": [{"name": [{"service": _SERVICE}], "retryPolicy": policy}]}
