"""Settings of the encode worker."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from diptych.runtime.settings import setting
from diptych.worker_process.config import RoleSettings


class EncodeSettings(RoleSettings):
    """Run an encode worker: it turns images into embeddings, which prefill workers fetch."""

    program: ClassVar[str] = "encode"

    image_cache_mib: Annotated[int, Field(ge=0, le=1 << 20)] = setting(
        256, "MiB of embeddings of images that are kept for the next prompt with them.", section="Images"
    )
    image_buffer_mib: Annotated[int, Field(ge=1, le=1 << 20)] = setting(
        512, "MiB of pixels that may be on their way to their requests here.", section="Images"
    )
