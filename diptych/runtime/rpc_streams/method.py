"""The streams of ``diptych.worker.v1``: each of its services has one RPC, Link."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from diptych.worker.v1 import decode_pb2, encode_pb2, handoff_pb2, prefill_pb2

_RPC = "Link"


@dataclass(frozen=True, slots=True)
class LinkMethod:
    """Kind of a stream: its service, and the messages of each end."""

    service: str
    """The full name of the gRPC service."""
    request: type[Message]
    response: type[Message]
    server: str
    """Role of the process that serves it."""
    client: str
    """Role of the process that may open it."""

    @classmethod
    def of(cls, file: FileDescriptor, service: str, *, server: str, client: str) -> LinkMethod:
        """Return the stream of a service that the file declares."""
        declared = file.services_by_name[service]
        rpc = declared.methods_by_name[_RPC]
        request, response = GetMessageClass(rpc.input_type), GetMessageClass(rpc.output_type)
        return cls(declared.full_name, request, response, server, client)

    @property
    def rpc(self) -> str:
        return _RPC

    @property
    def path(self) -> str:
        """Name of the method on gRPC's wire."""
        return f"/{self.service}/{_RPC}"


PREFILL = LinkMethod.of(prefill_pb2.DESCRIPTOR, "PrefillService", server="prefill", client="gateway")
DECODE = LinkMethod.of(decode_pb2.DESCRIPTOR, "DecodeService", server="decode", client="gateway")
ENCODE = LinkMethod.of(encode_pb2.DESCRIPTOR, "EncodeService", server="encode", client="gateway")
EMBEDDING = LinkMethod.of(encode_pb2.DESCRIPTOR, "EmbeddingService", server="encode", client="prefill")
HANDOFF = LinkMethod.of(handoff_pb2.DESCRIPTOR, "HandoffService", server="decode", client="prefill")
