"""Failpoints damage what they name, and a damaged push never becomes a first token."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from kvtransfer.transports.failpoints import damage_blocks, damage_payload
from tests.kvtransfer.conftest import LAYOUT, fill, sampled, until


def memory() -> KVMemory:
    memory = KVMemory(LAYOUT, 4)
    for block in range(4):
        memory.data[block] = float(block + 1)
    return memory


def values(memory: KVMemory) -> list[float]:
    return [float(block.mean()) for block in memory.data]


def arm(monkeypatch: pytest.MonkeyPatch, armed: str) -> None:
    monkeypatch.setattr("kvtransfer.transports.failpoints.failpoint", lambda name: name == armed)


@pytest.mark.parametrize(
    ("armed", "expected"),
    [
        ("nothing", [1.0, 2.0, 3.0, 4.0]),
        ("handoff.swap_blocks", [1.0, 4.0, 3.0, 2.0]),
        ("handoff.drop_block", [1.0, 2.0, 3.0, 0.0]),
    ],
)
def test_damage_blocks_needs_an_armed_failpoint(monkeypatch, armed, expected):
    arm(monkeypatch, armed)
    damaged = memory()
    # The last block is reserved for growth: three hold tokens, the first and the third of them are swapped.
    damage_blocks(damaged, [3, 0, 1, 2], 2 * LAYOUT.block_size + 1)
    assert values(damaged) == expected


def test_damage_payload_flips_one_bit(monkeypatch):
    payload = memoryview(bytearray(64))
    assert damage_payload(payload) is payload
    arm(monkeypatch, "handoff.corrupt_push")
    assert sum(byte.bit_count() for byte in damage_payload(payload)) == 1
    assert not any(payload), "the worker's own block stays as it was"


async def test_corrupt_push_fails_the_attempt(make_pair, monkeypatch):
    arm(monkeypatch, "handoff.corrupt_push")
    pair = await make_pair("tcp")
    granted = await pair.grant("r", 10)
    fill(granted, 10, 1)
    await (await pair.peer()).commit(granted, 10, sampled(1), work_pb2.PhaseTimes())
    await until(lambda: bool(pair.decode.failed))
    await until(pair.decode.settled)
    assert pair.decode.failed[0][1] == work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
    assert pair.decode.ready == []
    assert torch.count_nonzero(pair.decode.memory.memory.data) == 0
