"""Settings of the workers, on top of every program's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from diptych.runtime.bind_address import is_loopback
from diptych.runtime.host_port import parse_address
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.kv_tier_specs import parse_tiers
from diptych.runtime.settings import ProgramSettings, StartupError, internal, setting

MAX_THREADS = 1024
"""More than machines have cores. Torch or OpenMP may crash a process that gets no more threads."""

MAX_RANKS = 64
MAX_PARTS = 1024

LARGEST_GPU_BLOCK = 128
"""Tokens of a KV block on a GPU: those of the shortest split (kernels/gpu/decode_splits.py)."""


class RoleSettings(ProgramSettings):
    """Base of all workers' settings, whatever they compute."""

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
    replaces: str = internal(
        "", "Ids of dead workers, by comma, in whose place a supervisor has started this one."
    )

    role_changes: Literal["none", "cpu", "any"] = internal(
        "none", "Devices of a worker that its supervisor can start in the other role."
    )

    @field_validator("device")
    @classmethod
    def _device_is_one(cls, value: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return value


class WorkerSettings(RoleSettings):
    """Base of the settings of the two workers that compute the text model."""

    backend: Literal["auto", "native", "torch", "triton"] = setting(
        "auto", "Code that computes the model; triton is for GPUs, the others for CPUs.", section="Compute"
    )
    prompt_graph_tokens: Annotated[int, Field(ge=0, le=512)] = setting(
        512,
        "Tokens of the longest prompt step that a GPU records as a CUDA graph at the start; 0 records none.",
        section="Compute",
    )
    batch_invariant: bool = setting(
        False,
        "Compute a token with the same bits alone, in any batch or chunk, and as a checked draft; costs "
        "speed on GPUs. The same for all workers.",
        section="Compute",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_RANKS)] = setting(
        1,
        "Processes of this worker, each of which computes its share of every layer and holds those weights.",
        section="Parallelism",
    )
    pipeline_parallel: Annotated[int, Field(ge=1, le=MAX_RANKS)] = setting(
        1,
        "Stages of this worker, each of --tensor-parallel processes that compute and hold some layers.",
        section="Parallelism",
    )
    expert_parallel: bool = setting(
        False,
        "Deal a model's experts to the parts whole, in place of a share of each expert; the same for all "
        "workers.",
        section="Parallelism",
    )
    all2all_backend: Literal["allgather_reducescatter", "all_to_all"] = setting(
        "allgather_reducescatter",
        "Exchange of ranks with --expert-parallel: sums of all rows, or each rank sends its share of the "
        "rows to their experts and back. The same for all workers.",
        section="Parallelism",
    )
    sum_parts: Annotated[int, Field(ge=0, le=MAX_PARTS)] = setting(
        0,
        "Parts in which products are added, the same for all workers and a multiple of each one's "
        "--tensor-parallel; 0 takes --tensor-parallel.",
        section="Parallelism",
    )
    remote_ranks: Annotated[int, Field(ge=0, le=MAX_RANKS - 1)] = setting(
        0,
        "Processes of this worker that run on other hosts, each a `diptych rank` there: the last ones of its "
        "group.",
        section="Parallelism",
    )
    own_memories: bool = internal(
        False, "Whether ranks of this host have KV memories of their own, as they have on GPUs."
    )
    rendezvous: str = setting(
        "",
        "Address of this host, as HOST:PORT, at which ranks of other hosts join.",
        section="Parallelism",
        serving=False,
    )
    rank_key_file: Path | None = setting(
        None,
        "File with the secret that this worker and its ranks on other hosts prove to each other.",
        section="Parallelism",
        serving=False,
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = setting(
        "auto",
        "Type of cached keys and values; auto keeps the computation type, fp8 is for GPUs, int8 for CPUs.",
        section="KV cache",
    )
    kv_tier: str = setting(
        "",
        "Tiers for blocks beyond the pool, fastest first: ram:SIZE, disk:FOLDER:SIZE (sizes as in 8g), "
        "redis://HOST:PORT/DB, s3://BUCKET/PREFIX. Several, or separated by commas.",
        section="KV cache",
    )
    window_blocks: Literal["auto", "off"] = setting(
        "auto",
        "Blocks of layers with a sliding window: auto frees those behind it, where that is computed; off "
        "keeps all. The same for all workers.",
        section="KV cache",
    )
    speculative_model: str | None = setting(
        None,
        "Draft model of the same vocabulary, Medusa heads or an EAGLE head; or mtp, the model's own layers "
        "for multi-token prediction. All workers need the same.",
        section="Speculative decoding",
    )
    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl", "gloo", "tcp"] = setting(
        "auto",
        "Transport of KV blocks between workers; auto takes the fastest that both sides have.",
        section="KV transfer",
    )
    max_loras: Annotated[int, Field(ge=0, le=256)] = setting(
        8,
        "LoRA adapters that one step can compute at once; more are loaded and take turns. 0 = none.",
        section="LoRA",
    )
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = setting(
        64, "Largest rank of a LoRA adapter.", section="LoRA"
    )
    insecure_kv_network: bool = setting(
        False,
        "With --internal-tls, let nccl and gloo carry keys and values between hosts, unencrypted.",
        section="Security",
        serving=False,
    )
    share_weights: bool = setting(
        True,
        "Keep packed weights once for all CPU workers of this host and user; else in each worker.",
        section="Compute",
    )
    weight_holder: Annotated[str, Field(pattern=r"^[\w-]*$")] = internal(
        "", "Name of the abstract socket at which packed weights are to be had."
    )
    hosted: bool = internal(False, "Whether a worker of the other role is in this process, too.")
    cores_fd: int | None = internal(
        None, "File on whose bytes the workers of this machine lend each other cores."
    )
    home_cores: Annotated[str, Field(pattern=r"^(\d+(,\d+)*)?$")] = internal(
        "", "With cores-fd: numbers of the cores that are this worker's, as in 0,1."
    )
    machine_cores: Annotated[int, Field(ge=0)] = internal(
        0, "With cores-fd: number of cores that are shared."
    )

    @property
    def link_tls(self) -> InternalTls | None:
        """Certificates for the links to other programs; None: links are plain."""
        if self.internal_tls is None:
            return None
        return InternalTls(self.internal_tls, self.program, plain_groups=self.insecure_kv_network)

    @property
    def parts(self) -> int:
        """Parts in which this worker adds products."""
        return self.sum_parts or self.tensor_parallel

    @property
    def all_to_all(self) -> bool:
        """True if rows are sent to the experts of other ranks."""
        return self.all2all_backend == "all_to_all"

    @property
    def ranks_here(self) -> int:
        """Processes of a stage that share this host's cores, at most."""
        size = self.tensor_parallel * self.pipeline_parallel
        return max(1, min(self.tensor_parallel, size - self.remote_ranks))

    @property
    def kv_transport(self) -> str:
        """`--transport`, of which ranks on other hosts leave tcp."""
        return "tcp" if self.remote_ranks else self.transport

    def ranks_have_memories(self, device_type: str) -> bool:
        """Return whether each process of this worker, where it is a group, has memories of its own."""
        size = self.tensor_parallel * self.pipeline_parallel
        return size > 1 and (self.own_memories or device_type == "cuda")

    @property
    def in_parts(self) -> bool:
        """True if the model is dealt to parts or stages, whatever the number of processes."""
        return self.parts > 1 or self.pipeline_parallel > 1

    @property
    def group_flags(self) -> str:
        """The flags by which this worker's model is dealt."""
        chosen = {
            "--tensor-parallel": self.tensor_parallel,
            "--pipeline-parallel": self.pipeline_parallel,
        }
        flags = [f"{flag} {value}" for flag, value in chosen.items() if value > 1]
        return " ".join(flags) or f"--sum-parts {self.parts}"

    @property
    def recorded_prompt_tokens(self) -> int:
        """Tokens of the longest prompt step to record."""
        return self.prompt_graph_tokens

    @property
    def step_pacing(self) -> tuple[float, float]:
        """Least and most stretch of decode steps (diptych/engine/step_pacing.py)."""
        return 1.0, 1.0

    @property
    def takes_images(self) -> bool:
        """True for the role whose prompts take rows of images."""
        return False

    @property
    def loads_encoder(self) -> bool:
        """True for a worker that makes these rows itself, too."""
        return False

    @property
    def keeps_tiers(self) -> bool:
        """True for a worker that keeps blocks in tiers, too."""
        return bool(self.kv_tier)

    @property
    def drafting_flags(self) -> str:
        """The flags by which tokens are drafted; empty without."""
        return "" if self.speculative_model is None else f"--speculative-model {self.speculative_model}"

    @property
    def decodes(self) -> bool:
        """True for the role that drafts and checks tokens."""
        return False

    @field_validator("rendezvous")
    @classmethod
    def _rendezvous_is_an_address(cls, value: str) -> str:
        if value:
            parse_address(value)
        return value

    @field_validator("kv_tier")
    @classmethod
    def _tiers_are_tiers(cls, value: str) -> str:
        parse_tiers(value)
        return value

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        """Check what flags alone show; the engine loader checks again with the device that `auto` found."""
        for faults in (_faults_in_parts(self), _faults_across_hosts(self)):
            if (why := next(faults, None)) is not None:
                raise ValueError(why)
        if (why := _plain_groups_fault(self)) is not None:
            raise ValueError(why)
        device_type = self.device.partition(":")[0]
        if device_type != "auto" and (why := why_not_together(self, device_type)) is not None:
            raise ValueError(why)
        return self


