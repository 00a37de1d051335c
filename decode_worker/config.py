"""Settings of the decode worker: flags of `diptych decode`, variables DIPTYCH_*."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from diptych.worker_process.config import WorkerSettings

_CPU_POOL_MIB = 1024


class DecodeSettings(WorkerSettings):
    """A decode worker: owns KV blocks, and writes the answers of all its sequences token by token."""

    program: ClassVar[str] = "decode"

    kv_memory_mib: Annotated[int | None, Field(ge=1)] = Field(
        None, description="memory of the KV block pool, in MiB; default: 1024, on a GPU what is free"
    )
    kv_blocks: Annotated[int, Field(ge=0)] = Field(
        0, description="blocks of the pool; 0 = as many as kv-memory-mib holds"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="share of a GPU's memory that this worker may take, KV blocks included"
    )
    itl_stretch: Annotated[float, Field(ge=1, le=10)] = Field(
        1.3,
        description="while prompts queue for cores that they share with this worker, a step begins this many "
        "times its length after the one before, and prefill has the cores in between; 1 = at once",
    )
    itl_stretch_max: Annotated[float, Field(ge=1, le=10)] = Field(
        3.0,
        description="the same where a prompt has waited for a second; from half a second on it grows towards "
        "this; no more than itl-stretch = it never grows",
    )
    speculative_tokens: Annotated[int, Field(ge=0, le=15)] = Field(
        0,
        description="speculative decoding: tokens that a step drafts for each sequence from its own text "
        "(prompt lookup) and checks; 0 = none",
    )
    speculative_step_tokens: Annotated[int, Field(ge=1, le=1024)] = Field(
        8, description="tokens of a step, drafts included, up to which its sequences get drafts"
    )
    max_batch: Annotated[int, Field(ge=1, le=1024)] = Field(64, description="sequences per decode step")

    def num_blocks(self, bytes_per_block: int) -> int:
        """Return the blocks of the pool as configured, or of the default on a CPU; at least one."""
        return self.kv_blocks or max(1, ((self.kv_memory_mib or _CPU_POOL_MIB) << 20) // bytes_per_block)

    @property
    def step_pacing(self) -> tuple[float, float]:
        """See `WorkerSettings.step_pacing`."""
        return self.itl_stretch, self.itl_stretch_max

    @property
    def pool_chosen(self) -> bool:
        """True if the size of the pool is configured."""
        return bool(self.kv_blocks or self.kv_memory_mib)
