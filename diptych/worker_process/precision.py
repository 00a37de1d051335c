"""Choice of the precision that a worker computes a model in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from diptych.engine.dtype import IN_PARTS, Precision, choose_precision
from diptych.engine.gpu_precision import packs_on_gpu
from diptych.engine.loaded_model import native_step_works
from diptych.engine.weights.checkpoint import has_kquants, is_quantised, weight_bytes
from diptych.runtime.settings import DType, cpu_features
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.group.load import computes_natively


def chosen_precision(settings: WorkerSettings, path: Path, device: torch.device) -> Precision:
    on_gpu = device.type == "cuda" or settings.backend == "triton"
    in_parts = settings.in_parts
    return precision_of(
        settings.engine_dtype,
        path,
        on_gpu=on_gpu,
        native=(not in_parts or computes_natively(settings, path)) and settings.backend != "torch",
        in_parts=in_parts,
    )


def precision_of(
    chosen: Literal["auto"] | DType,
    path: Path,
    *,
    on_gpu: bool,
    native: bool = True,
    in_parts: bool = False,
) -> Precision:
    """Return the precision of the model at `path`, for --dtype or --quantization `chosen`.

    `native`: the native step may compute it, where it works at all. `in_parts`: by ranks of a group.
    """
    if chosen != "auto":
        return "w8a8" if on_gpu and chosen == "int8" else chosen
    return choose_precision(
        # Parts of a folder's codes are not read (diptych/engine/weights/reader.py).
        quantised_file=is_quantised(path) and (not in_parts or path.is_file()),
        native=native and native_step_works(),
        cpu_features=cpu_features(),
        on_gpu=on_gpu,
        packs=on_gpu and (not in_parts or "packed" in IN_PARTS) and packs_on_gpu(path),
        file_bytes=weight_bytes(path),
        kquants=has_kquants(path),
        in_parts=in_parts,
    )
