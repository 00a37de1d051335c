"""The batch-invariant step: a token's logits have the same bits however it comes to be computed.

In Triton's interpreter; with the marker `gpu` on a GPU, where recorded steps are CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.backends.triton import batch_invariant
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape, UnsupportedModel
from diptych.engine.weights import Weights
from kernels.packed_matrix import from_blocks
from kernels.scaled_matrix import FP8, INT8, quantise
from tests.diptych.engine.backends.triton.switched_shapes import SWITCHES
from tests.kernels.cpu.tiny_models import (
    Pool,
    layout_of,
    random_blocks,
    shape_of,
    tokens_of,
    weights_of,
    with_matrices,
)

SIZES: dict[str, Any] = {
    "max_context": 256, "vocab_size": 37, "hidden_size": 32, "num_layers": 1, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 32, "intermediate_size": 64,
}  # fmt: skip
VOCAB, PROMPT, CHECKED, NEIGHBOURS = 37, 18, 3, 16


def rounded(dtype: torch.dtype) -> Callable[[Weights], Weights]:
    return lambda weights: with_matrices(weights, lambda _, matrix: quantise(matrix, dtype))


def four_bits(weights: Weights) -> Weights:
    """Return matrices in q4_0, as a GGUF file has them."""
    return with_matrices(
        weights, lambda number, matrix: from_blocks(random_blocks(*matrix.shape, "q4_0", seed=number))
    )


def mixed(weights: Weights) -> Weights:
    """Return 4-bit matrices beside full numbers in one product: keys and values stay as they are."""
    return with_matrices(
        weights,
        lambda number, matrix: (
            matrix
            if number % 10 in (1, 2)
            else from_blocks(random_blocks(*matrix.shape, "q4_0", seed=number))
        ),
    )


FORMS: dict[str, tuple[dict[str, Any], torch.dtype, Callable[[Weights], Weights]]] = {
    "bfloat16": ({"windows": (19,), "qk_norm": "head"}, torch.bfloat16, lambda weights: weights),
    "float32": ({}, torch.float32, lambda weights: weights),
    "FP8": ({}, torch.bfloat16, rounded(FP8)),
    "int8": ({}, torch.bfloat16, rounded(INT8)),
    "4 bits": ({}, torch.bfloat16, four_bits),
    "kinds in one product": ({}, torch.bfloat16, mixed),
    "experts": (
        SWITCHES["experts and one behind a switch"] | {"layers": SWITCHES["softmax experts"]["layers"][:1]},
        torch.bfloat16, lambda weights: weights,
    ),
    "experts in 4 bits": (
        {"experts": ExpertsShape(5, 2, 64, shared_size=32), "layers": (LayerShape(experts=True),)},
        torch.bfloat16, four_bits,
    ),
}  # fmt: skip
FEW = ("bfloat16", "FP8", "experts")
NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in FORMS]


def made(name: str, device: torch.device, **how: Any) -> tuple[ModelShape, TritonBackend, Pool]:
    """Return a model in one of FORMS, and a pool for its blocks."""
    changes, dtype, change = FORMS[name]
    shape = shape_of(**SIZES | changes)
    backend = TritonBackend(shape, change(weights_of(shape, dtype)), device, **how)
    pool = Pool(layout_of(shape, 16, dtype), 120)
    pool.memory = KVMemory.on_device(pool.layout, 120, device)
    return shape, backend, pool


def forms_of_a_token(backend: TritonBackend, pool: Pool) -> dict[str, torch.Tensor]:
    """Return logits of the CHECKED last of a sequence's tokens, by the way in which they were computed."""
    ids = tokens_of(PROMPT + CHECKED, VOCAB)
    neighbours = [pool.sequence(64) for _ in range(NEIGHBOURS)]

    def begun(count: int = PROMPT) -> Any:
        sequence = pool.sequence(64)
        backend.forward([sequence.step(ids[:count], False)], None)
        return sequence

    def beside(others: int) -> torch.Tensor:
        """Compute them one after the other, the last one beside decode rows of others."""
        sequence, rows = begun(), []
        for place, token in enumerate(ids[PROMPT:], 1):
            batch = [one.step([token]) for one in neighbours[:others]] if place == CHECKED else []
            rows.append(backend.forward([*batch, sequence.step([token])], None)[-1])
        return torch.stack(rows)

    cut = begun(7)
    return {
        "in a whole prompt": backend.forward([pool.sequence(64).step(ids, trailing=CHECKED)], None),
        "in a second chunk": backend.forward([cut.step(ids[7:], trailing=CHECKED)], None),
        "as checked drafts": backend.forward([begun().step(ids[PROMPT:], trailing=CHECKED)], None),
        "alone": beside(0),
        "beside one": beside(1),
        f"beside {NEIGHBOURS}": beside(NEIGHBOURS),
        "beside a chunk": backend.forward(
            [pool.sequence(64).step(tokens_of(19, VOCAB)), begun().step(ids[PROMPT:], trailing=CHECKED)], None
        )[1:],
    }  # fmt: skip


