"""A small client of the public API, for scripts and back ends.

    from diptych.client import Client, chat

    with Client("127.0.0.1:50051") as client:
        print(client.generate(chat("What is the capital of France?"), max_tokens=16).text)
        for chunk in client.stream(chat("Tell me a story."), temperature=0.8, seed=1):
            print(chunk.text, end="", flush=True)

A stream with `resume=True` survives its gateway: it goes on at the next of the client's addresses, and
nothing of it is lost or repeated (see `diptych.client.resumption`):

    with Client(["gateway-a:50051", "gateway-b:50051"]) as client:
        for chunk in client.stream("Once upon a time", resume=True): ...

AsyncClient is the same with `await` and `async for`. Needs grpcio, protobuf and googleapis-common-protos (the
messages of rich errors), nothing else of Diptych. Every call raises CallFailed; leaving a stream early
cancels the request on the server. All options are in `diptych.client.options.Options`, and which failed calls
are repeated is said in `diptych.client.channel`.
"""

from collections.abc import Sequence
from typing import Any

from diptych.client.aio_client import AsyncClient, AsyncStream
from diptych.client.completion import Received
from diptych.client.failure import CallFailed
from diptych.client.options import ImageUrl, Message, Options, Prompt, Tool
from diptych.client.results import (
    Choice,
    Chunk,
    Completion,
    Model,
    PromptInfo,
    Timings,
    TokenLogprob,
    Tokens,
    ToolCall,
    Usage,
)
from diptych.client.sync_client import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "CallFailed",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "ImageUrl",
    "Message",
    "Model",
    "Options",
    "Prompt",
    "PromptInfo",
    "Received",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tokens",
    "Tool",
    "ToolCall",
    "Usage",
    "chat",
]


def chat(
    user: str,
    *,
    images: Sequence[bytes | ImageUrl] = (),
    system: str | None = None,
    history: Sequence[Any] = (),
) -> list[Message]:
    """Return the turns of a chat that ends with what the user says now.

    `images` are files of PNG, JPEG, WebP or GIF images, or their addresses, which come before the text.
    """
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *history, {"role": "user", "content": [*images, user] if images else user}]
