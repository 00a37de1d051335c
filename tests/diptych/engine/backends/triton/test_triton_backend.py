"""Packed batches on a device equal the torch backend: families, mixes, memories, aborts.

The operators are their meanings here, so that what is tested is the planning; test_with_kernels.py has the
kernels themselves.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton import step_plan
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.supports import supports
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import LatentShape, ModelShape
from diptych.engine.weights import Weights
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.backends.triton.switched_shapes import SWITCHES
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-all-biases-tied": {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied_embeddings": True,
    },
    "qwen2": {"qkv_bias": True, "num_heads": 7, "num_kv_heads": 1},
    "qwen3": {"qk_norm": "head", "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "windows": {"windows": (None, 19)},
}


def backends(shape: ModelShape, weights: Weights) -> tuple[TorchBackend, TritonBackend]:
    return TorchBackend(shape, weights), TritonBackend(shape, weights, "cpu", REFERENCE_OPERATORS)


def batches(shape: ModelShape, dtype: torch.dtype) -> list[list[SequenceStep]]:
    """Several prompts, whole and in chunks; then decode rows beside chunks, over two memories."""
    one, two = Pool(layout_of(shape, 16, dtype), 30, seed=1), Pool(layout_of(shape, 16, dtype), 30, seed=2)
    a, b, c, d = one.sequence(64), two.sequence(64), one.sequence(64), two.sequence(64)
    return [
        [a.step(tokens_of(33, seed=1)), b.step(tokens_of(16, seed=2), False), c.step(tokens_of(1, seed=3))],
        [
            b.step(tokens_of(9, seed=4), trailing=3),
            c.step(tokens_of(1, seed=5)),
            d.step(tokens_of(20, seed=6), False),
            a.step(tokens_of(1, seed=7)),
        ],
        [
            d.step(tokens_of(1, seed=8)),
            a.step(tokens_of(5, seed=9), trailing=5),
            b.step(tokens_of(1, seed=10)),
        ],
        [b.step(tokens_of(1, seed=11)), d.step(tokens_of(1, seed=12))],
    ]


@pytest.mark.parametrize("name", [*SHAPES, *SWITCHES])
def test_mixed_batches_equal_the_torch_backend(name: str) -> None:
    shape = shape_of(**{**SHAPES, **SWITCHES}[name])
    assert supports(shape) is None
    expected, got = backends(shape, weights_of(shape, torch.float32))
    for theirs, ours in zip(batches(shape, torch.float32), batches(shape, torch.float32), strict=True):
        torch.testing.assert_close(got.forward(ours, None), expected.forward(theirs, None), atol=2e-5, rtol=0)
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(one.memory.data, other.memory.data, atol=2e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["two rotations", "no rotation", "caps", "scales", "gelu_tanh", "growing queries"]
)
def test_a_switch_that_is_off_changes_the_logits(name: str) -> None:
    """Were a switch without effect on these numbers, the test of it would show nothing."""
    shape, plain = shape_of(**SWITCHES[name]), shape_of()
    off = replace(shape, **{field: getattr(plain, field) for field in SWITCHES[name]})
    weights = weights_of(shape, torch.float32)
    on, other = (TorchBackend(one, weights) for one in (shape, off))
    one, two = batches(shape, torch.float32), batches(shape, torch.float32)
    assert (on.forward(one[0], None) - other.forward(two[0], None)).abs().max() > 1e-3


REFUSED: dict[str, dict[str, Any]] = {
    "LayerNorm": {"norm": "layer"},
    "the activation silu without a gate": {"gated": False},
    "the activation relu2 with a gate": {"activation": "relu2"},
    "parallel attention and feed-forward": {"parallel_residual": True},
    "attention over latents": {"latent": LatentShape(9, 6, 5), "num_kv_heads": 1},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_computed_is_said_in_words(words: str) -> None:
    assert supports(shape_of(**REFUSED[words])) == words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float32_as_the_torch_backend_is(dtype: torch.dtype) -> None:
    shape = shape_of(qk_norm="head")
    exact = TorchBackend(shape, weights_of(shape, torch.float32))
    expected, got = backends(shape, weights_of(shape, dtype))
    runs = zip(batches(shape, torch.float32), batches(shape, dtype), batches(shape, dtype), strict=True)
    for wide, theirs, ours in runs:
        truth = exact.forward(wide, None)
        error = (got.forward(ours, None) - truth).norm()
        assert error < 1.5 * (expected.forward(theirs, None) - truth).norm()


def test_a_row_comes_to_the_same_beside_others() -> None:
    shape = shape_of()
    _, backend = backends(shape, weights_of(shape, torch.float32))
    pool = Pool(layout_of(shape, 16, torch.float32), 20)
    alone = backend.forward([pool.sequence(40).step(tokens_of(30))], None)
    among = backend.forward(
        [pool.sequence(40).step(tokens_of(n, seed=n)) for n in (3, 40)]
        + [pool.sequence(40).step(tokens_of(30))],
        None,
    )
    torch.testing.assert_close(among[2], alone[0], atol=1e-5, rtol=0)


def test_contexts_are_gathered_no_more_at_once_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of chunks in their order; one that is longer than all the room goes alone."""
    shape = shape_of()
    _, backend = backends(shape, weights_of(shape, torch.float32))
    pool = Pool(layout_of(shape, 16, torch.float32), 60)
    sequences = [pool.sequence(100) for _ in range(5)]

    def steps() -> list[SequenceStep]:
        return [
            SequenceStep(s.memory, s.table, 0, tokens_of(n, seed=n), True)
            for s, n in zip(sequences, (20, 30, 90, 10, 25), strict=True)
        ]

    together = backend.forward(steps(), None)
    planned = step_plan.pack_step(steps(), None, torch.device("cpu")).step.tables[0].groups[0].chunks
    assert [(c.rows, c.context_tokens) for c in planned] == [(slice(0, 175), 175)]
    monkeypatch.setattr(step_plan, "GATHERED_TOKENS", 50)
    planned = step_plan.pack_step(steps(), None, torch.device("cpu")).step.tables[0].groups[0].chunks
    assert [c.context_tokens for c in planned] == [50, 90, 35]
    assert [c.rows for c in planned] == [slice(0, 50), slice(50, 140), slice(140, 175)]
    torch.testing.assert_close(backend.forward(steps(), None), together, atol=1e-6, rtol=0)


