"""Loading of a model that one worker computes whole."""

from __future__ import annotations

from pathlib import Path

import torch

from diptych.engine.dtype import Precision
from diptych.engine.loaded_model import Model, load_model
from diptych.runtime.weight_store.client import HostWeights
from diptych.worker_process.config import WorkerSettings


def load_whole(
    settings: WorkerSettings, path: Path, dtype: Precision, device: torch.device, max_context: int | None
) -> Model:
    """Load the model at `path`, from the weights that the host holds packed where they are shared."""
    return load_model(
        path,
        dtype,
        backend=settings.backend,
        device=device,
        kv_cache=settings.kv_cache_dtype,
        max_context=max_context,
        store=HostWeights(settings.weight_holder or None) if settings.share_weights else None,
    )