class ImpossibleSettings(StartupError):
    """Settings that do not go together on the device of this worker."""


def why_not_together(settings: WorkerSettings, device_type: str) -> str | None:
    """Return why a worker with these settings cannot compute on a `cpu` or on `cuda`; None if it can."""
    drafts = settings.ranks_have_memories(device_type) and settings.speculative_model is not None
    if drafts and settings.transport == "cuda_ipc":
        return (
            f"--transport {settings.transport} does not go with --speculative-model "
            f"{settings.speculative_model} and {settings.group_flags}: it copies from rank to rank, and "
            "rank 0 alone has a draft model's keys and values; tcp goes"
        )
    return next(_faults_on_cpu(settings) if device_type == "cpu" else _faults_on_gpu(settings), None)


def _faults_in_parts(settings: WorkerSettings) -> Iterator[str]:
    parts, ranks = settings.parts, settings.tensor_parallel
    if parts % ranks:
        yield f"--sum-parts {parts} is no multiple of --tensor-parallel {ranks}"
    if settings.expert_parallel and parts == 1:
        yield "--expert-parallel deals experts to the parts of --tensor-parallel or --sum-parts: there is one"
    if settings.all_to_all and not settings.expert_parallel:
        yield f"--all2all-backend {settings.all2all_backend} is for --expert-parallel"
    if settings.all_to_all and settings.backend == "native":
        yield (
            f"--all2all-backend {settings.all2all_backend} is computed by torch and the Triton step, not by "
            f"--backend {settings.backend}"
        )
    if ranks * settings.pipeline_parallel > MAX_RANKS:
        yield f"{settings.group_flags}: more than {MAX_RANKS} processes"
    if not settings.in_parts:
        return
    flag = settings.group_flags
    if settings.quantization == "gguf":
        yield f"--quantization {settings.quantization} is not computed with {flag}"
    by_triton = settings.backend not in ("native", "torch")  # on a GPU; on CPUs fp8 is refused below
    if settings.kv_cache_dtype == "int8" or (settings.kv_cache_dtype == "fp8" and not by_triton):
        yield f"--kv-cache-dtype {settings.kv_cache_dtype} is not kept with {flag}"
    if settings.batch_invariant:
        yield f"--batch-invariant is not promised with {flag}"
    if ranks * settings.pipeline_parallel > 1 and settings.transport in ("nccl", "gloo"):
        yield f"--transport {settings.transport} does not go with {flag}: shared_memory, cuda_ipc and tcp do"


