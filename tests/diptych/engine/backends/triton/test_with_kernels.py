"""Whole steps with the kernels themselves equal the torch backend; on a GPU with CUDA graphs, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.linear import FEW_ROWS
from diptych.engine.backends.triton.operators import Operator
from diptych.engine.backends.triton.prefill_attention import VARIABLE
from diptych.engine.batch import Launched, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from kernels.fp8_attention import fp8_attention
from kernels.gpu.fp8_prefill import fp8_prefill, lacks_fp8
from kernels.gpu.skinny_linear import MOST_ROWS
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.backends.triton.switched_shapes import SWITCHES
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"windows": (None, 19), "num_heads": 4, "num_kv_heads": 2},
    "qwen2": {"qkv_bias": True, "num_heads": 7, "num_kv_heads": 1, "head_dim": 64},
    "qwen3": {"qk_norm": "head", "num_heads": 9, "num_kv_heads": 3, "head_dim": 80},
}
SHAPES |= SWITCHES
FEW = ("clamped experts", "grouped experts after a dense layer")
"""Switches that are tried in every run; each of the rest is in one of the kernels' own tests."""
CASES = [
    *((name, torch.float32) for name in FEW),
    *(
        pytest.param(name, torch.bfloat16 if name in FEW else torch.float32, marks=pytest.mark.full)
        for name in SWITCHES
    ),
    ("qwen2", torch.bfloat16),
    *(
        pytest.param(name, dtype, marks=pytest.mark.full)
        for name, dtype in (
            ("llama", torch.float32),
            ("llama", torch.float16),
            ("qwen2", torch.float32),
            ("qwen3", torch.float32),
            ("qwen3", torch.bfloat16),
        )
    ),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_steps_equal_the_torch_backend(name: str, dtype: torch.dtype, device: torch.device) -> None:
    compare(name, dtype, None, device)


def test_products_of_few_rows_are_of_no_more_than_their_kernel_takes() -> None:
    assert FEW_ROWS == MOST_ROWS


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.full)])
def test_steps_with_an_fp8_cache_equal_the_torch_backend(name: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(2, 2, SHAPES[name]["num_kv_heads"], generator=generator) * 0.05 + 0.01
    compare(name, torch.float32, scales, device)


def test_steps_with_products_of_fp8_equal_their_meaning(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := lacks_fp8(device, 64)) is not None:
        pytest.skip(why)
    monkeypatch.setenv(VARIABLE, "fp8")
    calls: list[int] = []

    def counted(*args: Any, **rule: Any) -> torch.Tensor:
        calls.append(rule["max_tokens"])
        return fp8_prefill(*args, **rule)

    monkeypatch.setattr("kernels.gpu.fp8_prefill.fp8_prefill", counted)
    compare("qwen2", torch.float32, torch.full((2, 2, 1), 0.03), device, _fp8_meaning)
    assert 21 in calls


def _fp8_meaning(
    query: torch.Tensor, blocks: torch.Tensor, layer: int, tables: torch.Tensor, starts: torch.Tensor,
    offsets: torch.Tensor, *, window: int | None, scales: torch.Tensor, out: torch.Tensor, **rule: Any,
) -> torch.Tensor:  # fmt: skip
    kept = {name: rule[name] for name in ("scale", "cap", "sinks")}
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        out[begin:end] = fp8_attention(
            query[begin:end], blocks, layer, tables[row].long(), int(starts[row]), window, scales, tile=128,
            **kept,
        )  # fmt: skip
    return out


def compare(
    name: str,
    dtype: torch.dtype,
    scales: torch.Tensor | None,
    device: torch.device,
    prefill: Operator | None = None,
) -> None:
    """Packed prompts, then a decode row beside a chunk, then recorded decode steps; with `prefill` it is the
    attention of the reference's prompts.
    """
    shape = shape_of(max_context=256, vocab_size=67, intermediate_size=90, hidden_size=64, **SHAPES[name])
    weights, kept = weights_of(shape, dtype), dtype if scales is None else torch.float8_e4m3fn
    oracle: TorchBackend | TritonBackend = TorchBackend(shape, weights, scales)
    if prefill is not None:
        operators = replace(REFERENCE_OPERATORS, paged_prefill=prefill)
        oracle = TritonBackend(shape, weights, "cpu", operators, scales)
    backend = TritonBackend(shape, weights, device, kv_scales=scales)
    theirs, ours = (Pool(layout_of(shape, 16, kept), 9, seed=1) for _ in range(2))
    ours.memory = KVMemory.on_device(ours.layout, 9, device)
    backend.plan_decode(1 if device.type == "cpu" else 2, 16)
    backend.prepare_decode(ours.memory)
    pairs = [(theirs.sequence(n), ours.sequence(n)) for n in (30, 20)]
    tolerance = {"atol": 2e-4, "rtol": 0.0} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.1}
    if scales is not None:  # one last bit more or less becomes a step of E4M3 here and there
        tolerance = {"atol": 0.1, "rtol": 0.0}
    for chunks in ((21, 6), (1, 3), (1, 1)):
        tokens = [tokens_of(count, vocab_size=67, seed=count) for count in chunks]
        expected = oracle.forward([t.step(ids) for (t, _), ids in zip(pairs, tokens, strict=True)], None)
        got = backend.forward([o.step(ids) for (_, o), ids in zip(pairs, tokens, strict=True)], None)
        torch.testing.assert_close(got, expected, **tolerance)
    assert len(backend.forward([pairs[0][1].step([1])], None)) == 1


