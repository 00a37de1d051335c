"""A server of Diptych's protocol that answers as a test wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from diptych.v1 import inference_pb2_grpc as rpc


@contextmanager
def served(
    service: rpc.InferenceServiceServicer, *, calls: int = 4, options: Sequence[tuple[str, int]] = ()
) -> Iterator[str]:
    """The address at which `service` answers, so many `calls` at a time, in threads."""
    with ThreadPoolExecutor(calls) as threads:
        server = grpc.server(threads, options=options)
        rpc.add_InferenceServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()
