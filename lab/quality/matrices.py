"""The matrices of a model's layers, changed: rounded, say, or made full again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diptych.engine.weights import Weights

_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def with_matrices(weights: Weights, change: Callable[[Any], Any]) -> Weights:
    """Return the weights with what `change` returns for each matrix of each layer."""
    layers = tuple(
        replace(layer, **{name: change(getattr(layer, name)) for name in _MATRICES})
        for layer in weights.layers
    )
    return replace(weights, layers=layers)
