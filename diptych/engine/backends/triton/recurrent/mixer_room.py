"""Room for what lies between a recurrent layer's input and its output, made once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class MixerRoom:
    """Room for T tokens."""

    plain: torch.Tensor
    """`[T, numbers]` of the model's dtype: as many as a token has, not where."""
    wide: torch.Tensor
    """float32 `[T, numbers]`."""

    @classmethod
    def make(
        cls, numbers: tuple[int, int], tokens: int, dtype: torch.dtype, device: torch.device
    ) -> MixerRoom:
        """Allocate room for `tokens` tokens of so many numbers each: of `dtype`, and float32."""
        plain, wide = (
            torch.zeros((tokens, count), dtype=kind, device=device)
            for count, kind in zip(numbers, (dtype, torch.float32), strict=True)
        )
        return cls(plain, wide)

    def rows(self, tokens: int) -> MixerRoom:
        """Return the room of fewer tokens."""
        return MixerRoom(self.plain[:tokens], self.wide[:tokens])

    def clear(self) -> None:
        """Make zeros of all."""
        self.plain.zero_()
        self.wide.zero_()

    def typed(self, *widths: int) -> list[torch.Tensor]:
        """Return tensors `[T, width]` of the model's dtype that do not overlap."""
        return _carve(self.plain, widths)

    def floats(self, *widths: int) -> list[torch.Tensor]:
        """Return tensors `[T, width]` of float32 that do not overlap."""
        return _carve(self.wide, widths)


def room_bytes(numbers: tuple[int, int], tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the room of so many tokens."""
    return tokens * (numbers[0] * dtype.itemsize + numbers[1] * torch.float32.itemsize)


def _carve(room: torch.Tensor, widths: tuple[int, ...]) -> list[torch.Tensor]:
    tokens, flat = len(room), room.view(-1)
    sizes = [tokens * width for width in widths]
    begins = accumulate(sizes, initial=0)
    return [
        flat[begin : begin + size].view(tokens, width)
        for begin, size, width in zip(begins, sizes, widths, strict=False)
    ]