def _faults_across_hosts(settings: WorkerSettings) -> Iterator[str]:
    count, size = settings.remote_ranks, settings.tensor_parallel * settings.pipeline_parallel
    if not count:
        if settings.rendezvous or settings.rank_key_file is not None:
            yield "--rendezvous and --rank-key-file are for ranks on other hosts (--remote-ranks)"
        return
    if count >= size:
        yield (
            f"--remote-ranks {count}: this worker has {size} processes (--tensor-parallel, "
            "--pipeline-parallel), and the first of them runs here"
        )
    if not settings.rendezvous or settings.rank_key_file is None:
        yield f"--remote-ranks {count} needs --rendezvous and --rank-key-file"
    if settings.kv_tier:
        yield (
            f"--kv-tier {settings.kv_tier} does not go with --remote-ranks {count}: every block that is "
            "stored or loaded would pass the network between the hosts"
        )
    if settings.transport not in ("auto", "tcp"):
        yield f"--transport {settings.transport} does not reach the ranks of other hosts: tcp does"
    if settings.internal_tls is not None and not settings.insecure_kv_network:
        yield (
            f"--remote-ranks {count}: what ranks exchange between hosts is not encrypted, as --internal-tls "
            "wants; --insecure-kv-network allows it as it is"
        )


def _plain_groups_fault(settings: WorkerSettings) -> str | None:
    if settings.insecure_kv_network and settings.internal_tls is None:
        return "--insecure-kv-network does nothing without --internal-tls: nothing is encrypted"
    if settings.internal_tls is None or settings.insecure_kv_network or is_loopback(settings.host):
        return None
    if settings.transport not in ("nccl", "gloo"):
        return None
    return (
        f"--transport {settings.transport} does not encrypt keys and values, as --internal-tls wants between "
        "hosts: --transport tcp does, and --insecure-kv-network allows it as it is"
    )


