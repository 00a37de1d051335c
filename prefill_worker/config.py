"""Settings of the prefill worker."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from diptych.runtime.settings import setting
from diptych.worker_process.config import WorkerSettings
from kvtransfer.protocol.pull_rates import PullMode


class PrefillSettings(WorkerSettings):
    """Run a prefill worker: it computes prompts, and writes their KV cache where a decode worker has it."""

    program: ClassVar[str] = "prefill"

    prefill_chunk: Annotated[int, Field(ge=0, le=65536)] = setting(
        0, "Tokens of a prefill step; 0 takes 512 on a CPU, 2048 on a GPU.", section="Scheduling"
    )
    max_batch_requests: Annotated[int, Field(ge=1, le=1024)] = setting(
        32,
        "Prompts that compute, or ask one decode worker for blocks, at the same time.",
        section="Scheduling",
    )
    scratch_blocks: Annotated[int, Field(ge=0)] = setting(
        0,
        "Blocks of this worker's own pool, which copying transports use: at least one context "
        "(--max-model-len); 0 takes two contexts, or one where free memory is short.",
        section="KV cache",
    )
    pull_prefixes: PullMode = setting(
        "auto",
        "Take prefixes that a decode worker has cached from there, where blocks are copied: auto, where that "
        "is cheaper than computing them; always; never.",
        section="KV cache",
    )

    image_cache_mib: Annotated[int, Field(ge=0, le=1 << 20)] = setting(
        256, "MiB of embeddings of images that are kept for the next prompt with them.", section="Images"
    )
    image_buffer_mib: Annotated[int, Field(ge=1, le=1 << 20)] = setting(
        512, "MiB of pixels that may wait here for their prompts.", section="Images"
    )

    image_encoder: bool = setting(
        True,
        "Load the model's image encoder, for requests that no encode worker takes; without it images need "
        "encode workers.",
        section="Images",
    )

    @property
    def takes_images(self) -> bool:
        """See `WorkerSettings.takes_images`."""
        return True

    @property
    def loads_encoder(self) -> bool:
        """See `WorkerSettings.loads_encoder`."""
        return self.image_encoder

    def chunk_tokens(self, device_type: str) -> int:
        """Return the most tokens of a step.

        Launching a step takes 10 ms of the host, for which a GPU waits in short ones.
        """
        return self.prefill_chunk or (512 if device_type == "cpu" else 2048)
