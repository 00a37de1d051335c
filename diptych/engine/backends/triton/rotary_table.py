"""The rotary angles of all positions, on the device: a step looks its own up."""

from __future__ import annotations

import torch

from diptych.engine.models.rope import inverse_frequencies, rotary_magnitude
from diptych.engine.models.shape import ModelShape

_FIRST_POSITIONS = 2048


class RotaryTable:
    """Float32 cosines and sines `[positions, head_dim / 2]`, magnitude included.

    Float32 also where the model is bfloat16, as in the native step: a rounded cosine has three digits.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(shape).float().to(device)
        self._magnitude = rotary_magnitude(shape)
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._make(min(_FIRST_POSITIONS, shape.max_context))

    def reach(self, positions: int) -> None:
        """Have that many; they double, so that they are seldom made.

        Earlier tables stay where they are: a recorded step reads the one that it was recorded with.
        """
        if positions > len(self.cos):
            self._earlier.append((self.cos, self.sin))
            self._make(max(positions, 2 * len(self.cos)))

    def _make(self, positions: int) -> None:
        at = torch.arange(positions, device=self._frequencies.device).float()
        angles = at.unsqueeze(1) * self._frequencies
        self.cos = angles.cos() * self._magnitude
        self.sin = angles.sin() * self._magnitude
