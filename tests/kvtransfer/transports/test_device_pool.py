"""Pools in a GPU's memory: other processes can map them, whatever torch's allocator is set to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvtransfer.transports.pool_memory import expandable_segments

SETTINGS = "max_split_size_mb:512,expandable_segments:True"
EXPORT = """
import torch
from diptych.engine.kv.kv_memory import KVLayout
from kvtransfer.transports.cuda_driver import CudaError, export_memory
from kvtransfer.transports.pool_memory import allocate_device_pool
device = torch.device("cuda:0")
kept = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
pool = allocate_device_pool(KVLayout(4, 2, 64, 16, torch.bfloat16), 1000, device)
handle, offset = export_memory(device, pool.memory.address)
assert len(handle) == 64
later = torch.zeros(640 << 20, dtype=torch.uint8, device=device)
try:
    export_memory(device, later.data_ptr())
except CudaError:
    print("only the pool")
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}, SETTINGS),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: true"}, "expandable_segments: true"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": SETTINGS}, None),
        ({}, None),
    ],
)
def test_expandable_segments_are_found_in_either_variable(
    variables: dict[str, str], expected: str | None
) -> None:
    assert expandable_segments(variables) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_pool_has_an_ipc_handle_though_segments_are_expandable(variable: str) -> None:
    env = {**os.environ, variable: SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", EXPORT], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "only the pool\n"
    assert "expandable_segments" in done.stderr
