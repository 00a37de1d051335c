"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from diptych.client.channel import channel_options
from diptych.client.completion import Received, read_chunk, read_completion, read_models, read_tokens
from diptych.client.credentials import Access, Tls, tls_credentials
from diptych.client.failure import CallFailed, after_output, read_failure
from diptych.client.options import Options, Prompt, build_request
from diptych.client.results import Chunk, Completion, Model, Tokens
from diptych.client.resumption import Resumption
from diptych.client.servers import Servers
from diptych.client.sync_client import DEFAULT_ADDRESS, first_model
from diptych.client.text_requests import TokenizeOptions, detokenize_request, tokenize_request
from diptych.client.timeouts import call_timeout, time_left
from diptych.v1 import inference_pb2 as pb

T = TypeVar("T")


class AsyncStream(AsyncIterator[Chunk]):
    """An answer piece by piece. Who leaves early closes it: `async with client.stream(…) as stream`.

    `received` keeps what came, as that of `Stream`.
    """

    def __init__(self, chunks: Callable[[Received], AsyncGenerator[Chunk, None]]) -> None:
        self.received = Received()
        self._chunks = chunks(self.received)

    async def __anext__(self) -> Chunk:
        try:
            return await self._chunks.__anext__()
        except CallFailed as failure:  # outside of what resumes, which is to see the server's own code
            raise (after_output(failure) if self.received.has_output else failure) from failure.__cause__

    async def aclose(self) -> None:
        await self._chunks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """Asynchronous client of one server, of one event loop. Parameters and methods as those of `Client`."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        api_key: str | None = None,
        tls: Tls = False,
        credentials: grpc.ChannelCredentials | None = None,
        retries: int = 3,
    ) -> None:
        access = Access(api_key, credentials or tls_credentials(tls))

        def connect(address: str, retries: int) -> grpc.aio.Channel:
            return access.aio_channel(address, channel_options(retries))

        self._servers = Servers(address, retries, connect, access.metadata)
        self._stub = self._servers.first
        self._model = model

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Return the whole answer.

        `timeout_s` is the deadline of the call, also for the server; inf: none.
        """
        model, left_s = await self._model_within(timeout_s)
        request = build_request(prompt, model, options)
        return read_completion(await _typed(self._stub.Generate(request, timeout=left_s)))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        resume: bool = False,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Stream the answer piece by piece, as `Client.stream`.

        The call begins with the first piece asked for.
        """
        timeout_s = call_timeout(timeout_s)  # what is wrong with it is said here, not at the first piece

        async def call() -> Any:
            model, left_s = await self._model_within(timeout_s)
            return self._stub.StreamGenerate(build_request(prompt, model, options), timeout=left_s)

        if not resume:
            return AsyncStream(lambda received: _chunks(call, received))
        return AsyncStream(
            lambda received: _resumed_chunks(
                lambda: build_request(prompt, "", options),
                self._model_at,
                self._servers,
                received,
                timeout_s,
            )
        )

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End the request of this id, whichever client began it: it finishes as "cancelled".

        False: no such request.
        """
        request = pb.CancelRequestRequest(request_id=request_id)
        return bool((await _typed(self._stub.CancelRequest(request, timeout=timeout_s))).was_running)

    async def tokenize(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[TokenizeOptions]
    ) -> Tokens:
        """Return the tokens that a request with this text or chat would run on."""
        model, left_s = await self._model_within(timeout_s)
        request = tokenize_request(prompt, model, **options)
        return read_tokens(await _typed(self._stub.Tokenize(request, timeout=left_s)))

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids; `skip_special_tokens` leaves control tokens out."""
        model, left_s = await self._model_within(timeout_s)
        request = detokenize_request(token_ids, model, skip_special_tokens=skip_special_tokens)
        return str((await _typed(self._stub.Detokenize(request, timeout=left_s))).text)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the models that the server serves."""
        return await _models(self._stub, timeout_s)

    async def model(self) -> str:
        """Return the name that requests ask for."""
        return await self._model_at(self._stub, None)

    async def _model_within(self, timeout_s: float | None) -> tuple[str, float | None]:
        """Return the name to ask for, and the seconds that looking it up leaves of a call's time."""
        left = time_left(timeout_s)
        return await self._model_at(self._stub, left()), left()

    async def _model_at(self, stub: Any, timeout_s: float | None) -> str:
        if self._model is None:
            self._model = first_model(await _models(stub, timeout_s))
        return self._model

    async def close(self) -> None:
        """Close the connections. Streams that run end."""
        self._servers.closed = True
        for channel in self._servers.channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _typed(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.RpcError as error:
        raise read_failure(error) from error


async def _models(stub: Any, timeout_s: float | None) -> tuple[Model, ...]:
    return read_models(await _typed(stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s)))


async def _resumed_chunks(
    build: Callable[[], pb.GenerateRequest],
    model_at: Callable[[Any, float | None], Awaitable[str]],
    servers: Servers[grpc.aio.Channel],
    received: Received,
    timeout_s: float | None,
) -> AsyncGenerator[Chunk, None]:
    plan = Resumption(build(), received, servers=len(servers), retries=servers.retries, timeout_s=timeout_s)
    while True:
        stub = servers.once(plan.server)

        async def call() -> Any:
            request = plan.request(await model_at(stub, plan.timeout_s))  # noqa: B023
            return stub.StreamGenerate(request, timeout=plan.timeout_s)  # noqa: B023

        try:
            async with aclosing(_chunks(call, received)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except CallFailed as failure:
            if plan.complete(failure):
                return
            if not servers.closed:
                await asyncio.sleep(plan.wait_s(failure))
            if servers.closed:
                raise


async def _chunks(begin: Callable[[], Awaitable[Any]], received: Received) -> AsyncGenerator[Chunk, None]:
    call = await begin()
    try:
        async for response in call:
            chunk = read_chunk(response)
            received.add(chunk)
            yield chunk
    except grpc.RpcError as error:
        raise read_failure(error) from error
    finally:
        call.cancel()  # an abandoned stream would go on; after its end this does nothing
