"""Layers with a window in blocks of their own, in the step on a GPU: eager and recorded, with a cache in FP8.

The logits are those of one block for all layers; what is given up is NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import AbortWords, SequenceStep, window_cuts
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_groups import WindowGroups, window_groups
from diptych.engine.models.shape import ModelShape
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.test_window_blocks import ALL, GEMMA, PADDED, PAIRS, SIZE, TOKENS, Windowed, run
from tests.kernels.cpu.tiny_models import layout_of, shape_of, tokens_of, weights_of

SMALL: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "intermediate_size": 48, "max_context": 128,
}  # fmt: skip
EVERY = pytest.mark.parametrize("windows", [GEMMA, PAIRS, PADDED, ALL])


def meant(shape: ModelShape, scales: torch.Tensor | None = None) -> TritonBackend:
    """Return the step with the kernels' meanings."""
    weights = weights_of(shape, torch.float32)
    return TritonBackend(shape, weights, "cpu", REFERENCE_OPERATORS, kv_scales=scales)


def compare(plain: torch.Tensor, own: torch.Tensor, atol: float = 2e-5) -> None:
    assert torch.isfinite(plain).all()
    torch.testing.assert_close(own, plain, atol=atol, rtol=0)


@EVERY
@pytest.mark.parametrize("chunk", [5, 61])
def test_eager_steps_equal_those_of_one_block_for_all_layers(
    windows: tuple[int | None, ...], chunk: int
) -> None:
    shape = shape_of(windows=windows)
    compare(*run(meant(shape), shape, torch.float32, chunk))


@EVERY
def test_recorded_decode_steps_equal_them_too(windows: tuple[int | None, ...]) -> None:
    shape = shape_of(windows=windows, max_context=128)
    backend = meant(shape)
    backend.plan_decode(3, SIZE, windows=window_groups(shape.windows))
    plain, own = run(backend, shape, torch.float32, 16, backend.prepare_decode)
    compare(plain, own)


def test_a_recording_of_other_layers_is_refused() -> None:
    shape = shape_of(windows=GEMMA)
    backend = meant(shape)
    backend.plan_decode(3, SIZE)
    with pytest.raises(ValueError, match="blocks of another layout"):
        backend.prepare_decode(Windowed(shape, torch.float32, 16).memory)


@pytest.mark.parametrize("recorded", [True, False])
def test_scales_of_fp8_are_those_of_the_layer(recorded: bool) -> None:
    shape = shape_of(windows=PADDED, max_context=128)
    scales = torch.rand(len(PADDED), 2, shape.num_kv_heads, generator=torch.Generator().manual_seed(2))
    backend = meant(shape, scales * 0.05 + 0.01)
    if recorded:
        backend.plan_decode(2, SIZE, windows=window_groups(shape.windows))
    prepare = backend.prepare_decode if recorded else lambda memory: None
    compare(*run(backend, shape, torch.float8_e4m3fn, 16, prepare))


def test_windowed_layers_that_read_the_full_table_give_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: were tables not told apart, the logits would show it."""
    monkeypatch.setattr(
        "diptych.engine.backends.triton.packed_step.PackedStep.seen_by",
        lambda self, layer: (self.tables[0], self.places[layer][1] if self.places else layer),
    )
    shape = shape_of(windows=GEMMA)
    plain, own = run(meant(shape), shape, torch.float32, 16)
    assert not torch.allclose(own, plain, atol=1e-3)


def test_an_aborted_sequence_writes_to_no_table() -> None:
    shape = shape_of(windows=GEMMA)
    lost, kept = (Windowed(shape, torch.float32, 16) for _ in range(2))
    words = AbortWords(2)
    words.abort(0)
    logits = meant(shape).forward([one.chunk(0, tokens_of(9)) for one in (lost, kept)], words)
    assert logits.isnan().any(dim=1).tolist() == [True, False]
    assert lost.memory.data.isnan().all()


def test_a_step_is_cut_where_its_first_token_begins_to_read() -> None:
    """Blocks before that place, which a caller may have in its tables, are not looked at."""
    shape = shape_of(windows=PAIRS)
    windowed = Windowed(shape, torch.float32, 16)
    early = windowed.chunk(8, [1])
    late = windowed.chunk(24, [1])
    wide = replace(late, window_first=0, window_tables=[[89] * 2 + list(t) for t in late.window_tables])
    assert late.window_first == 2
    cuts = [[(cut.start, list(cut.block_table)) for (cut,) in window_cuts([one])] for one in (wide, late)]
    assert cuts[0] == cuts[1]
    assert [cut.start for (cut,) in window_cuts([early])] == [8] * windowed.groups.tables


# ---- the kernels themselves: in Triton's interpreter, or on a GPU ------------------------------------------


def kernels(shape: ModelShape, device: torch.device) -> TritonBackend:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    return TritonBackend(shape, weights_of(shape, torch.float32), device)


def test_kernels_read_and_write_by_tables_of_layers(device: torch.device) -> None:
    """Recorded prompts of one sequence, then recorded decode steps."""
    shape = shape_of(**SMALL, windows=(None, 9, 9))
    backend, groups = kernels(shape, device), window_groups(shape.windows)
    assert isinstance(groups, WindowGroups)
    layout = replace(layout_of(shape, SIZE, torch.float32), windows=groups)
    assert backend.record_prompts(layout, 16, seconds=math.inf) > 0
    backend.plan_decode(1, SIZE, windows=groups)
    replayed: list[bool] = []

    def prepare(memory: KVMemory) -> None:
        backend.prepare_decode(memory)
        assert backend._prompts is not None
        replayed.append(backend._prompts.accepts([SequenceStep(memory, [0], 0, [1, 2], True)]))

    compare(*run(backend, shape, torch.float32, 16, prepare, device, (29, 5)), atol=2e-4)
    assert replayed == [True]


@pytest.mark.gpu
@EVERY
def test_steps_on_a_card_equal_those_of_one_block_for_all_layers(windows: tuple[int | None, ...]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape, device = shape_of(windows=windows, head_dim=64, max_context=128), torch.device("cuda:0")
    backend, groups = kernels(shape, device), window_groups(shape.windows)
    assert isinstance(groups, WindowGroups)
    backend.record_prompts(replace(layout_of(shape, SIZE, torch.float32), windows=groups), 64)
    backend.plan_decode(4, SIZE, windows=groups)
    for chunk in (5, TOKENS):
        compare(*run(backend, shape, torch.float32, chunk, backend.prepare_decode, device), atol=2e-3)
