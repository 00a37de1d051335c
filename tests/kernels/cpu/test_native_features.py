"""Features of the native step: the residual stream before tapped layers, of all tokens of a step."""

from __future__ import annotations

import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from tests.kernels.cpu.tiny_models import layout_of, shape_of, tokens_of, weights_of

SHAPE = shape_of(num_layers=4)
LAYERS = (3, 0, 2)


def features_of(backend: NativeBackend | TorchBackend, cuts: list[int]) -> torch.Tensor:
    """Return the features of a prompt of 40 tokens in chunks, each beside a decode row."""
    giving, layout = backend.give_features(LAYERS), layout_of(SHAPE, 8, torch.float32)
    memory, found, start = KVMemory(layout, 8), [], 0
    for end in cuts:
        chunk = SequenceStep(memory, [5, 1, 2, 0, 4], start, tokens_of(40)[start:end], wants_logits=False)
        beside = SequenceStep(memory, [7], 0, [9], wants_logits=True)
        output = giving.forward_and_sample([beside, chunk], [None], None)
        assert output.features is not None
        assert output.features.shape == (1 + end - start, len(LAYERS) * SHAPE.hidden_size)
        found.append(output.features[1:])
        start = end
    return torch.cat(found)


def test_they_are_the_references_and_have_the_same_bits_in_any_chunks() -> None:
    weights = weights_of(SHAPE, torch.float32)
    backend = NativeBackend(SHAPE, weights, torch.float32)
    whole = features_of(backend, [40])
    torch.testing.assert_close(whole, features_of(TorchBackend(SHAPE, weights), [40]), atol=1e-4, rtol=1e-4)
    backend.set_threads(2)
    assert torch.equal(features_of(backend, [3, 20, 21, 40]), whole)
    assert (
        whole[:, : SHAPE.hidden_size] - whole[:, SHAPE.hidden_size : 2 * SHAPE.hidden_size]
    ).abs().max() > 0.1
