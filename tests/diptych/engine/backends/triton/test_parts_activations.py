"""Buffers of several parts: one stream for all, also while they are made."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from diptych.engine.backends.triton.activations import Activations
from diptych.engine.backends.triton.parts_activations import PartsActivations
from tests.kernels.cpu.tiny_models import shape_of

TOKENS, PARTS = 8, 4


def test_the_streams_of_other_parts_are_gone_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card has room for one stream beside the parts' own numbers."""
    right, streams = Activations.make, list[weakref.ref[torch.Tensor]]()
    alive: list[int] = []

    def make(*given: Any) -> Activations:
        alive.append(sum(stream() is not None for stream in streams))
        made = right(*given)
        streams.extend(weakref.ref(one) for one in (made.residual, made.normed, made.added))
        return made

    monkeypatch.setattr(Activations, "make", make)
    made = PartsActivations.make(
        [shape_of()] * PARTS, TOKENS, torch.float32, torch.device("cpu"), lambda *given: None
    )
    assert alive == [0, 3, 3, 3]
    for own, outputs in zip(made.own, made.outputs, strict=True):
        assert own.residual is made.residual
        assert own.normed is made.normed
        assert own.added.data_ptr() == outputs.data_ptr()
    assert len({own.qkv.data_ptr() for own in made.own}) == PARTS
    assert made.added.data_ptr() not in {outputs.data_ptr() for outputs in made.outputs}
