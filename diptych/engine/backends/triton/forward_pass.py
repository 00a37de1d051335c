"""Interface of a forward pass, of a whole model or of a rank's parts, to steps and their recordings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from diptych.engine.backends.triton.activations import RotaryTables
from diptych.engine.backends.triton.adapters import PlacedAdapters
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_step import PackedStep
from diptych.engine.backends.triton.packed_weights import PackedWeights
from diptych.engine.models.shape import ModelShape


class StepBuffers(Protocol):
    """Buffers of a step for some number of tokens T."""

    @property
    def normed(self) -> torch.Tensor:
        """`[T, hidden]`, which has the rows behind the final norm after a step."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        ...

    def rows(self, tokens: int) -> Any:
        """Return the buffers of `tokens` tokens, as views."""
        ...

    def clear_mixed(self) -> None:
        """Make zeros of what attention gives."""
        ...


class ForwardPass(Protocol):
    """Forward pass of a model on one device, from token ids to logits."""

    operators: Operators
    rotary: RotaryTables
    paced: bool
    """True if every step of a long prompt is launched no further ahead than one that can be aborted."""

    @property
    def shape(self) -> ModelShape:
        """Shape of the model that steps are planned for."""
        ...

    @property
    def weights(self) -> PackedWeights:
        """Weights on the device."""
        ...

    @property
    def leads(self) -> bool:
        """True where the logits are, and tokens are sampled."""
        ...

    @property
    def adapters(self) -> PlacedAdapters | None:
        """Adapters that rows may have; None: none may."""
        ...

    def allow_adapters(self, slots: int, max_rank: int) -> None:
        """Let rows have adapters of rank up to `max_rank` in so many slots."""
        ...

    def twin(self) -> ForwardPass:
        """Return a forward pass over the same weights, with tables and room of its own."""
        ...

    def buffers(self, tokens: int) -> StepBuffers:
        """Allocate buffers for up to `tokens` tokens."""
        ...

    def agree(self, tokens: torch.Tensor) -> None:
        """Make int64 `tokens [T]` what the process that samples has, which alone knows them all."""
        ...

    def hidden(
        self,
        step: PackedStep,
        buffers: Any,
        scratch: Any,
        wanted: Callable[[], bool] = ...,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Return the last layer's output, normalised, `[T, hidden]`; None once `wanted` says no."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits `[rows, vocab]` of rows of `hidden`, where this process leads."""
        ...
