"""Registry of the transports by name: their order for `auto`, and how their ends are opened."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.settings import StartupError
from kvtransfer.protocol.pull_table import PullTable
from kvtransfer.transports import (
    cuda_ipc,
    in_process,
    nccl,
    process_group,
    pull_frames,
    pull_mapped,
    shared_memory,
    tcp,
)
from kvtransfer.transports.base import (
    PullChannel,
    PushChannel,
    ReceiverHooks,
    ReceivingTransport,
    TransportError,
    Welcome,
    WriterRanks,
    gpu_uuid,
    host_id,
)
from kvtransfer.transports.cuda_mapping import CudaMapping
from kvtransfer.transports.in_place_by_rank import InPlaceByRankReceiver, open_own_share
from kvtransfer.transports.ipc_by_rank import IpcByRankChannel
from kvtransfer.transports.ipc_receiver_by_rank import IpcByRankReceiver
from kvtransfer.transports.memory_mapping import HostMapping, MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.tcp_by_rank import ByRankChannel, can_go_by_rank, mapped_ranks
from kvtransfer.transports.tcp_receiver_by_rank import ByRankReceiver

IN_PLACE = frozenset({shared_memory.NAME, shared_memory.ON_GPU, in_process.NAME})
"""Transports with which the prefill worker computes straight into the decode worker's pool."""
MOVES_SEGMENTS = IN_PLACE | {tcp.NAME}
"""Transports by which the model's own segment of a block goes alone; the others move whole blocks."""
PULLS_FRAMES = frozenset({tcp.NAME, process_group.GLOO, process_group.NCCL})
"""Transports beside which a prefill worker reads the decode worker's cached blocks over a socket."""
PULLS_MAPPED = frozenset({cuda_ipc.NAME})
"""Copying transports with which it reads them in the mapped pool."""
_ON_HOST = (shared_memory.NAME, tcp.NAME)
_ON_GPU = (shared_memory.ON_GPU, cuda_ipc.NAME, tcp.NAME)
_BY_RANK = frozenset({"auto", cuda_ipc.NAME, tcp.NAME})
"""Values of `--transport` that go between groups whose ranks have memories of their own."""
_MAPPED = frozenset({shared_memory.ON_GPU, cuda_ipc.NAME})
"""Transports on a GPU with which the writer itself waits for what it wrote."""
_NEEDS_GPU = frozenset({shared_memory.ON_GPU, cuda_ipc.NAME, process_group.NCCL})


class UnusableTransport(StartupError, ValueError):
    """Transport that cannot move the blocks of such a worker."""


def transports_for(
    flag: str, device: torch.device, *, hosted: bool = False, apart: bool = False
) -> tuple[str, ...]:
    """Return the transports that `--transport` stands for, in order of preference, with blocks on `device`.

    `cuda_ipc` computes in place where both workers have the same GPU. A worker that is `hosted` beside one of
    the other role computes in place there, unless `flag` is a transport that copies; on a GPU it takes no
    transport whose copies into the pool are ordered by a stream, of which its steps have two. One whose ranks
    have memories of their own, `apart`, takes what goes from rank to rank. Raises UnusableTransport.
    """
    if apart:
        if flag not in _BY_RANK:
            raise UnusableTransport(
                f"--transport {flag} does not go between ranks with memories of their own: "
                f"{cuda_ipc.NAME} and {tcp.NAME} do"
            )
        return {"auto": _ON_GPU, cuda_ipc.NAME: _ON_GPU[:2]}.get(flag, (flag,))
    found = _transports_between_processes(flag, device)
    if not hosted:
        return found
    if device.type != "cpu":
        found = tuple(name for name in found if name in _MAPPED)
        if not found:
            raise UnusableTransport(f"--transport {flag}: workers of one process on a GPU take cuda_ipc")
    return (in_process.NAME, *found) if not IN_PLACE.isdisjoint(found) else found


def _transports_between_processes(flag: str, device: torch.device) -> tuple[str, ...]:
    if flag == "auto":
        return _ON_HOST if device.type == "cpu" else _ON_GPU
    if device.type == "cpu" and flag in _NEEDS_GPU:
        raise UnusableTransport(f"--transport {flag} needs blocks on a GPU, this worker computes on the CPU")
    if device.type != "cpu" and flag == shared_memory.NAME:
        raise UnusableTransport("--transport shared_memory is for CPU workers; on a GPU it is cuda_ipc")
    if flag == process_group.NCCL and (why := process_group.nccl_unusable_reason(device)) is not None:
        raise UnusableTransport(f"--transport nccl: {why}")
    return (shared_memory.ON_GPU, flag) if flag == cuda_ipc.NAME else (flag,)


