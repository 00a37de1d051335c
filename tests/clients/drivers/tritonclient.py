"""Driver of tritonclient over gRPC: KServe's protocol with Triton's streams, for text and no chats."""

from __future__ import annotations

import queue
from typing import Any

import client_paths as paths
import numpy as np
import tritonclient.grpc as triton
from client_paths import NotOfferedError, Server
from tritonclient.utils import InferenceServerException

PROMPT = "The capital of France is"
KNOBS: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0}
WAIT_S = 120.0


def text(prompt: str) -> Any:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    return tensor


def output(result: Any) -> str:
    return b"".join(result.as_numpy("text_output").tolist()).decode()


def infer(server: Server, prompt: str, **knobs: Any) -> str:
    with triton.InferenceServerClient(server.grpc_address) as client:
        return output(client.infer(server.model, [text(prompt)], parameters=KNOBS | knobs))


def plain(server: Server) -> None:
    paths.check("Paris" in infer(server, PROMPT), "no Paris")


def streamed(server: Server) -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: waiting.put((result, error)))
        client.async_stream_infer(server.model, [text(PROMPT)], parameters=KNOBS)
        pieces, final = [], False
        while not final:
            result, error = waiting.get(timeout=WAIT_S)
            if error is not None:
                raise error
            pieces.append(output(result))
            final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    paths.check("Paris" in "".join(pieces) and len(pieces) > 1, pieces)


def structured(server: Server) -> None:
    raise NotOfferedError("KServe's protocol has no constrained output")


def no_chats(server: Server) -> None:
    raise NotOfferedError("KServe's protocol has no chats and no tools")


def overflow(server: Server) -> str:
    try:
        infer(server, paths.LONG_PROMPT)
    except InferenceServerException as error:
        paths.check("8192" in error.message(), error)
        return str(error.status())
    raise AssertionError("a prompt beyond the context was answered")


def cancel(server: Server) -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: waiting.put((result, error)))
        knobs = KNOBS | {"max_tokens": paths.ENDLESS_TOKENS, "ignore_eos": True}
        client.async_stream_infer(server.model, [text(paths.STORY)], parameters=knobs)
        for _ in range(3):
            _, error = waiting.get(timeout=WAIT_S)
            paths.check(error is None, error)
        client.stop_stream(cancel_requests=True)
    paths.expect_idle(server)


if __name__ == "__main__":
    paths.report(
        {
            "plain": plain,
            "streamed": streamed,
            "structured": structured,
            "tools": no_chats,
            "second turn": no_chats,
            "overflow": overflow,
            "cancel": cancel,
        }
    )
