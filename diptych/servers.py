"""The addresses of a client, and what it calls there. Channels are made when they are first needed."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from diptych.v1 import inference_pb2_grpc as rpc

Channel = TypeVar("Channel")


class Servers(Generic[Channel]):
    """At least one.

    Args:
        connect: makes a channel to an address, over which gRPC itself repeats calls so often.
    """

    def __init__(
        self, address: str | Sequence[str], retries: int, connect: Callable[[str, int], Channel]
    ) -> None:
        self._addresses = [address] if isinstance(address, str) else list(address)
        if not self._addresses:
            raise ValueError("a client needs an address")
        self.closed = False  # by the caller: streams end, and none goes on
        self._connect = connect
        self._once: dict[int, Any] = {}
        self.channels = [connect(self._addresses[0], retries)]
        self.first = rpc.InferenceServiceStub(self.channels[0])

    def __len__(self) -> int:
        return len(self._addresses)

    def once(self, number: int) -> Any:
        """A stub for the server of this number. gRPC repeats nothing over it: a loss is known at once."""
        if number not in self._once:
            channel = self._connect(self._addresses[number], 0)
            self.channels.append(channel)
            self._once[number] = rpc.InferenceServiceStub(channel)
        return self._once[number]
