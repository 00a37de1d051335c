"""Numbers of K-quants and IQ4_XS: blocks of 256 with an fp16 scale, and whole multipliers of it.

Formats and bytes are those of GGUF files (github.com/ggml-org/ggml, ggml-common.h). A number is
`d * scale * (code - offset) - dmin * least`; of IQ4_XS the code is a place in a table of sixteen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import torch

KQuantFormat = Literal["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"]

SUPER: Final = 256
"""Numbers of a block."""
KQUANT_BYTES: Final[dict[KQuantFormat, int]] = {
    "q2_k": 84,
    "q3_k": 110,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
    "iq4_xs": 136,
}
"""Bytes of a block."""

TABLE: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Parts(NamedTuple):
    """Content of blocks `[n, ...]`."""

    codes: torch.Tensor  # float32 [n, parts, numbers of a part], offset taken off
    scales: torch.Tensor  # float32 [n, parts]
    d: torch.Tensor  # float32 [n, 1]
    least: torch.Tensor | None = None  # float32 [n, parts]
    dmin: torch.Tensor | None = None


def dequantise_blocks(blocks: torch.Tensor, name: KQuantFormat) -> torch.Tensor:
    """Return the float32 numbers `[n, 256]` of `blocks`, uint8 `[n, KQUANT_BYTES[name]]`, exactly."""
    found = parts_of(blocks, name)
    values = (found.d * found.scales).unsqueeze(-1) * found.codes
    if found.least is not None and found.dmin is not None:
        values = values - (found.dmin * found.least).unsqueeze(-1)
    return values.reshape(len(blocks), SUPER)


def parts_of(blocks: torch.Tensor, name: KQuantFormat) -> Parts:
    """Return the codes and scales of `blocks`, uint8 `[n, KQUANT_BYTES[name]]`."""
    return _READERS[name](blocks)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(packed: torch.Tensor, size: int, shifts: tuple[int, ...]) -> torch.Tensor:
    """Return codes of `size` bits of bytes `[n, groups, width]`: `[n, groups, len(shifts), width]`."""
    return torch.stack([packed >> shift & (1 << size) - 1 for shift in shifts], dim=2)


def _q2_k(blocks: torch.Tensor) -> Parts:
    codes = _bits(blocks[:, 16:80].reshape(-1, 2, 32), 2, (0, 2, 4, 6)).reshape(-1, 16, 16)
    scales = blocks[:, :16]
    return Parts(
        codes.float(),
        (scales & 15).float(),
        _half(blocks, 80),
        (scales >> 4).float(),
        _half(blocks, 82),
    )


def _q3_k(blocks: torch.Tensor) -> Parts:
    low = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2, (0, 2, 4, 6)).reshape(-1, 8, 32)
    high = _bits(blocks[:, None, :32], 1, tuple(range(8))).reshape(-1, 8, 32)
    codes = (low | high << 2).float() - 4.0
    packed = blocks[:, 96:108]
    scales = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    tops = _bits(packed[:, None, 8:], 2, (0, 2, 4, 6)).reshape(-1, 16)
    return Parts(codes.reshape(-1, 16, 16), (scales | tops << 4).float() - 32.0, _half(blocks, 108))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and least values, `[n, 8]` each, of the twelve bytes of Q4_K and Q5_K."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    least = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return scales.float(), least.float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return _bits(packed.reshape(-1, 4, 32), 4, (0, 4)).reshape(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> Parts:
    scales, least = _six_bits(blocks[:, 4:16])
    return Parts(_nibbles(blocks[:, 16:]).float(), scales, _half(blocks, 0), least, _half(blocks, 2))


def _q5_k(blocks: torch.Tensor) -> Parts:
    scales, least = _six_bits(blocks[:, 4:16])
    high = _bits(blocks[:, None, 16:48], 1, tuple(range(8))).reshape(-1, 8, 32)
    codes = (_nibbles(blocks[:, 48:]) | high << 4).float()
    return Parts(codes, scales, _half(blocks, 0), least, _half(blocks, 2))


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _bits(blocks[:, :128].reshape(-1, 2, 64), 4, (0, 4)).reshape(-1, 16, 16)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2, (0, 2, 4, 6)).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Parts((low | high << 4).float() - 32.0, scales, _half(blocks, 208))


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    places = _bits(blocks[:, 8:].reshape(-1, 8, 16), 4, (0, 4)).reshape(-1, 8, 32)
    codes = torch.tensor(TABLE, dtype=torch.float32)[places.long()]
    low = _bits(blocks[:, 4:8].reshape(-1, 4, 1), 4, (0, 4)).reshape(-1, 8)
    high = _bits(blocks[:, 2:4].reshape(-1, 2, 1), 2, (0, 2, 4, 6)).reshape(-1, 8)
    return Parts(codes, (low | high << 4).float() - 32.0, _half(blocks, 0))


_READERS: Final[dict[KQuantFormat, Callable[[torch.Tensor], Parts]]] = {
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_xs": _iq4_xs,
}
