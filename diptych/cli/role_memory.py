"""Memory that workers need in the roles that `--auto-roles` may give them, planned at the start."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.config import CPU_POOL_MIB, DecodeSettings
from diptych.cli.expected_device import expects_gpu
from diptych.runtime.settings import ProgramSettings
from diptych.worker_process.config import WorkerSettings
from gateway.config import GatewaySettings


def lacking_memory(settings: Sequence[ProgramSettings], available: int | None) -> str | None:
    """Return why workers on CPUs could not all have the pools that they may come to have; None if they can.

    All but the fewest prefill workers may be decode workers at some time. On GPUs each worker gets an equal
    share instead, and a pool of `--kv-blocks` is as large as its operator made it. `available` is in bytes.
    """
    gateway = next((one for one in settings if isinstance(one, GatewaySettings)), None)
    decode = next((one for one in settings if isinstance(one, DecodeSettings)), None)
    if gateway is None or decode is None or not gateway.auto_roles or available is None:
        return None
    if decode.kv_blocks or expects_gpu(decode.device):
        return None
    workers = sum(isinstance(one, WorkerSettings) for one in settings)
    pools = max(workers - gateway.min_prefill_workers * len(gateway.models), 1)
    pool_mib = decode.kv_memory_mib or CPU_POOL_MIB
    room_mib = available >> 20
    if pools * pool_mib <= room_mib:
        return None
    return (
        f"--auto-roles: {pools} of {workers} workers may be decode workers at once, with KV pools of "
        f"{pool_mib} MiB each, and {room_mib} MiB of memory are available: lower --kv-memory-mib, or raise "
        "--set gateway.min-prefill-workers"
    )
