"""Ring slots and digests of a GPU, with the kernel in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.device_blocks import NOWHERE, DigestedCopy

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from kernels.gpu.launch import INTERPRETED

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=6, block_size=4, dtype=torch.bfloat16)
REF = GrantRef(("r", 1), 3, 17)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def memories(request: pytest.FixtureRequest) -> tuple[KVMemory, KVMemory]:
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was not set before Triton was imported")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or Triton is in its interpreter")
    source, target = (KVMemory.on_device(LAYOUT, 6, request.param) for _ in range(2))
    source.data.copy_(torch.randn(source.data.shape))
    return source, target


def digests(
    source: KVMemory, ids: list[int], target: KVMemory, places: list[int], ref: GrantRef, first: int
) -> list[bytes]:
    copy = DigestedCopy(source, ids, target, places, ref, first)
    copy.launch()
    if source.data.is_cuda:
        torch.cuda.synchronize()
    return copy.digests()


def test_digested_copy_binds_digests_to_index_and_grant(memories):
    source, target = memories
    there = digests(source, [4, NOWHERE, 2], target, [1, 0, 5], REF, 7)
    assert torch.equal(target.data[1], source.data[4])
    assert torch.equal(target.data[5], source.data[2])
    assert not bool(target.data[[0, 2, 3, 4]].any())
    assert [len(digest) for digest in there] == [16, 16, 16]
    assert [type(digest) for digest in there] == [bytes] * 3
    assert there[1] == bytes(16), "what is nowhere has none"
    # The other end reads what arrived, from other blocks, and finds the same.
    before = target.data.clone()
    assert digests(target, [1], target, [NOWHERE], REF, 7) == [there[0]]
    assert digests(target, [5], target, [NOWHERE], REF, 9) == [there[2]]
    assert torch.equal(target.data, before)
    for other, first in (
        (REF, 8),
        (REF._replace(generation=18), 7),
        (REF._replace(slot=4), 7),
    ):
        assert digests(target, [1], target, [NOWHERE], other, first) != [there[0]]
    target.data[1].view(-1)[5] += 1
    assert digests(target, [1], target, [NOWHERE], REF, 7) != [there[0]]
