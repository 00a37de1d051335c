"""Images of simulated requests: tokens that stand for rows, the pixels behind them, and their encoder.

A prompt with an image has `IMAGE` for each of its rows, and behind them a token that names the image: blocks
of rows have the same tokens whatever the image, so that only its digest keeps their keys apart. The model
reads the rows (`with_rows`), which it gets by way of the gateway's pixels and an encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diptych.image_spec import ImageSpec
from diptych.runtime.image_rows import pixels_digest
from gateway.model.images import ImagePlace, PreparedImage, PromptImages
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint

IMAGE = 3000
NAMES = 4000  # the tokens that name images come behind this one
MOST_TILES = 4
ROWS_PER_TILE = 3
_HALF = (0.5, 0.5, 0.5)
SPEC = ImageSpec("llava", (2, 2), ROWS_PER_TILE, "<image>", IMAGE, 3, 1 / 255, _HALF, _HALF)
_ROW_TOKEN = 1 << 20  # rows are read as tokens beyond the vocabulary


def image_tokens(name: int, tiles: int) -> tuple[int, ...]:
    """Return the tokens of an image of so many tiles."""
    return (*[IMAGE] * (ROWS_PER_TILE * tiles), NAMES + MOST_TILES * name + tiles)


def row_value(name: int, row: int) -> int:
    """Return the number that a row of an image holds."""
    return 1000 * name + row


def with_rows(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return a prompt as the model reads it: with the numbers of its images' rows."""
    found = list(prompt)
    for first, rows, name in _runs(prompt):
        found[first : first + rows] = [_ROW_TOKEN + row_value(name, row) for row in range(rows)]
    return tuple(found)


def step_tokens(token_ids: Sequence[int], embeddings: Sequence[Any]) -> list[int]:
    """Return a step's tokens with the rows that it was given in place of theirs."""
    found = list(token_ids)
    for one in embeddings:
        values = [_ROW_TOKEN + int(value) for value in one.rows[:, 0].tolist()]
        found[one.at : one.at + len(values)] = values
    return found


def _runs(prompt: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return first position, rows and name of each image."""
    found = []
    first: int | None = None
    for place, token in enumerate(prompt):
        if token == IMAGE:
            first = place if first is None else first
        elif first is not None:
            found.append((first, place - first, token - NAMES))
            first = None
    return found


def located(ids: Sequence[int], images: object, model: object) -> PromptImages | None:
    """Stand in for the gateway's search for images: those of the conversation, which this prompt names."""
    runs = _runs(ids)
    if not runs:
        return None
    made = {name: _prepared(name, rows // ROWS_PER_TILE) for _, rows, name in runs}
    order = list(made)
    places = tuple(ImagePlace(first, rows, order.index(name), 0, 0) for first, rows, name in runs)
    return PromptImages(tuple(made.values()), places)


def _prepared(name: int, tiles: int) -> PreparedImage:
    shape = (tiles, 3, 2, 2)
    data = b"".join(bytes([name, tile, *[7] * 10]) for tile in range(tiles))
    return PreparedImage(shape, data, 0, 0, pixels_digest(shape, data))


@dataclass(frozen=True)
class SimulatedEncoder:
    """Stand-in for an image encoder: it reads name and place from a tile's first pixels."""

    spec: ImageSpec = SPEC

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """Return the rows `[rows, 1]` of a tile."""
        name, number = tile.flatten()[:2].tolist()
        first = ROWS_PER_TILE * number
        return torch.tensor([[float(row_value(name, first + row))] for row in range(ROWS_PER_TILE)])


def fingerprint(digest: str) -> EmbeddingFingerprint:
    """Return the fingerprint of the encoder of the simulated model."""
    return EmbeddingFingerprint(digest, SPEC.family, "float32")
