"""Positions of tokens, apart from their places, where images lie on grids (mrope, arXiv:2409.12191).

A row of an image's grid has three positions: time, height and width, counted from the position at which the
image begins. The text behind goes on after the greatest of them, so that its positions are smaller than its
places in the prompt. Gateway and workers tell neither: both follow from where the images are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diptych.runtime.image_rows import ImageRows

AXES = 3  # time, height, width


def position_shift(images: Sequence[ImageRows], place: int) -> int:
    """Return what is added to `place`, that of a token of text, for its position: 0 or less."""
    return sum(_shift_after(image) for image in images if image.columns and image.end <= place)


def grid_positions(images: Sequence[ImageRows], start: int, tokens: int) -> npt.NDArray[np.int64] | None:
    """Return the positions `[3, tokens]` of the tokens from place `start` on; None if none of them is a row
    of a grid, and those of text are all shifted alike.
    """
    end = start + tokens
    if not any(image.columns and image.first < end and image.end > start for image in images):
        return None
    places = np.arange(start, end, dtype=np.int64)
    found = np.tile(places, (AXES, 1))
    shift = 0
    for image in images:
        if not image.columns or image.first >= end:
            continue
        here = slice(max(image.first - start, 0), max(image.end - start, 0))
        rows = places[here] - image.first
        begins = image.first + shift
        found[0, here] = begins
        found[1, here] = begins + rows // image.columns
        found[2, here] = begins + rows % image.columns
        shift += _shift_after(image)
        found[:, max(image.end - start, 0) :] = places[max(image.end - start, 0) :] + shift
    return found


def _shift_after(image: ImageRows) -> int:
    """Return by how much an image moves the positions behind it: it takes as many as its longer side has."""
    return max(image.rows // image.columns, image.columns) - image.rows
