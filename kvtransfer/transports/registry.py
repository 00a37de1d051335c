"""The transports by name: which there are, in what order `auto` tries them, and how their ends are opened."""

from __future__ import annotations

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.settings import StartupError
from kvtransfer.transports import cuda_ipc as pushing
from kvtransfer.transports import nccl as paired
from kvtransfer.transports import nccl_channel as paired_channel
from kvtransfer.transports import process_group as worlds
from kvtransfer.transports import shared_memory, tcp
from kvtransfer.transports.base import (
    PushChannel,
    ReceiverHooks,
    ReceivingTransport,
    TransportError,
    Welcome,
)
from kvtransfer.transports.cuda_mapping import CudaPort
from kvtransfer.transports.memory_mapping import HostPort, PoolPort
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.shared_memory_domain import host_id

IN_PLACE = frozenset({shared_memory.NAME, shared_memory.ON_GPU})
"""With these the prefill worker computes straight into the decode worker's pool."""
_ON_HOST = (shared_memory.NAME, tcp.NAME)
_ON_GPU = (shared_memory.ON_GPU, pushing.NAME, tcp.NAME)
_NEEDS_GPU = frozenset({shared_memory.ON_GPU, pushing.NAME, worlds.NCCL})


class UnusableTransport(StartupError, ValueError):
    """It moves no blocks of such a worker."""


def chosen(flag: str, device: torch.device) -> tuple[str, ...]:
    """What `--transport` means for a worker whose blocks are on `device`, names in order of preference.

    `cuda_ipc` computes in place where both workers have the same GPU. Raises UnusableTransport for
    what cannot be.
    """
    if flag == "auto":
        return _ON_HOST if device.type == "cpu" else _ON_GPU
    if device.type == "cpu" and flag in _NEEDS_GPU:
        raise UnusableTransport(f"--transport {flag} needs blocks on a GPU, this worker computes on the CPU")
    if device.type != "cpu" and flag == shared_memory.NAME:
        raise UnusableTransport("--transport shared_memory is for CPU workers; on a GPU it is cuda_ipc")
    if flag == worlds.NCCL and (why := worlds.nccl_unusable(device)) is not None:
        raise UnusableTransport(f"--transport nccl: {why}")
    return (shared_memory.ON_GPU, flag) if flag == pushing.NAME else (flag,)


def make_receiver(name: str, pool: PoolMemory, host: str, hooks: ReceiverHooks) -> ReceivingTransport:
    """The decode worker's end. ValueError if there is no such transport."""
    match name:
        case shared_memory.NAME | shared_memory.ON_GPU:
            return shared_memory.SharedMemoryReceiver(name, pool, port_of(pool.memory.data.device), hooks)
        case pushing.NAME:
            return pushing.CudaIpcReceiver(pool, port_of(pool.memory.data.device), hooks)
        case tcp.NAME:
            return tcp.tcp_receiver(host, pool.memory, hooks)
        case worlds.GLOO | worlds.NCCL:
            return paired.paired_receiver(name, host, pool.memory, hooks)
    raise ValueError(f"there is no transport {name!r}")


async def map_pool(welcome: Welcome, device: torch.device) -> KVMemory:
    """The decode worker's pool, for `device` to compute in. Raises TransportError."""
    return await shared_memory.open_shared_memory(welcome, port_of(device))


async def open_channel(name: str, welcome: Welcome, scratch: KVMemory) -> PushChannel:
    """The prefill worker's end of a copying transport, which sends blocks of `scratch`.

    Raises TransportError.
    """
    match name:
        case tcp.NAME:
            return await tcp.TcpChannel.open(welcome)
        case worlds.GLOO | worlds.NCCL:
            return await paired_channel.NcclChannel.open(name, welcome, scratch)
        case pushing.NAME:
            return await pushing.PushChannel.open(welcome, port_of(scratch.data.device))
    raise TransportError(f"the decode worker chose {name!r}, which is not known here")


def port_of(device: torch.device) -> PoolPort:
    """How pools on such a device are mapped."""
    return HostPort(host_id()) if device.type == "cpu" else CudaPort(device, host_id())
