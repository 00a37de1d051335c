"""Blocks of K-quants with random bits and scales of a sensible size."""

from __future__ import annotations

import torch

from kernels.kquants import KQUANT_BYTES, KQuantFormat

_SCALES: dict[str, tuple[int, float]] = {
    "q2_k": (80, 0.0055),
    "q3_k": (108, 0.0014),
    "q4_k": (0, 0.0003),
    "q5_k": (0, 0.00015),
    "q6_k": (208, 0.000044),
    "iq4_xs": (0, 0.000049),
}
"""Place of the scale of scales, and a size of it that gives numbers of the deviation 1/16."""
_MEAN_CODE = {"q2_k": 1.5, "q4_k": 7.5, "q5_k": 15.5}
"""Of formats with least values, whose scale then stands behind the other one."""


def random_blocks(name: KQuantFormat, count: int, seed: int) -> torch.Tensor:
    """Return uint8 `[count, bytes of a block]`; their numbers are of the size of a weight, about zero."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (count, KQUANT_BYTES[name]), dtype=torch.uint8, generator=generator)
    at, size = _SCALES[name]
    scales = (torch.rand(count, 1, generator=generator) + 0.5) * size
    blocks[:, at : at + 2] = scales.half().view(torch.uint8)
    if name in _MEAN_CODE:
        blocks[:, at + 2 : at + 4] = (_MEAN_CODE[name] * scales).half().view(torch.uint8)
    return blocks
