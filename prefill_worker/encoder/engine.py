"""The image encoder of an encode worker: loaded without its text model, and tried before it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from diptych.engine.device import choose_device
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.usable_cores import usable_cores
from diptych.engine.vision.encoder import ImageEncoder
from diptych.engine.vision.registry import load_encoder, rows_dtype
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_files import fetched_model
from diptych.runtime.model_images import model_images
from diptych.worker_process.precision import precision_of
from diptych.worker_process.self_test import SelfTestFailed
from diptych.worker_process.worker_spec import EngineRecord
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint
from prefill_worker.encoder.config import EncodeSettings

_log = logging.getLogger(__name__)


def _ignore(seconds: float, rows: int) -> None:
    """Count no step: the worker does not serve yet."""


@dataclass(slots=True)
class LoadedEncoder:
    """An image encoder that has passed its self-test; a `ServedEngine`."""

    encoder: ImageEncoder
    fingerprint: EmbeddingFingerprint
    device: torch.device
    threads: int
    record: EngineRecord
    on_step: Callable[[float, int], None] = field(default=_ignore)

    @property
    def computes(self) -> str:
        """See `ServedEngine.computes`."""
        return self.fingerprint.format

    @property
    def device_type(self) -> str:
        """See `ServedEngine.device_type`."""
        return self.device.type

    def count_steps(self, on_step: Callable[[float, int], None]) -> None:
        """See `ServedEngine.count_steps`."""
        self.on_step = on_step

    def yield_cores(self) -> None:
        """See `ServedEngine.yield_cores`: it holds none."""

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[rows, width]` of a tile. Runs on the engine's thread."""
        torch.set_num_threads(self.threads)
        started = time.monotonic()
        rows = self.encoder.encode(tile)
        self.on_step(time.monotonic() - started, len(rows))
        return rows


async def load(settings: EncodeSettings) -> LoadedEncoder:
    """Load the encoder and try it, off the event loop.

    Raises UnsupportedModel for a model of text, SelfTestFailed, HubError.
    """
    return await asyncio.to_thread(_load, settings)


def _load(settings: EncodeSettings) -> LoadedEncoder:
    started = time.monotonic()
    device = choose_device(settings.device)
    path = fetched_model(settings.model)
    precision = precision_of(settings.engine_dtype, path, on_gpu=device.type == "cuda")
    shape = open_checkpoint(path, precision).shape
    seen = model_images(path, settings.mmproj)
    encoder = None
    if seen is not None:
        encoder = load_encoder(path, shape.hidden_size, precision, device, pair=seen.pair)
    if seen is None or encoder is None:
        raise UnsupportedModel("this model reads text only: it has no image encoder")
    dtype = str(rows_dtype(precision)).removeprefix("torch.")
    digest = model_digest(path, seen.mmproj)
    fingerprint = EmbeddingFingerprint(digest, encoder.spec.family, dtype)
    threads = settings.threads or usable_cores()
    record = EngineRecord(
        model_digest=digest,
        dtype=dtype,
        block_size=settings.block_size,
        max_context=shape.max_context,
        num_threads=threads,
        image_rows=fingerprint.format,
        encodes=1,
    )
    loaded = LoadedEncoder(encoder, fingerprint, device, threads, record)
    _try(loaded)
    _log.info("loaded the encoder of %s in %.1f s: %s", path.name, time.monotonic() - started, device)
    return loaded


def _try(loaded: LoadedEncoder) -> None:
    """Encode a grey tile twice. Raises SelfTestFailed unless both give the same finite numbers."""
    height, width = loaded.encoder.spec.tile
    tile = torch.full((3, height, width), 127, dtype=torch.uint8)
    first, second = loaded.encode(tile), loaded.encode(tile)
    if not torch.equal(first, second) or not bool(torch.isfinite(first).all()):
        raise SelfTestFailed("the image encoder does not give the same finite numbers twice")
