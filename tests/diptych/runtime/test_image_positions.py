"""Positions of tokens among images on grids: transformers' own, whatever the chunks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from diptych.runtime.image_positions import grid_positions, position_shift
from diptych.runtime.image_rows import ImageRows


def transformers_positions(grids: list[tuple[int, int]], texts: list[int]) -> torch.Tensor:
    """Return positions `[3, tokens]` of stretches of text with an image of rows and columns after each."""
    kinds: list[int] = []
    for text, grid in zip(texts, [*grids, (0, 0)], strict=True):
        kinds += [0] * text + [1] * (grid[0] * grid[1])
    oracle: Any = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(oracle)
    oracle.config = Qwen2_5_VLConfig()
    found, _ = oracle.get_rope_index(
        torch.zeros((1, len(kinds)), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids]),
    )
    positions: torch.Tensor = found[:, 0]
    return positions


@pytest.mark.parametrize("seed", range(4))
def test_positions_are_those_of_transformers_in_chunks_of_any_size(seed: int) -> None:
    draw = random.Random(seed)
    grids = [(draw.randint(1, 7), draw.randint(1, 7)) for _ in range(1 + seed)]
    texts = [draw.randint(1, 9) for _ in range(len(grids) + 1)]
    images, place = [], 0
    for text, (rows, columns) in zip(texts, grids, strict=False):
        images.append(ImageRows(place + text, rows * columns, b"", columns=columns))
        place = images[-1].end
    expected = transformers_positions(grids, texts).numpy()
    total = expected.shape[1]
    for chunk in (1, 3, 16, total):
        for start in range(0, total, chunk):
            tokens = min(chunk, total - start)
            found = grid_positions(images, start, tokens)
            if found is None:  # text alone, shifted alike
                found = np.arange(start, start + tokens)[None] + position_shift(images, start)
            assert (found == expected[:, start : start + tokens]).all()
    assert position_shift(images, total) == expected.max() + 1 - total


def test_images_without_a_grid_leave_positions_as_they_are() -> None:
    image = ImageRows(3, 5, b"")
    assert position_shift([image], 20) == 0
    assert grid_positions([image], 0, 20) is None
