"""An engine with keys and values in FP8: both backends say the same, near to what full numbers say."""

from __future__ import annotations

import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import ModelShape
from kernels.fp8_cache import DTYPE
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import Pool, Sequenced, layout_of, shape_of, tokens_of, weights_of

STEPS = (((21, 6), "two prompts"), ((1, 3), "a decode row beside a chunk"), ((1, 1), "decode rows"))


def scales_of(shape: ModelShape) -> torch.Tensor:
    """Another one for every head, and not powers of two."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(shape.num_layers, 2, shape.num_kv_heads, generator=generator) * 0.05 + 0.01


def sequences(pool: Pool) -> list[Sequenced]:
    return [pool.sequence(n) for n in (30, 20)]


def test_both_backends_agree_and_are_near_to_full_numbers() -> None:
    shape = shape_of(windows=(None, 19), qk_norm="head")
    weights, scales = weights_of(shape, torch.float32), scales_of(shape)
    full = TorchBackend(shape, weights)
    meaning = TorchBackend(shape, weights, scales)
    packed = TritonBackend(shape, weights, "cpu", REFERENCE_OPERATORS, scales)
    pools = [Pool(layout_of(shape, 16, dtype), 9, seed=1) for dtype in (torch.float32, DTYPE, DTYPE)]
    packed.plan_decode(2, 16)
    packed.prepare_decode(pools[2].memory)
    rows = [sequences(pool) for pool in pools]
    for counts, what in STEPS:
        tokens = [tokens_of(count, seed=count) for count in counts]
        exact, expected, got = (
            backend.forward([one.step(ids) for one, ids in zip(steps, tokens, strict=True)], None)
            for backend, steps in zip((full, meaning, packed), rows, strict=True)
        )
        torch.testing.assert_close(
            got, expected, atol=0.1, rtol=0.0, msg=lambda text, what=what: f"{what}: {text}"
        )
        error = float((expected - exact).norm() / exact.norm())
        assert 1e-3 < error < 0.1, what
    kept = [pool.memory.data.view(torch.uint8) for pool in pools[1:]]
    assert (
        kept[0] == kept[1]
    ).float().mean() > 0.999  # a sum in another order rounds a few numbers elsewhere


def test_blocks_take_half_the_bytes_of_bf16() -> None:
    shape = shape_of()
    wide, narrow = layout_of(shape, 16, torch.bfloat16), layout_of(shape, 16, DTYPE)
    assert narrow.bytes_per_block * 2 == wide.bytes_per_block
    memory = KVMemory(narrow, 3)
    assert memory.nbytes == 3 * narrow.bytes_per_block
    memory.data.view(torch.uint8)[1] = 7
    memory.copy_block(1, 2)
    assert bytes(memory.block_bytes(2)) == b"\7" * narrow.bytes_per_block
