"""The reference backend on another device: nothing of a step stays behind on the CPU.

The device is torch's "meta", whose tensors have no numbers; operators refuse tensors of two devices as those
of a GPU do. The numbers are those of the CPU, which tests/diptych/engine/models compare.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.kv.kv_memory import KVMemory
from tests.diptych.worker_process.test_model_families import GROUPS
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, weights_of


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_stays_on_the_device(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(shape_of(num_heads=2, num_kv_heads=1, head_dim=8), **GROUPS[name])
    backend = TorchBackend(shape, weights_of(shape, dtype), device="meta")
    pool = Pool(layout_of(shape, 4, dtype), 20)
    monkeypatch.setattr(pool, "memory", on_meta(pool.memory))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    first, second = pool.sequence(12), pool.sequence(12)
    chunks = backend.forward([first.step([1, 2, 3, 4, 5]), second.step([6])], None)
    assert (chunks.device.type, tuple(chunks.shape)) == ("meta", (2, shape.vocab_size))
    decodes = backend.forward([second.step([7]), first.step([8])], None)
    assert tuple(decodes.shape) == (2, shape.vocab_size)


def on_meta(memory: KVMemory) -> Any:
    """Return the memory with its blocks on "meta"."""
    memory.data = memory.data.to("meta")
    return memory


@pytest.mark.parametrize("maker", ["arange", "tensor"])
def test_tensor_made_on_the_cpu_is_refused(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one maker of tensors that takes no device any more."""
    shape = replace(shape_of(num_heads=2, num_kv_heads=1, head_dim=8), **GROUPS["LayerNorm, parallel"])
    backend = TorchBackend(shape, weights_of(shape, torch.float32), device="meta")
    pool = Pool(layout_of(shape, 4, torch.float32), 20)
    monkeypatch.setattr(pool, "memory", on_meta(pool.memory))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    made = getattr(torch, maker)
    monkeypatch.setattr(torch, maker, lambda *given, device=None, **more: made(*given, **more))
    with pytest.raises(RuntimeError, match="device"):
        backend.forward([pool.sequence(12).step([1, 2, 3]), pool.sequence(12).step([4])], None)
