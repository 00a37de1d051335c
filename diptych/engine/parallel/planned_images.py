"""Rows of images as a step's plan has them: bytes, which any process reads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.engine.batch import EmbeddingRows


class PlannedImage(NamedTuple):
    """Embeddings of some tokens of a chunk; see `EmbeddingRows`."""

    at: int
    tokens: int
    dtype: torch.dtype
    data: bytearray
    """The rows, one after another."""
    whole: bool


def plan_image(image: EmbeddingRows) -> PlannedImage:
    """Return embeddings as a plan has them."""
    rows = image.rows.detach().cpu().contiguous()
    data = bytearray(rows.view(torch.uint8).numpy().tobytes())
    return PlannedImage(image.at, len(rows), rows.dtype, data, image.whole)


def follow_image(planned: PlannedImage) -> EmbeddingRows:
    """Return the embeddings of a plan. Its bytes may not be changed afterwards."""
    flat = torch.frombuffer(planned.data, dtype=planned.dtype)
    return EmbeddingRows(planned.at, flat.view(planned.tokens, -1), planned.whole)
