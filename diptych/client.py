"""A small client of the public API, for scripts and back ends.

    from diptych.client import Client, chat

    with Client("127.0.0.1:50051") as client:
        print(client.generate(chat("What is the capital of France?"), max_tokens=16).text)
        for chunk in client.stream(chat("Tell me a story."), temperature=0.8, seed=1):
            print(chunk.text, end="", flush=True)

AsyncClient is the same with `await` and `async for`. Needs grpcio and protobuf, nothing else of Diptych.
Every call raises CallFailed; leaving a stream early cancels the request on the server.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from diptych.completion import (
    Chunk,
    Completion,
    Message,
    Options,
    Prompt,
    Timings,
    Usage,
    build_request,
    read_chunk,
    read_completion,
)
from diptych.failure import CallFailed, read_failure
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc

__all__ = [
    "AsyncClient",
    "CallFailed",
    "Chunk",
    "Client",
    "Completion",
    "Message",
    "Options",
    "Prompt",
    "Timings",
    "Usage",
    "chat",
]

DEFAULT_ADDRESS = "127.0.0.1:50051"

# An answer with all its text and token ids may be longer than gRPC's default of 4 MiB.
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


def chat(user: str, *, system: str | None = None, history: Sequence[Message] = ()) -> list[Message]:
    """The turns of a chat that ends with what the user says now."""
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *history, {"role": "user", "content": user}]


class Client:
    """Synchronous client of one server. Safe to share between threads.

    `model` is the served name to ask for; absent, the server's first one is looked up once.
    `credentials` makes the channel a TLS one.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = (
            grpc.insecure_channel(address, _CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, _CHANNEL_OPTIONS)
        )
        self._stub = rpc.InferenceServiceStub(self._channel)
        self._model = model

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The whole answer. `timeout_s` is the deadline of the call, which the server obeys too."""
        request = build_request(prompt, self.model, options)
        try:
            return read_completion(self._stub.Generate(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise read_failure(error) from error

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Generator[Chunk, None, None]:
        """The answer piece by piece. Who leaves the loop early may `close()` it to cancel at once."""
        request = build_request(prompt, self.model, options)
        call = self._stub.StreamGenerate(request, timeout=timeout_s)
        try:
            for response in call:
                yield read_chunk(response)
        except grpc.RpcError as error:
            raise read_failure(error) from error
        finally:
            call.cancel()  # an abandoned stream would go on; after its end this does nothing

    @property
    def model(self) -> str:
        """The name that requests ask for."""
        if self._model is None:
            try:
                self._model = _first_model(self._stub.ListModels(pb.ListModelsRequest()))
            except grpc.RpcError as error:
                raise read_failure(error) from error
        return self._model

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Asynchronous client of one server, of one event loop. Parameters as for Client."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = (
            grpc.aio.insecure_channel(address, _CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, _CHANNEL_OPTIONS)
        )
        self._stub = rpc.InferenceServiceStub(self._channel)
        self._model = model

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The whole answer. `timeout_s` is the deadline of the call, which the server obeys too."""
        request = build_request(prompt, await self.model(), options)
        try:
            return read_completion(await self._stub.Generate(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise read_failure(error) from error

    async def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """The answer piece by piece. Who leaves the loop early closes it with contextlib.aclosing."""
        request = build_request(prompt, await self.model(), options)
        call = self._stub.StreamGenerate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield read_chunk(response)
        except grpc.RpcError as error:
            raise read_failure(error) from error
        finally:
            call.cancel()  # an abandoned stream would go on; after its end this does nothing

    async def model(self) -> str:
        """The name that requests ask for."""
        if self._model is None:
            try:
                self._model = _first_model(await self._stub.ListModels(pb.ListModelsRequest()))
            except grpc.RpcError as error:
                raise read_failure(error) from error
        return self._model

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _first_model(response: pb.ListModelsResponse) -> str:
    if not response.models:
        raise CallFailed(grpc.StatusCode.NOT_FOUND, "the server lists no model")
    return response.models[0].name
