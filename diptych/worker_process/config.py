"""Settings of both workers, on top of every program's."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from diptych.runtime.settings import ProgramSettings, internal, setting

MAX_THREADS = 1024
"""More than machines have cores. Torch or OpenMP may crash a process that gets no more threads."""


class WorkerSettings(ProgramSettings):
    """Base of the two workers' settings."""

    threads: Annotated[int, Field(ge=0, le=MAX_THREADS)] = setting(
        0,
        "Compute threads; 0 takes one per core that affinity and CPU limit leave.",
        section="Compute",
    )
    device: str = setting(
        "auto",
        "Device that computes the model: cpu, cuda or cuda:N; auto takes a GPU if there is one.",
        section="Compute",
    )
    backend: Literal["auto", "native", "torch", "triton"] = setting(
        "auto", "Code that computes the model; triton is for GPUs, the others for CPUs.", section="Compute"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "Type of cached keys and values; auto keeps the computation type, fp8 is for GPUs.",
        section="KV cache",
    )
    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl", "gloo", "tcp"] = setting(
        "auto",
        "Transport of KV blocks between workers; auto takes the fastest that both sides have.",
        section="KV transfer",
    )
    worker_rpc: Literal["auto", "grpc"] = setting(
        "auto",
        "Connection of other processes to this worker; auto takes a Unix socket from within its host.",
        section="Network",
    )
    advertise_host: str | None = setting(
        None,
        "Host name under which gateways and other workers reach this one; default: --host.",
        section="Network",
        serving=False,
    )
    worker_shutdown_timeout: Annotated[float, Field(ge=0)] = setting(
        10.0, "Seconds that running requests get to finish when this worker stops.", section="Shutdown"
    )
    cores_fd: int | None = internal(
        None, "File on whose bytes the workers of this machine lend each other cores."
    )
    home_cores: Annotated[str, Field(pattern=r"^(\d+(,\d+)*)?$")] = internal(
        "", "With cores-fd: numbers of the cores that are this worker's, as in 0,1."
    )
    machine_cores: Annotated[int, Field(ge=0)] = internal(
        0, "With cores-fd: number of cores that are shared."
    )
    replaces: str = internal(
        "", "Ids of dead workers, by comma, in whose place a supervisor has started this one."
    )

    @property
    def step_pacing(self) -> tuple[float, float]:
        """Least and most stretch of decode steps (diptych/engine/step_pacing.py)."""
        return 1.0, 1.0

    @field_validator("device")
    @classmethod
    def _device_is_one(cls, value: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return value
