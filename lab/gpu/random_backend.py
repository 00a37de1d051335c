"""A backend with random weights of a real model's shapes, its decode steps recorded, and room for keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape
from lab.gpu.model_step import tiny
from lab.gpu.random_model import random_weights
from lab.gpu.section import Context, device_of

BLOCK = 16


@dataclass(frozen=True)
class RandomBackend:
    """Backend and its memory: for `rows` sequences of `context` tokens and some more."""

    backend: TritonBackend
    shape: ModelShape
    memory: KVMemory
    """The one that decode steps are recorded over."""
    context: int
    blocks: int
    """Blocks of a sequence."""

    def table(self, row: int) -> range:
        """Return the blocks of a row."""
        return range(row * self.blocks, (row + 1) * self.blocks)


def random_backend(
    context: Context, shape: ModelShape, rows: int, *, batch_invariant: bool = False
) -> RandomBackend:
    """Return the backend of a run: of `shape` in bf16; tiny and on the CPU if it is a dry one."""
    device = device_of(context)
    shape = tiny(shape) if context.dry else shape
    length = context.pick(2048, 2048, 20)
    backend = TritonBackend(
        shape, random_weights(shape, device, torch.bfloat16), device,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.empty_cache()
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK, torch.bfloat16)
    blocks = layout.blocks_for(length + 32)
    memory = KVMemory.on_device(layout, rows * blocks, device)
    memory.data.normal_()
    backend.plan_decode(rows, BLOCK)
    backend.prepare_decode(memory)
    return RandomBackend(backend, shape, memory, length, blocks)