def alone(backend: TritonBackend, pool: Pool) -> torch.Tensor:
    """Return logits of the CHECKED last of a sequence's tokens, computed one by one."""
    ids, sequence = tokens_of(PROMPT + CHECKED, VOCAB), pool.sequence(64)
    backend.forward([sequence.step(ids[:PROMPT], False)], None)
    return torch.stack([backend.forward([sequence.step([token])], None)[0] for token in ids[PROMPT:]])


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_however_it_is_computed(name: str, device: torch.device) -> None:
    _, backend, pool = made(name, device, batch_invariant=True)
    found = forms_of_a_token(backend, pool)
    expected = found["alone"]
    assert not torch.equal(expected, expected.roll(1, 0))
    assert [form for form, logits in found.items() if not torch.equal(logits, expected)] == []


def test_the_default_step_depends_on_the_batch(device: torch.device) -> None:
    """The control: the same comparison without the mode finds forms that differ."""
    _, backend, pool = made("bfloat16", device)
    found = forms_of_a_token(backend, pool)
    assert not torch.equal(found["in a whole prompt"], found["alone"])
    assert torch.equal(found["beside one"], found["alone"]), "up to sixteen rows the default holds, too"


def test_recorded_steps_have_the_bits_of_eager_ones(device: torch.device) -> None:
    _, backend, pool = made("bfloat16", device, batch_invariant=True)
    expected = alone(backend, pool)
    _, recorded, pool = made("bfloat16", device, batch_invariant=True)
    assert recorded.record_prompts(pool.layout, 32, seconds=math.inf) > 0
    recorded.plan_decode(1, 16)
    recorded.prepare_decode(pool.memory)
    ids, sequence = tokens_of(PROMPT + CHECKED, VOCAB), pool.sequence(64)
    steps: list[SequenceStep] = [sequence.step(ids[:PROMPT], False)]
    assert recorded._prompts is not None
    assert recorded._prompts.accepts(steps)
    recorded.forward(steps, None)
    rows = [recorded.forward([sequence.step([token])], None)[0] for token in ids[PROMPT:]]
    assert torch.equal(torch.stack(rows), expected)


def test_trees_are_not_taken_and_unknown_products_are_refused_by_name(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, backend, _ = made("FP8", device, batch_invariant=True)
    assert "without its siblings" in (backend.lacks_trees() or "")
    assert made("float32", device)[1].lacks_trees() is None
    monkeypatch.setattr(batch_invariant, "_INVARIANT_PRODUCTS", ())
    with pytest.raises(UnsupportedModel, match="--batch-invariant: matrices of ScaledLinear"):
        made("FP8", device, batch_invariant=True)


def test_twins_keep_the_mode(device: torch.device) -> None:
    _, backend, pool = made("bfloat16", device, batch_invariant=True)
    expected, twin = alone(backend, pool), backend.twin()
    ids = tokens_of(PROMPT + CHECKED, VOCAB)
    assert torch.equal(twin.forward([pool.sequence(64).step(ids, trailing=CHECKED)], None), expected)
