"""Settings of the prefill worker: flags of `diptych prefill`, variables DIPTYCH_*."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from diptych.worker_process.config import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A prefill worker: reads prompts, and writes their KV cache where a decode worker has it."""

    program: ClassVar[str] = "prefill"

    prefill_chunk: Annotated[int, Field(ge=0, le=65536)] = Field(
        0, description="tokens per prefill step; 0 = 512 on a CPU, 2048 on a GPU"
    )
    max_batch_requests: Annotated[int, Field(ge=1, le=1024)] = Field(
        32, description="prompts that compute, or ask one decode worker for blocks, at the same time"
    )
    scratch_blocks: Annotated[int, Field(ge=0)] = Field(
        0, description="blocks of this worker's own pool, used by copying transports; 0 = two contexts"
    )

    def chunk_tokens(self, device_type: str) -> int:
        """Return the most tokens of a step.

        Launching a step takes 10 ms of the host, for which a GPU waits in short ones.
        """
        return self.prefill_chunk or (512 if device_type == "cpu" else 2048)

    def num_scratch_blocks(self, max_context: int) -> int:
        """Return the blocks of the own pool: by default two prompts of the model's whole context."""
        return self.scratch_blocks or 2 * -(-max_context // self.block_size)
