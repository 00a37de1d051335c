"""An adapter as rank 0 sends it to the other ranks: whole, each of which keeps its share."""

from __future__ import annotations

import pickle

import torch

from diptych.engine.adapters.adapter import Adapter, Delta


def pickle_adapter(adapter: Adapter) -> bytes:
    """Return an adapter's bytes, for `unpickle_adapter`: of a view its own numbers alone, and a tensor that
    several changes share once.
    """
    made: dict[int, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return made.setdefault(id(tensor), tensor.clone())

    layers = tuple(
        {field: Delta(own(delta.a), own(delta.b), delta.scale) for field, delta in layer.items()}
        for layer in adapter.layers
    )
    return pickle.dumps(Adapter(layers))


def unpickle_adapter(pickled: bytes) -> Adapter:
    """Return the adapter that rank 0 of this group sent; it proved who it is before (rendezvous.py)."""
    adapter: Adapter = pickle.loads(pickled)
    return adapter