def memory_domain(
    transports: Sequence[str],
    device: torch.device,
    worker_id: str,
    ranks: WriterRanks | None = None,
) -> str:
    """Return a name that is equal for workers that compute in one memory.

    Other pairs copy blocks. A worker without a transport that shares memory has a domain of its own. Groups,
    whose other processes are `ranks`, with memories of each rank's own have the same cards and shares.
    """
    if IN_PLACE.isdisjoint(transports):
        return f"copies/{worker_id}"
    if ranks is None or ranks.holders is None:
        return f"{host_id()}/{gpu_uuid(device)}"
    dealt = hashlib.sha256(repr([tuple(held) for held in ranks.holders]).encode()).hexdigest()[:16]
    return f"{host_id()}/{'+'.join(ranks.devices)}/{dealt}"


def make_receiver(
    name: str, pool: PoolMemory, host: str, hooks: ReceiverHooks, tls: InternalTls | None = None
) -> ReceivingTransport:
    """Make the end of the decode worker; `tls` is for what goes over the network.

    Raises ValueError for an unknown transport.
    """
    match name:
        case in_process.NAME:
            return in_process.InProcessReceiver(pool, host_id(), hooks)
        case shared_memory.ON_GPU if mapped_ranks(pool.memory) is not None:
            return InPlaceByRankReceiver(pool, mapping_for(pool.memory.data.device), hooks)
        case shared_memory.NAME | shared_memory.ON_GPU:
            return shared_memory.SharedMemoryReceiver(name, pool, mapping_for(pool.memory.data.device), hooks)
        case cuda_ipc.NAME:
            return IpcByRankReceiver(pool, mapping_for(pool.memory.data.device), hooks)
        case tcp.NAME:
            return _tcp_receiver(pool.memory, host, hooks, tls)
        case process_group.GLOO | process_group.NCCL:
            return nccl.process_group_receiver(name, host, pool.memory, hooks, tls)
    raise ValueError(f"there is no transport {name!r}")


def _tcp_receiver(
    memory: KVMemory, host: str, hooks: ReceiverHooks, tls: InternalTls | None
) -> ReceivingTransport:
    """Make the end of the decode worker over tcp: by rank as well, where that can be."""
    whole = tcp.tcp_receiver(host, memory, hooks, tls)
    if tls is not None or not can_go_by_rank(memory.layout):
        return whole
    return ByRankReceiver(whole, host, memory, hooks)


async def map_pool(welcome: Welcome, device: torch.device) -> KVMemory:
    """Map the decode worker's pool, for `device` to compute in. Raises TransportError."""
    if welcome.endpoint.startswith(in_process.SCHEME):
        return await in_process.open_in_process(welcome)
    if welcome.holders:
        return await open_own_share(welcome, mapping_for(device))
    return await shared_memory.open_shared_memory(welcome, mapping_for(device))


async def open_channel(name: str, welcome: Welcome, scratch: KVMemory) -> PushChannel:
    """Open the prefill worker's end of a copying transport for blocks of `scratch`. Raises TransportError."""
    match name:
        case tcp.NAME:
            if welcome.holders:
                return await ByRankChannel.open(welcome, scratch)
            return await tcp.TcpChannel.open(welcome)
        case process_group.GLOO | process_group.NCCL:
            return await nccl.ProcessGroupChannel.open(name, welcome, scratch)
        case cuda_ipc.NAME:
            mapping = mapping_for(scratch.data.device)
            if welcome.holders:
                return await IpcByRankChannel.open(welcome, scratch, mapping)
            return await cuda_ipc.CudaIpcChannel.open(welcome, mapping)
    raise TransportError(f"the decode worker chose {name!r}, which is not known here")


async def open_pulls(
    welcome: Welcome, channel: PushChannel, scratch: KVMemory, table: PullTable
) -> PullChannel:
    """Open the prefill worker's end for pulls into `scratch`, which `table` lists. Raises TransportError.

    Args:
        channel: the open channel of the same link.
    """
    if welcome.pull_endpoint != pull_mapped.ENDPOINT:
        return await pull_frames.FramePullChannel.open(welcome, scratch, table)
    if not isinstance(channel, cuda_ipc.CudaIpcChannel):
        raise TransportError("the decode worker offers to read a pool that is not mapped here")
    return channel.open_pulls(scratch)


def mapping_for(device: torch.device) -> MemoryMapping:
    """Return the memory mapping of pools on such a device."""
    return HostMapping(host_id()) if device.type == "cpu" else CudaMapping(device, host_id())
