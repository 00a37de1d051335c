"""Settings of the decode worker: flags of `diptych decode`, variables DIPTYCH_*."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from worker.config import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Everything about one decode worker; made once in `__main__`."""

    program: ClassVar[str] = "decode"

    kv_memory_mib: Annotated[int, Field(ge=1)] = Field(
        1024, description="memory of the KV block pool, in MiB"
    )
    kv_blocks: Annotated[int, Field(ge=0)] = Field(
        0, description="blocks of the pool; 0 = as many as kv-memory-mib holds"
    )
    max_batch: Annotated[int, Field(ge=1, le=1024)] = Field(64, description="sequences per decode step")

    def num_blocks(self, bytes_per_block: int) -> int:
        """Blocks of the pool, at least one."""
        return self.kv_blocks or max(1, (self.kv_memory_mib << 20) // bytes_per_block)
