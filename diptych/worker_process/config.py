"""Settings of both workers, on top of every program's."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import CliSuppress

from diptych.runtime.settings import ProgramSettings

MAX_THREADS = 1024
"""More than machines have cores. Torch or OpenMP may crash a process that gets no more threads."""


class WorkerSettings(ProgramSettings):
    """Base of the two workers' settings."""

    threads: Annotated[int, Field(ge=0, le=MAX_THREADS)] = Field(
        0, description="compute threads; 0 = one per core that affinity and CPU limit leave"
    )
    cores_fd: CliSuppress[int | None] = Field(
        None, description="file on whose bytes the workers of this machine lend each other cores"
    )
    home_cores: CliSuppress[Annotated[str, Field(pattern=r"^(\d+(,\d+)*)?$")]] = Field(
        "", description="with cores-fd: numbers of the cores that are this worker's, as in 0,1"
    )
    machine_cores: CliSuppress[Annotated[int, Field(ge=0)]] = Field(
        0, description="with cores-fd: how many cores there are to share"
    )
    replaces: CliSuppress[str] = Field(
        "", description="ids of dead workers, by comma, in whose place a supervisor has started this one"
    )
    device: str = Field(
        "auto", description="where the model is computed: cpu, cuda or cuda:N; auto = a GPU if there is one"
    )
    backend: Literal["auto", "native", "torch", "triton"] = Field(
        "auto", description="how the model is computed; triton is for GPUs, the others for CPUs"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="how keys and values are kept: auto = as they are computed; fp8 is for GPUs"
    )
    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl", "gloo", "tcp"] = Field(
        "auto", description="how blocks are transferred; auto = what both sides can, fastest first"
    )
    links: Literal["auto", "grpc"] = Field(
        "auto", description="how processes reach this worker: auto = over a Unix socket from within its host"
    )
    advertise_host: str | None = Field(
        None, description="host name under which gateways and other workers reach this one (default: host)"
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        10.0, description="seconds that running requests get at shutdown"
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