class _AbortAt(AbortWords):
    """Sets a word when the step has asked so many times."""

    def __init__(self, count: int, target: int, after: int) -> None:
        super().__init__(count)
        self._target, self._left = target, after

    def all_aborted(self) -> bool:
        if self._left == 0:
            self.abort(self._target)
        self._left -= 1
        return super().all_aborted()


def test_an_abort_takes_effect_at_the_next_layer_and_spares_the_others() -> None:
    shape = shape_of(num_layers=4)
    _, backend = backends(shape, weights_of(shape, torch.float32))
    memory = KVMemory(layout_of(shape, 16, torch.float32), 8)
    memory.data.fill_(9.0)
    steps = [
        SequenceStep(memory, [5], 0, tokens_of(16, seed=1), True),
        SequenceStep(memory, [2], 0, tokens_of(16, seed=2), True),
    ]
    alone = backend.forward([SequenceStep(memory, [7], 0, tokens_of(16, seed=2), True)], None)
    logits = backend.forward(steps, _AbortAt(2, 0, after=2))
    written = [bool((memory.data[5, layer] != 9.0).all()) for layer in range(4)]
    assert written == [True, True, False, False]
    assert (memory.data[5, 2:] == 9.0).all()
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1], alone[0], atol=1e-5, rtol=0)


def test_aborted_sequences_write_nothing_and_an_aborted_step_ends() -> None:
    shape = shape_of()
    _, backend = backends(shape, weights_of(shape, torch.float32))
    memory = KVMemory(layout_of(shape, 16, torch.float32), 4)
    memory.data.fill_(9.0)
    steps = [
        SequenceStep(memory, [3], 0, tokens_of(5), True),
        SequenceStep(memory, [1], 0, tokens_of(1), True),
    ]
    words = AbortWords(2)
    words.abort(1)
    assert backend.forward(steps, words).isnan().any(dim=1).tolist() == [False, True]
    assert (memory.data[[0, 1, 2]] == 9.0).all()
    words.abort(0)
    assert backend.forward(steps, words).isnan().all()


def test_a_missing_triton_is_named_with_the_extra_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from diptych.engine.backends.triton.operators import TritonUnavailable, triton_operators\n"
        "try:\n    triton_operators()\n"
        "except TritonUnavailable as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'diptych[gpu]'" in ran.stdout, ran.stderr
