"""The addresses of a client, and what it calls there. Channels are made when they are first needed."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from diptych.client.credentials import Metadata
from diptych.client.timeouts import call_timeout
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc

Channel = TypeVar("Channel")
_RESOLVERS = ("dns://", "unix://", "xds://")
"""Schemes of gRPC's own names."""
_METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods]


class Stub:
    """The service's generated stub, with `metadata` on every call, and a timeout that gRPC can count with."""

    def __init__(self, channel: Any, metadata: Metadata) -> None:
        self._plain = rpc.InferenceServiceStub(channel)
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(name)
        method = getattr(self._plain, name)

        def call(request: Any, *, timeout: float | None = None) -> Any:
            return method(request, timeout=call_timeout(timeout), metadata=self._metadata)

        return call


class Servers(Generic[Channel]):
    """Servers of a client, at least one.

    Args:
        connect: makes a channel to an address, over which gRPC itself repeats calls so often.
        metadata: of every call.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        retries: int,
        connect: Callable[[str, int], Channel],
        metadata: Metadata = (),
    ) -> None:
        self._addresses = [address] if isinstance(address, str) else list(address)
        if not self._addresses:
            raise ValueError("a client needs an address")
        for one in self._addresses:
            if "://" in one and not one.startswith(_RESOLVERS):
                raise ValueError(f"an address is host:port, not the URL {one!r}; tls=True turns TLS on")
        self.retries = retries
        self.closed = False  # by the caller: streams end, and none goes on
        self._connect = connect
        self._metadata = metadata
        self._once: dict[int, Stub] = {}
        self.channels = [connect(self._addresses[0], retries)]
        self.first = Stub(self.channels[0], metadata)

    def __len__(self) -> int:
        return len(self._addresses)

    def once(self, number: int) -> Any:
        """Return a stub for a server by number. gRPC repeats nothing over it: a loss is known at once."""
        if number not in self._once:
            channel = self._connect(self._addresses[number], 0)
            self.channels.append(channel)
            self._once[number] = Stub(channel, self._metadata)
        return self._once[number]
