"""The synchronous client."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
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
from diptych.client.text_requests import TokenizeOptions, detokenize_request, tokenize_request
from diptych.client.timeouts import call_timeout, time_left
from diptych.v1 import inference_pb2 as pb

T = TypeVar("T")
DEFAULT_ADDRESS = "127.0.0.1:50051"


class Stream(Iterator[Chunk]):
    """An answer piece by piece. Who leaves early may `close()` it to cancel at once.

    `received` keeps what came, also when the stream broke off: its text and token ids, and the server's token
    to resume with, if it gave one.
    """

    def __init__(self, chunks: Callable[[Received], Generator[Chunk, None, None]]) -> None:
        self.received = Received()
        self._chunks = chunks(self.received)

    def __next__(self) -> Chunk:
        try:
            return next(self._chunks)
        except CallFailed as failure:  # outside of what resumes, which is to see the server's own code
            raise (after_output(failure) if self.received.has_output else failure) from failure.__cause__

    def close(self) -> None:
        self._chunks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Synchronous client of one server. Safe to share between threads.

    Args:
        address: host:port; of several, all calls go to the first, and streams that resume go on at the next.
        model: the served name to ask for; absent, the first one that a server lists is looked up once.
        api_key: goes with every call. Without TLS it goes in the clear: loopback, or a trusted network.
        tls: True for the public roots, or the path of PEM certificates: see `diptych.client.credentials`.
        credentials: any other TLS, such as with a certificate of one's own; instead of `tls`.
        retries: how often gRPC repeats a call of which nothing was delivered; see `diptych.client.channel`.
    """

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

        def connect(address: str, retries: int) -> grpc.Channel:
            return access.channel(address, channel_options(retries))

        self._servers = Servers(address, retries, connect, access.metadata)
        self._stub = self._servers.first
        self._model = model

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Return the whole answer.

        `timeout_s` is the deadline of the call, also for the server; inf: none.
        """
        model, left_s = self._model_within(timeout_s)
        request = build_request(prompt, model, options)
        return read_completion(_typed(lambda: self._stub.Generate(request, timeout=left_s)))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        resume: bool = False,
        **options: Unpack[Options],
    ) -> Stream:
        """Stream the answer piece by piece. The call begins with the first piece asked for.

        `resume`: when the stream breaks, it goes on at the next address (or again at the only one), at the
        next token; see `diptych.client.resumption`. `timeout_s` then bounds all of it.
        """
        timeout_s = call_timeout(timeout_s)  # what is wrong with it is said here, not at the first piece

        def call() -> Any:
            model, left_s = self._model_within(timeout_s)
            return self._stub.StreamGenerate(build_request(prompt, model, options), timeout=left_s)

        if not resume:
            return Stream(lambda received: _chunks(call, received))
        return Stream(
            lambda received: _resumed_chunks(
                lambda: build_request(prompt, "", options),
                self._model_at,
                self._servers,
                received,
                timeout_s,
            )
        )

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End the request of this id, whichever client began it: it finishes as "cancelled".

        False: no such request.
        """
        request = pb.CancelRequestRequest(request_id=request_id)
        return bool(_typed(lambda: self._stub.CancelRequest(request, timeout=timeout_s)).was_running)

    def tokenize(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[TokenizeOptions]
    ) -> Tokens:
        """Return the tokens that a request with this text or chat would run on."""
        model, left_s = self._model_within(timeout_s)
        request = tokenize_request(prompt, model, **options)
        return read_tokens(_typed(lambda: self._stub.Tokenize(request, timeout=left_s)))

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids; `skip_special_tokens` leaves control tokens out."""
        model, left_s = self._model_within(timeout_s)
        request = detokenize_request(token_ids, model, skip_special_tokens=skip_special_tokens)
        return str(_typed(lambda: self._stub.Detokenize(request, timeout=left_s)).text)

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the models that the server serves."""
        return _models(self._stub, timeout_s)

    @property
    def model(self) -> str:
        """The name that requests ask for."""
        return self._model_at(self._stub, None)

    def _model_within(self, timeout_s: float | None) -> tuple[str, float | None]:
        """Return the name to ask for, and the seconds that looking it up leaves of a call's time."""
        left = time_left(timeout_s)
        return self._model_at(self._stub, left()), left()

    def _model_at(self, stub: Any, timeout_s: float | None) -> str:
        if self._model is None:
            self._model = first_model(_models(stub, timeout_s))
        return self._model

    def close(self) -> None:
        """Close the connections. Streams that run end."""
        self._servers.closed = True
        for channel in self._servers.channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def first_model(models: Sequence[Model]) -> str:
    if not models:
        raise CallFailed(grpc.StatusCode.NOT_FOUND, "the server lists no model")
    return models[0].name


def _typed(call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        raise read_failure(error) from error


def _models(stub: Any, timeout_s: float | None) -> tuple[Model, ...]:
    return read_models(_typed(lambda: stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s)))


def _resumed_chunks(
    build: Callable[[], pb.GenerateRequest],
    model_at: Callable[[Any, float | None], str],
    servers: Servers[grpc.Channel],
    received: Received,
    timeout_s: float | None,
) -> Generator[Chunk, None, None]:
    plan = Resumption(build(), received, servers=len(servers), retries=servers.retries, timeout_s=timeout_s)
    while True:
        stub = servers.once(plan.server)
        try:
            request = plan.request(model_at(stub, plan.timeout_s))
            yield from _chunks(lambda: stub.StreamGenerate(request, timeout=plan.timeout_s), received)  # noqa: B023
            return
        except CallFailed as failure:
            if plan.complete(failure):
                return
            if not servers.closed:
                time.sleep(plan.wait_s(failure))
            if servers.closed:
                raise


def _chunks(begin: Callable[[], Any], received: Received) -> Generator[Chunk, None, None]:
    # No method of the stream: that would be a cycle, and a stream without references would be cancelled late.
    call = begin()
    try:
        for response in call:
            chunk = read_chunk(response)
            received.add(chunk)
            yield chunk
    except grpc.RpcError as error:
        raise read_failure(error) from error
    finally:
        call.cancel()  # an abandoned stream would go on; after its end this does nothing
