"""Linear operators: our kernels take at most sixteen rows of 16 bits; all ways come to the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.operators import Operator, Operators
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of

ROWS = [1, 2, 16, 17, 40]
COUNTED = ("skinny_linear", "skinny_swiglu", "swiglu")


def counting(calls: Counter[str]) -> Operators:
    """Return reference operators that count their calls."""

    def counted(name: str) -> Operator:
        operator: Operator = getattr(REFERENCE_OPERATORS, name)

        def call(*args: Any, **named: Any) -> torch.Tensor:
            calls[name] += 1
            return operator(*args, **named)

        return call

    return replace(REFERENCE_OPERATORS, **{name: counted(name) for name in COUNTED})


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_few_rows_take_other_products_than_many_and_come_to_the_same(
    dtype: torch.dtype, biased: bool
) -> None:
    shape = shape_of(
        hidden_size=104, intermediate_size=152, qkv_bias=biased, output_bias=biased, mlp_bias=biased
    )
    calls: Counter[str] = Counter()
    backend = TritonBackend(shape, weights_of(shape, dtype), "cpu", counting(calls))
    oracle = TorchBackend(shape, weights_of(shape, dtype))
    exact = TorchBackend(shape, weights_of(shape, torch.float32))
    for rows in ROWS:
        kinds = (dtype, dtype, torch.float32)
        ours, theirs, true = (Pool(layout_of(shape, 16, kind), 6).sequence(60) for kind in kinds)
        calls.clear()
        tokens = tokens_of(rows, seed=rows)
        got = backend.forward([ours.step(tokens)], None)
        expected = oracle.forward([theirs.step(tokens)], None)
        truth = exact.forward([true.step(tokens)], None)
        few, layers = dtype != torch.float32 and rows <= 16, shape.num_layers
        # Four products a layer, of which one is gated; one row of logits is few whatever the step has.
        assert calls["skinny_swiglu"] == (layers if few else 0)
        assert calls["swiglu"] == (0 if few else layers)
        assert calls["skinny_linear"] == (3 * layers if few else 0) + (dtype != torch.float32)
        if dtype == torch.float32:
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
        else:
            assert (got - truth).norm() < 1.5 * (expected - truth).norm()


def test_rows_that_do_not_begin_on_sixteen_bytes_go_to_the_library() -> None:
    shape = shape_of(hidden_size=100, intermediate_size=150)  # attention's output has 240 numbers
    calls: Counter[str] = Counter()
    backend = TritonBackend(shape, weights_of(shape, torch.bfloat16), "cpu", counting(calls))
    sequence = Pool(layout_of(shape, 16, torch.bfloat16), 3).sequence(20)
    assert bool(backend.forward([sequence.step(tokens_of(2))], None).isfinite().all())
    assert calls == {"skinny_linear": shape.num_layers, "swiglu": shape.num_layers}
