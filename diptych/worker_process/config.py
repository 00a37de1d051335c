"""Settings that both workers have on top of every program's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliSuppress

from diptych.runtime.settings import ProgramSettings

MAX_THREADS = 1024
"""More than machines have cores: where a process gets no more threads, torch or OpenMP may crash it."""

LARGEST_GPU_BLOCK = 128
"""Tokens of a KV block on a GPU: those of the shortest split (kernels/gpu/decode_splits.py)."""
_CPU_DTYPES = ("auto", "fp32", "bf16", "int8", "gguf")
_GPU_DTYPES = ("auto", "fp32", "fp16", "bf16")


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
        "auto", description="how blocks are handed over; auto = what both sides can, fastest first"
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

    @field_validator("device")
    @classmethod
    def _device_is_one(cls, value: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return value

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        """Check what flags alone show; the engine loader checks again with the device that `auto` found."""
        device_type = self.device.partition(":")[0]
        if device_type != "auto" and (why := why_not_together(self, device_type)) is not None:
            raise ValueError(why)
        return self


def why_not_together(settings: WorkerSettings, device_type: str) -> str | None:
    """Return why a worker with these settings cannot compute on a `cpu` or on `cuda`; None if it can."""
    return next(_faults_on_cpu(settings) if device_type == "cpu" else _faults_on_gpu(settings), None)


def _faults_on_cpu(settings: WorkerSettings) -> Iterator[str]:
    here = "and this worker computes on the CPU (--device)"
    if settings.transport in ("nccl", "cuda_ipc"):
        yield f"--transport {settings.transport} needs blocks on a GPU, {here}"
    if settings.backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        yield f"--backend triton needs a GPU, {here}"
    if settings.backend != "triton" and settings.dtype not in _CPU_DTYPES:
        yield f"--dtype {settings.dtype} is computed on GPUs only, {here}"
    if settings.kv_cache_dtype == "fp8" and settings.backend in ("auto", "native"):
        yield (
            "--kv-cache-dtype fp8: the native CPU step keeps keys and values in the computation's own dtype; "
            "a GPU keeps them in fp8, and so does --backend torch, slowly"
        )


def _faults_on_gpu(settings: WorkerSettings) -> Iterator[str]:
    here = "and this worker computes on a GPU (--device)"
    if settings.transport == "shared_memory":
        yield f"--transport shared_memory is for blocks of CPU workers, {here}: there it is cuda_ipc"
    if settings.backend in ("native", "torch"):
        yield f"--backend {settings.backend} computes on CPUs, {here}"
    if settings.dtype not in _GPU_DTYPES:
        yield f"--dtype {settings.dtype} is computed on CPUs only, {here}"
    tokens = settings.block_size
    if tokens & (tokens - 1) or tokens > LARGEST_GPU_BLOCK:  # splits of a context are whole blocks
        yield f"--block-size {tokens}: on a GPU it is a power of two, at most {LARGEST_GPU_BLOCK}"
