"""Places of the patches of Qwen's encoders: their order, their angles and their windows.

Patches lie square by square: the `merge` x `merge` of them that make one row of embeddings follow one
another, and squares go line by line. Names carry shapes: P patches, S squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_THETA = 10000.0


def by_squares(height: int, width: int, merge: int) -> torch.Tensor:
    """Return the numbers `[P]` of a grid's patches, counted line by line, in the order of squares."""
    lines = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    return lines.transpose(1, 2).flatten()


def angles(order: torch.Tensor, width: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin `[P, head_dim / 2]` of patches by their numbers, line by line, in a grid of `width`.

    The first half of the pairs of lanes turns by a patch's line, the second by its column.
    """
    frequencies = 1.0 / _THETA ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float) / (head_dim // 2))
    places = torch.stack([order // width, order % width], dim=1)
    turned = (places[..., None].float() * frequencies).flatten(1)
    return turned.cos(), turned.sin()


def windows(height: int, width: int, edge: int) -> tuple[torch.Tensor, Sequence[int]]:
    """Return the order `[S]` of squares, window by window, of a grid of `height` x `width` squares, and how
    many each window has; the last ones of a line or column may have fewer than `edge` a side.
    """
    squares = torch.arange(height * width).view(height, width)
    cut = [
        squares[top : top + edge, left : left + edge].flatten()
        for top in range(0, height, edge)
        for left in range(0, width, edge)
    ]
    return torch.cat(cut), [len(window) for window in cut]


def between_places(height: int, width: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each patch of a grid, line by line, four places of a learned grid of `side` x `side` and
    their shares, both `[P, 4]`: the learned grid is stretched over the image's, corners on corners.
    """
    (lines, line_shares), (columns, column_shares) = _between(height, side), _between(width, side)
    places = lines[:, None, :, None] * side + columns[None, :, None, :]
    shares = line_shares[:, None, :, None] * column_shares[None, :, None, :]
    return places.reshape(-1, 4), shares.reshape(-1, 4)


def _between(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two neighbours among `side` of each of `count` places of an axis, and their shares."""
    at = torch.arange(count, dtype=torch.float32) * (side - 1) / max(count - 1, 1)
    first = at.floor()
    neighbours = torch.stack([first, first + 1], dim=1).long().clamp(max=side - 1)
    rest = at - first
    return neighbours, torch.stack([1 - rest, rest], dim=1)
