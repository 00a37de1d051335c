"""Room for what lies between a recurrent layer's input and its output, made once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

LEAST_TOKENS = 64
"""Tokens that a room has at least: some kinds keep numbers of each so many tokens of a prompt."""


@dataclass(frozen=True)
class MixerRoom:
    """Room for T tokens, in the model's dtype and in float32."""

    tokens: int
    plain: torch.Tensor
    wide: torch.Tensor

    @classmethod
    def make(
        cls, numbers: tuple[int, int], tokens: int, dtype: torch.dtype, device: torch.device
    ) -> MixerRoom:
        """Allocate room for `tokens` tokens of so many numbers each: of `dtype`, and float32."""
        held = max(tokens, LEAST_TOKENS)
        plain, wide = (
            torch.zeros(count * held, dtype=kind, device=device)
            for count, kind in zip(numbers, (dtype, torch.float32), strict=True)
        )
        return cls(tokens, plain, wide)

    def rows(self, tokens: int) -> MixerRoom:
        """Return the room of fewer tokens."""
        return replace(self, tokens=tokens)

    def clear(self) -> None:
        """Make zeros of all."""
        self.plain.zero_()
        self.wide.zero_()

    def typed(self, *widths: int) -> list[torch.Tensor]:
        """Return tensors `[T, width]` of the model's dtype that do not overlap."""
        return _carve(self.plain, self.tokens, widths)

    def floats(self, *widths: int) -> list[torch.Tensor]:
        """Return tensors `[T, width]` of float32 that do not overlap."""
        return _carve(self.wide, self.tokens, widths)


def room_bytes(numbers: tuple[int, int], tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the room of so many tokens."""
    held = max(tokens, LEAST_TOKENS)
    return held * (numbers[0] * dtype.itemsize + numbers[1] * torch.float32.itemsize)


def _carve(flat: torch.Tensor, tokens: int, widths: tuple[int, ...]) -> list[torch.Tensor]:
    sizes = [tokens * width for width in widths]
    begins = accumulate(sizes, initial=0)
    return [
        flat[begin : begin + size].view(tokens, width)
        for begin, size, width in zip(begins, sizes, widths, strict=False)
    ]