@pytest.mark.gpu
def test_graphs_launched_ahead_sample_what_single_steps_do() -> None:
    """While a step is computed the next one is laid out: nothing of it reaches the one before."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = shape_of(max_context=2048, head_dim=64, num_heads=8, num_kv_heads=2, hidden_size=512)
    device, rows, steps = torch.device("cuda:0"), 12, 60
    memory = KVMemory.on_device(layout_of(shape, 16, torch.bfloat16), 800, device)
    backend = TritonBackend(shape, weights_of(shape, torch.bfloat16), device)
    backend.plan_decode(rows, 16)
    backend.prepare_decode(memory)
    pool = Pool(memory.layout, 800)
    tables = [pool.table(20 + 9 * row + steps) for row in range(rows)]

    def run(ahead: bool) -> list[list[int]]:
        out = [[row + 1] for row in range(rows)]
        waiting: list[tuple[list[int], Launched]] = []
        for number in range(steps):
            members = [row for row in range(rows) if (row + number) % 5]  # who sits out changes every step
            before = waiting[-1][0] if ahead and waiting else []
            batch, draws = [], []
            for row in members:
                follows = before.index(row) if row in before else None
                start = 20 + 9 * row + len(out[row]) - 1 + int(follows is not None)
                batch.append(SequenceStep(memory, tables[row], start, out[row][-1:], True, follows=follows))
                draws.append(SampleRow(SamplingParams(temperature=0.9, seed=row), (), out[row]))
            launched = backend.launch(batch, draws, None)
            assert launched is not None
            waiting.append((members, launched))
            while len(waiting) > int(ahead):
                who, step = waiting.pop(0)
                for row, token in zip(who, step.collect().tokens, strict=True):
                    assert isinstance(token, Sampled)
                    out[row].append(token.token_id)
        for who, step in waiting:
            for row, token in zip(who, step.collect().tokens, strict=True):
                assert isinstance(token, Sampled)
                out[row].append(token.token_id)
        return out

    prompts = [
        SequenceStep(memory, tables[row], 0, tokens_of(20 + 9 * row, seed=row), False) for row in range(rows)
    ]
    backend.forward(prompts, None)
    assert run(ahead=True) == run(ahead=False)


@pytest.mark.gpu
def test_replayed_graphs_give_the_bits_of_eager_steps() -> None:
    """Every bucket is tried, with padding; a graph has the eager step's own launches."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from diptych.engine.backends.triton.cuda_graph import EagerCapture

    shape = shape_of(max_context=2048, head_dim=64, num_heads=8, num_kv_heads=2, hidden_size=512)
    weights = weights_of(shape, torch.bfloat16)
    device = torch.device("cuda:0")
    memory = KVMemory.on_device(layout_of(shape, 16, torch.bfloat16), 800, device)
    replayed, plain = TritonBackend(shape, weights, device), TritonBackend(shape, weights, device)
    replayed.plan_decode(20, 16)
    replayed.prepare_decode(memory)
    plain.plan_decode(20, 16, EagerCapture())
    plain.prepare_decode(memory)
    pool = Pool(memory.layout, 800)
    pool.memory = memory
    sequences = [pool.sequence(600) for _ in range(20)]
    plain.forward([s.step(tokens_of(17 * (i + 1), seed=i), False) for i, s in enumerate(sequences)], None)
    for count in (20, 17, 16, 9, 8, 5, 4, 3, 2, 1):
        steps = [s.step(tokens_of(1, seed=count)) for s in sequences[:count]]
        assert torch.equal(replayed.forward(steps, None), plain.forward(steps, None))
