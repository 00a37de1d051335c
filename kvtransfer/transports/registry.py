"""The transports by name: which there are, in what order `auto` tries them, and how their ends are opened."""

from __future__ import annotations

from engine.kv_memory import KVMemory
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.transports import paired, paired_channel, shared_memory, tcp, worlds
from kvtransfer.transports.base import (
    PushChannel,
    ReceiverHooks,
    ReceivingTransport,
    TransportError,
    Welcome,
)

IN_PLACE = frozenset({shared_memory.NAME})
"""With these the prefill worker computes straight into the decode worker's pool."""


def automatic(device_type: str) -> tuple[str, ...]:
    """Names in order of preference for workers whose blocks are on such a device."""
    return (shared_memory.NAME, tcp.NAME) if device_type == "cpu" else (tcp.NAME,)


def make_receiver(name: str, pool: PoolMemory, host: str, hooks: ReceiverHooks) -> ReceivingTransport:
    """The decode worker's end. ValueError if there is no such transport, or not for this memory."""
    memory = pool.memory
    match name:
        case shared_memory.NAME:
            return shared_memory.SharedMemoryReceiver(pool, hooks)
        case tcp.NAME:
            return tcp.TcpReceiver(host, memory, hooks)
        case worlds.GLOO:
            return paired.PairedReceiver(name, host, memory, hooks)
    raise ValueError(f"there is no transport {name!r}")


async def map_pool(welcome: Welcome) -> KVMemory:
    """The decode worker's pool, to compute in. Raises TransportError."""
    return await shared_memory.open_shared_memory(welcome)


async def open_channel(name: str, welcome: Welcome, scratch: KVMemory) -> PushChannel:
    """The prefill worker's end of a copying transport, which sends blocks of `scratch`.

    Raises TransportError.
    """
    match name:
        case tcp.NAME:
            return await tcp.TcpChannel.open(welcome)
        case worlds.GLOO:
            return await paired_channel.PairedChannel.open(name, welcome, scratch)
    raise TransportError(f"the decode worker chose {name!r}, which is not known here")
