"""Preparation of a decoded image: uint8 tiles, as transformers' processors with Pillow make them before they
scale.

Pure: numpy arrays `[channels, height, width]` in, tiles of the model's size out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from diptych.image_spec import ImageSpec

Pixels = npt.NDArray[np.uint8]
_LARGEST_EDGE = 4096
_LONGEST_RATIO = 200


class Prepared(NamedTuple):
    """Tiles `[tiles, 3, height, width]` of one image, and the grid that all but the last of them form.

    Without a grid (0 rows) the one tile is the whole image.
    """

    tiles: Pixels
    rows: int
    columns: int


class Unpreparable(ValueError):
    """An image of a form that the model does not take; the words follow its name."""


def prepare(image: Pixels, spec: ImageSpec) -> Prepared:
    """Return the tiles of an RGB image `[3, height, width]`. Raises Unpreparable."""
    if spec.family == "llava":
        return Prepared(_cropped(image, spec)[None], 0, 0)
    if spec.family == "gemma3":
        return Prepared(resize(image, spec.tile, spec.resample)[None], 0, 0)
    if spec.unit:
        return Prepared(
            resize(image, _whole_squares(image.shape[1], image.shape[2], spec), spec.resample)[None], 0, 0
        )
    image = resize(image, _longest_edge(image.shape[1], image.shape[2], spec.longest_edge), spec.resample)
    if not spec.splits:
        return Prepared(resize(image, spec.tile, spec.resample)[None], 0, 0)
    return _split(image, spec)


def resize(image: Pixels, size: tuple[int, int], resample: int) -> Pixels:
    """Return the image resized to (height, width)."""
    made = Image.fromarray(np.moveaxis(image, 0, -1)).resize((size[1], size[0]), Image.Resampling(resample))
    return np.moveaxis(np.asarray(made), -1, 0)


def _whole_squares(height: int, width: int, spec: ImageSpec) -> tuple[int, int]:
    """Return the size nearest to an image's that has whole squares, and no fewer or more pixels than the
    model takes. Raises Unpreparable.
    """
    if max(height, width) / min(height, width) > _LONGEST_RATIO:
        raise Unpreparable(f"is {width} x {height} pixels, more than {_LONGEST_RATIO} times as long as wide")
    unit = spec.unit
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    if high * wide > spec.most_pixels:
        shrunk = math.sqrt((height * width) / spec.most_pixels)
        high, wide = (max(unit, math.floor(edge / shrunk / unit) * unit) for edge in (height, width))
    elif high * wide < spec.least_pixels:
        grown = math.sqrt(spec.least_pixels / (height * width))
        high, wide = (math.ceil(edge * grown / unit) * unit for edge in (height, width))
    return high, wide


def _longest_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return the size whose longest edge is `edge`, the other one even; none is above 4096."""
    ratio = width / height
    if width >= height:
        height, width = _even(int(edge / ratio)), edge
    else:
        height, width = edge, _even(int(edge * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LARGEST_EDGE:
        height, width = int(_LARGEST_EDGE / ratio), _LARGEST_EDGE
    elif height > width and height > _LARGEST_EDGE:
        height, width = _LARGEST_EDGE, int(_LARGEST_EDGE * ratio)
    return max(height, 1), max(width, 1)


def _even(edge: int) -> int:
    return edge + edge % 2


def _split(image: Pixels, spec: ImageSpec) -> Prepared:
    """Resize to whole tiles and cut; the whole image, as one tile, comes last."""
    edge = spec.tile[0]
    height, width = image.shape[1:]
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    # A very long image may have a short edge of 0 here, which no processor survives.
    image = resize(image, (max(height, edge), max(width, edge)), spec.resample)
    rows, columns = image.shape[1] // edge, image.shape[2] // edge
    if rows == columns == 1:
        return Prepared(image[None], 0, 0)
    tiles = [
        image[:, row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        for row in range(rows)
        for column in range(columns)
    ]
    return Prepared(np.stack([*tiles, resize(image, spec.tile, spec.resample)]), rows, columns)


def _cropped(image: Pixels, spec: ImageSpec) -> Pixels:
    """Resize, and cut the centre out; where the image is smaller there is black around it."""
    if spec.pads:
        image = _square(image, tuple(int(value * 255) for value in spec.mean))
    height, width = image.shape[1:]
    if spec.resize_to is not None:
        size = spec.resize_to
    else:
        long = int(spec.shortest_edge * max(height, width) / min(height, width))
        size = (long, spec.shortest_edge) if width <= height else (spec.shortest_edge, long)
    image = resize(image, size, spec.resample)
    return _centre(image, spec.tile)


def _square(image: Pixels, colour: tuple[int, ...]) -> Pixels:
    height, width = image.shape[1:]
    edge = max(height, width)
    made = np.empty((3, edge, edge), dtype=np.uint8)
    made[:] = np.array(colour, dtype=np.uint8)[:, None, None]
    top, left = (edge - height) // 2, (edge - width) // 2
    made[:, top : top + height, left : left + width] = image
    return made


def _centre(image: Pixels, tile: tuple[int, int]) -> Pixels:
    (height, width), (high, wide) = image.shape[1:], tile
    top, left = (height - high) // 2, (width - wide) // 2
    if top >= 0 and left >= 0:
        return image[:, top : top + high, left : left + wide]
    larger = np.zeros((3, max(high, height), max(wide, width)), dtype=np.uint8)
    down, right = math.ceil((larger.shape[1] - height) / 2), math.ceil((larger.shape[2] - width) / 2)
    larger[:, down : down + height, right : right + width] = image
    top, left = top + down, left + right
    return larger[:, max(top, 0) : top + high, max(left, 0) : left + wide]
