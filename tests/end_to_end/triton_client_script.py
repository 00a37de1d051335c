"""Asks a running system everything that users of tritonclient ask, and prints what came as one JSON object.

    .venv-clients/bin/python tests/end_to_end/triton_client_script.py HOST:PORT

tritonclient wants an older protobuf than the product, so this runs with an interpreter of its own
(`make clients`) and imports nothing of the product. It judges nothing: that is test_kserve.py's part.
"""

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The capital of France is"
OTHER = "One, two, three,"
KNOBS: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
WAIT_S = 60.0


def text(prompt: str) -> Any:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    return tensor


def ids(values: list[int]) -> Any:
    tensor = triton.InferInput("token_ids", [len(values)], "INT32")
    tensor.set_data_from_numpy(np.array(values, dtype=np.int32))
    return tensor


def sampling(**members: Any) -> Any:
    """As Triton's vLLM backend takes them."""
    tensor = triton.InferInput("sampling_parameters", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([json.dumps(members).encode()], dtype=np.object_))
    return tensor


def read(result: Any) -> dict[str, Any]:
    """A result as JSON can say it."""
    response = result.get_response()
    return {
        "id": response.id,
        "text": b"".join(result.as_numpy("text_output").tolist()).decode(),
        "token_ids": result.as_numpy("token_ids").tolist(),
        "finish_reason": [reason.decode() for reason in result.as_numpy("finish_reason").tolist()],
        "final": response.parameters["triton_final_response"].bool_param,
        "completion_tokens": response.parameters["completion_tokens"].int64_param,
    }


def about(client: Any) -> dict[str, Any]:
    metadata = client.get_model_metadata(MODEL, as_json=True)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(MODEL),
        "server": client.get_server_metadata(as_json=True)["name"],
        "inputs": [tensor["name"] for tensor in metadata["inputs"]],
        "outputs": [tensor["name"] for tensor in metadata["outputs"]],
    }


def whole(client: Any) -> dict[str, Any]:
    by_text = read(client.infer(MODEL, [text(PROMPT)], request_id="whole", parameters=KNOBS))
    waiting: queue.Queue[Any] = queue.Queue()
    quoted = sampling(max_tokens="12", temperature="0", ignore_eos=True)
    client.async_infer(MODEL, [text(PROMPT), quoted], lambda result, error: waiting.put((result, error)))
    result, error = waiting.get(timeout=WAIT_S)
    assert error is None, error
    by_ids = read(client.infer(MODEL, [ids(by_text["token_ids"])], parameters=KNOBS))
    return {"by_text": by_text, "by_json": read(result), "by_ids": by_ids}


def refused(client: Any) -> dict[str, str]:
    found = {}
    for name, model, knobs in (
        ("parameter", MODEL, {"top_p": 2.0}),
        ("model", "other", {}),
        ("timeout", MODEL, {"max_tokens": 2000, "ignore_eos": True}),
    ):
        try:
            client.infer(model, [text(PROMPT)], parameters=knobs, timeout=200_000)
        except InferenceServerException as error:
            found[name] = f"{error.status()} {error.message()}"
    return found


def streamed(client: Any) -> dict[str, Any]:
    """Two good requests and a bad one on one stream."""
    waiting: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: waiting.put((result, error)))
    client.async_stream_infer(MODEL, [text(PROMPT)], request_id="a", parameters=KNOBS)
    client.async_stream_infer(MODEL, [text(OTHER)], request_id="b", parameters=KNOBS)
    client.async_stream_infer(MODEL, [text(PROMPT)], request_id="c", parameters={"top_p": 2.0})
    pieces: dict[str, list[Any]] = {"a": [], "b": []}
    errors: list[str] = []
    open_ones = 3
    while open_ones:
        result, error = waiting.get(timeout=WAIT_S)
        if error is not None:
            errors.append(error.message())
            open_ones -= 1
            continue
        piece = read(result)
        pieces[piece["id"]].append(piece)
        open_ones -= piece["final"]
    client.stop_stream()
    return {"pieces": pieces, "errors": errors}


def cancelled(client: Any) -> int:
    """How many pieces came before a stream of endless requests was cancelled."""
    waiting: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: waiting.put((result, error)))
    endless = {**KNOBS, "max_tokens": 4000}
    for name in ("a", "b"):
        client.async_stream_infer(MODEL, [text(OTHER)], request_id=name, parameters=endless)
    for _ in range(4):
        _, error = waiting.get(timeout=WAIT_S)
        assert error is None, error
    client.stop_stream(cancel_requests=True)
    return 4


async def streamed_aio(address: str) -> list[dict[str, Any]]:
    async def requests() -> Any:
        yield {"model_name": MODEL, "inputs": [text(PROMPT)], "request_id": "aio", "parameters": KNOBS}

    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_model_ready(MODEL)
        pieces = []
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            pieces.append(read(result))
        return pieces


def main(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        found = {
            "about": about(client),
            "whole": whole(client),
            "refused": refused(client),
            "streamed": streamed(client),
            "cancelled": cancelled(client),
        }
    found["aio"] = asyncio.run(streamed_aio(address))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