def _faults_on_cpu(settings: WorkerSettings) -> Iterator[str]:
    here = "and this worker computes on the CPU (--device)"
    if settings.transport in ("nccl", "cuda_ipc"):
        yield f"--transport {settings.transport} needs blocks on a GPU, {here}"
    if settings.backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        yield f"--backend triton needs a GPU, {here}"
    if settings.backend != "triton" and settings.dtype == "fp16":
        yield f"--dtype fp16 is computed on GPUs only, {here}"
    if settings.backend == "torch" and settings.batch_invariant:
        yield f"--batch-invariant: --backend torch rounds by the number of rows, native does not, {here}"
    if settings.backend == "triton" and settings.kv_cache_dtype == "int8":
        yield "--kv-cache-dtype int8: the Triton step does not keep keys and values so, the CPU steps do"
    if settings.backend != "triton" and settings.quantization == "fp8":
        yield f"--quantization fp8 is computed on GPUs only, {here}"
    if settings.kv_cache_dtype == "fp8" and settings.backend in ("auto", "native"):
        yield (
            "--kv-cache-dtype fp8: the native CPU step keeps keys and values in the computation's own dtype "
            "or in int8; a GPU keeps them in fp8, and so does --backend torch, slowly"
        )


def _faults_on_gpu(settings: WorkerSettings) -> Iterator[str]:
    here = "and this worker computes on a GPU (--device)"
    if settings.transport == "shared_memory":
        yield f"--transport shared_memory is for blocks of CPU workers, {here}: there it is cuda_ipc"
    if settings.backend in ("native", "torch"):
        yield f"--backend {settings.backend} computes on CPUs, {here}"
    if settings.kv_cache_dtype == "int8":
        yield f"--kv-cache-dtype int8 is kept by CPUs only, {here}: there it is fp8"
    if settings.quantization == "gguf":
        yield f"--quantization gguf is computed on CPUs only, {here}: auto keeps a file's codes there"
    tokens = settings.block_size
    if tokens & (tokens - 1) or tokens > LARGEST_GPU_BLOCK:  # splits of a context are whole blocks
        yield f"--block-size {tokens}: on a GPU it is a power of two, at most {LARGEST_GPU_BLOCK}"
