"""Blocks of K-quants: with random bits and scales of a sensible size, or near to given numbers."""

from __future__ import annotations

import torch

from kernels import kquants
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


def quantise(values: torch.Tensor, name: KQuantFormat) -> torch.Tensor:
    """Return blocks, uint8 `[n, bytes of a block]`, near to `values [n, 256]`.

    Scales go by the greatest number of each part, which is coarser than llama.cpp's search.
    """
    low, high, part, offset, has_least = _LAYOUTS[name]
    parts = values.float().view(len(values), -1, part)
    greatest = (1 << low + high) - 1
    limit = 15 if name == "q2_k" else 127 if name == "q6_k" else 63 if has_least else 31
    floor = parts.amin(-1).clamp(max=0) if has_least else torch.zeros(parts.shape[:2])
    wide = (parts.amax(-1) - floor) / greatest if has_least else parts.abs().amax(-1) / _PEAK[name]
    d = (wide.amax(1, keepdim=True) / limit).half()
    dmin = (-floor.amin(1, keepdim=True) / limit).half()
    scales = (wide / d.float().clamp(min=1e-12)).round().clamp(0, limit)
    least = (-floor / dmin.float().clamp(min=1e-12)).round().clamp(0, limit)
    steps = (d.float() * scales).clamp(min=1e-12).unsqueeze(-1)
    wanted = (parts + (dmin.float() * least).unsqueeze(-1)) / steps
    if name == "iq4_xs":
        codes = (wanted.unsqueeze(-1) - torch.tensor(kquants.TABLE).float()).abs().argmin(-1)
    else:
        codes = (wanted + offset).round().clamp(0, greatest)
    flat = codes.to(torch.uint8).view(len(values), 256)
    return _PACKERS[name](flat, scales.int(), least.int(), d.view(torch.uint8), dmin.view(torch.uint8))


_LAYOUTS: dict[str, tuple[int, int, int, int, bool]] = {
    "q2_k": (2, 0, 16, 0, True),
    "q3_k": (2, 1, 16, 4, False),
    "q4_k": (4, 0, 32, 0, True),
    "q5_k": (4, 1, 32, 0, True),
    "q6_k": (4, 2, 16, 32, False),
    "iq4_xs": (4, 0, 32, 0, False),
}
_PEAK = {"q3_k": 3.5, "q6_k": 31.5, "iq4_xs": 113.0}


def _join(codes: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Pack `count` codes of `size` bits into a byte: `codes [n, groups, count, width]`."""
    shifts = (torch.arange(count) * size).view(1, 1, -1, 1)
    return (codes.int() << shifts).sum(2).flatten(1).to(torch.uint8)


def _pack_q2_k(
    codes: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, d: torch.Tensor, dmin: torch.Tensor
) -> torch.Tensor:
    both = (scales | least << 4).to(torch.uint8)
    return torch.cat([both, _join(codes.view(-1, 2, 4, 32), 2, 4), d, dmin], dim=1)


def _pack_q3_k(
    codes: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, d: torch.Tensor, dmin: torch.Tensor
) -> torch.Tensor:
    high = _join((codes >> 2).view(-1, 1, 8, 32), 1, 8)
    low = _join((codes & 3).view(-1, 2, 4, 32), 2, 4)
    shifted = scales + 32
    nibbles = _join((shifted & 15).view(-1, 1, 2, 8), 4, 2)
    tops = _join((shifted >> 4).view(-1, 1, 4, 4), 2, 4)
    return torch.cat([high, low, nibbles, tops, d], dim=1)


def _six_bits(scales: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = least[:, :4] | least[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    return torch.cat([first, second, third], dim=1).to(torch.uint8)


def _pack_q4_k(
    codes: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, d: torch.Tensor, dmin: torch.Tensor
) -> torch.Tensor:
    low = _join(codes.view(-1, 4, 2, 32), 4, 2)
    return torch.cat([d, dmin, _six_bits(scales, least), low], dim=1)


def _pack_q5_k(
    codes: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, d: torch.Tensor, dmin: torch.Tensor
) -> torch.Tensor:
    high = _join((codes >> 4).view(-1, 1, 8, 32), 1, 8)
    low = _join((codes & 15).view(-1, 4, 2, 32), 4, 2)
    return torch.cat([d, dmin, _six_bits(scales, least), high, low], dim=1)


def _pack_q6_k(
    codes: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, d: torch.Tensor, dmin: torch.Tensor
) -> torch.Tensor:
    low = _join((codes & 15).view(-1, 2, 2, 64), 4, 2)
    high = _join((codes >> 4).view(-1, 2, 4, 32), 2, 4)
    return torch.cat([low, high, scales.to(torch.uint8), d], dim=1)


def _pack_iq4_xs(
    codes: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, d: torch.Tensor, dmin: torch.Tensor
) -> torch.Tensor:
    shifted = scales + 32
    low = _join((shifted & 15).view(-1, 4, 2, 1), 4, 2)
    high = _join((shifted >> 4).view(-1, 2, 4, 1), 2, 4)
    return torch.cat([d, high, low, _join(codes.view(-1, 8, 2, 16), 4, 2)], dim=1)


_PACKERS = {
    "q2_k": _pack_q2_k,
    "q3_k": _pack_q3_k,
    "q4_k": _pack_q4_k,
    "q5_k": _pack_q5_k,
    "q6_k": _pack_q6_k,
    "iq4_xs": _pack_iq4_xs,
}
