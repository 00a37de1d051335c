"""The plan of a GPU's memory adds up, and is nothing on a CPU."""

from __future__ import annotations

import re

import pytest
import torch

from diptych.engine.backends.triton.activations import Activations, activation_bytes
from diptych.engine.device import CONTEXT_BYTES, pool_bytes
from diptych.engine.gpu_memory import GpuMemory
from tests.kernels.cpu.tiny_models import shape_of

GIB = 1 << 30


class Device:
    """Bytes that tensors take."""

    def __init__(self) -> None:
        self.taken = 0

    def reserved(self) -> int:
        return self.taken


def with_pool(utilization: float) -> tuple[GpuMemory, int]:
    """Take what a decode worker does, in its order; return the uses and the pool's bytes."""
    device = Device()
    memory = GpuMemory("cuda:0", 80 * GIB, device.reserved)
    for use, size in (("weights", 15 * GIB), ("prompt steps", GIB // 4), ("decode steps", GIB // 8)):
        device.taken += size
        memory.took(use)
    memory.plan_graphs(20)
    memory.plan("chunks of prompts", GIB // 2)
    pool = pool_bytes(
        total=80 * GIB, free=60 * GIB, used=device.taken + CONTEXT_BYTES, utilization=utilization,
        recordings=20, temporaries=GIB // 2,
    )  # fmt: skip
    device.taken += pool
    memory.took("KV pool")
    return memory, pool


def test_uses_add_up_to_the_share_of_the_gpu() -> None:
    memory, pool = with_pool(0.7)
    assert memory.uses["weights"] == 15 * GIB
    assert memory.uses["KV pool"] == pool > 30 * GIB
    assert sum(memory.uses.values()) == pytest.approx(0.7 * 80 * GIB, abs=2)
    line = memory.describe(0.7)
    assert line is not None
    each = re.search(r"in MiB: (.*); together (\d+) of (\d+)", line)
    assert each is not None
    parts = [int(number) for number in re.findall(r" (\d+)(?:,|$)", each[1])]
    assert sum(parts) == pytest.approx(int(each[2]), abs=len(parts))
    assert int(each[3]) == int(0.7 * 80 * 1024)
    assert "too many" not in line


def test_what_is_beyond_the_share_is_said() -> None:
    memory, _ = with_pool(0.7)
    assert "; 8192 too many" in (memory.describe(0.6) or "")
    assert "of 81920" in (memory.describe(None) or "")


def test_a_cpu_has_no_uses() -> None:
    memory = GpuMemory.of(torch.device("cpu"))
    memory.took("weights")
    memory.plan("chunks", 5)
    assert memory.uses == {}
    assert memory.describe(0.9) is None


@pytest.mark.parametrize("rotations", [1, 2])
def test_activation_bytes_are_those_of_the_buffers(rotations: int) -> None:
    shape = shape_of(num_heads=8, num_kv_heads=2, intermediate_size=160)
    shape = shape_of(
        num_heads=8, num_kv_heads=2, intermediate_size=160, rotations=shape.rotations * rotations
    )
    made = Activations.make(shape, 33, torch.bfloat16, torch.device("cpu"), lambda *_: None)
    tensors = [value for value in vars(made).values() if isinstance(value, torch.Tensor)]
    tensors += [half for pair in made.angles for half in pair]
    assert activation_bytes(shape, 33, torch.bfloat16) == sum(tensor.nbytes for tensor in tensors)
