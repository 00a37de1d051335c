"""Streams between a prefill and an encode worker: what the two must agree on, hello and welcome."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.rpc_streams.method import EMBEDDING
from diptych.runtime.rpc_streams.stream import ClientStream
from diptych.worker.v1 import encode_pb2
from kvtransfer.drivers.client_link import INCOMPATIBLE, ClientLink, exchange_hello, open_stream
from kvtransfer.drivers.handshake import incompatible_field
from kvtransfer.protocol.errors import HandoffDenied
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import host_id

Request = encode_pb2.EmbeddingServiceLinkRequest
Response = encode_pb2.EmbeddingServiceLinkResponse
_ENCODE = "encode worker"


@dataclass(frozen=True, slots=True)
class EmbeddingFingerprint:
    """The model and encoder that rows of embeddings come from; the field names are those of the protocol."""

    model_digest: str
    encoder: str
    """Family of the image encoder."""
    dtype: str
    """Number type of its computation, and of the rows: float32, bfloat16 or float16."""

    @property
    def format(self) -> str:
        """Name of the rows' format among workers of one model."""
        return f"{self.encoder}/{self.dtype}"

    def to_proto(self) -> encode_pb2.EmbeddingFingerprint:
        """Return the message for a hello or welcome."""
        return encode_pb2.EmbeddingFingerprint(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: encode_pb2.EmbeddingFingerprint) -> EmbeddingFingerprint:
        """Read a peer's fingerprint."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


def hello_of(worker: WriterId, fingerprint: EmbeddingFingerprint) -> encode_pb2.EmbeddingHello:
    """Return the hello, or the welcome, of a worker."""
    return encode_pb2.EmbeddingHello(
        worker_id=worker.worker_id, incarnation=worker.incarnation, fingerprint=fingerprint.to_proto()
    )


class EmbeddingLink(ClientLink):
    """Stream of the prefill worker to an encode worker."""

    def __init__(self, stream: ClientStream, welcome: encode_pb2.EmbeddingHello) -> None:
        super().__init__(stream)
        self.welcome = welcome

    @classmethod
    async def connect(
        cls,
        address: str,
        worker: WriterId,
        fingerprint: EmbeddingFingerprint,
        tls: InternalTls | None,
        transports: Sequence[str] = (),
    ) -> EmbeddingLink:
        """Connect and exchange hello and welcome; offer these ways of rows. Raises HandoffDenied."""
        stream = await open_stream(address, EMBEDDING, tls, _ENCODE)
        try:
            hello = hello_of(worker, fingerprint)
            hello.transports.extend(transports)
            hello.host_id, hello.pid = host_id(), os.getpid()
            welcome = await exchange_hello(stream, Request(hello=hello), _ENCODE)
            theirs = EmbeddingFingerprint.from_proto(welcome.fingerprint)
            if (field := incompatible_field(fingerprint, theirs)) is not None:
                raise HandoffDenied(INCOMPATIBLE, f"the encode worker differs in {field}")
        except BaseException:
            await stream.close()
            raise
        return cls(stream, welcome)
