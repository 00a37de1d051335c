"""Which transport a hello gets, and what a writer is told that gets none."""

from __future__ import annotations

import pytest

from diptych.worker.v1 import handoff_pb2
from kvtransfer.drivers.handshake import Handshake
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import ReceiverHooks, host_id
from kvtransfer.transports.pool_memory import allocate_pool
from kvtransfer.transports.registry import make_receiver
from tests.kvtransfer.conftest import FINGERPRINT, LAYOUT

HERE = host_id()
HOOKS = ReceiverHooks(*[lambda *arguments: None] * 5)


def answer(ours: list[str], theirs: list[str], host: str = HERE, device: str = "") -> str:
    pool = allocate_pool(LAYOUT, 2)
    made = [make_receiver(name, pool, "127.0.0.1", HOOKS) for name in ours]
    hello = handoff_pb2.HandoffHello(
        fingerprint=FINGERPRINT.to_proto(), transports=theirs, host_id=host, device=device
    )
    found = Handshake(WriterId("decode", 1), FINGERPRINT, 2, made).choose_transport(hello)
    return found if isinstance(found, str) else f"-> {found.name}"


@pytest.mark.parametrize(
    ("theirs", "host", "device", "said"),
    [
        (["shared_memory", "tcp"], HERE, "", "-> shared_memory"),
        (["tcp", "shared_memory"], HERE, "", "-> tcp"),
        (["shared_memory", "tcp"], "elsewhere", "", "-> tcp"),
        (["cuda_shared", "cuda_ipc", "tcp"], HERE, "GPU-1", "-> tcp"),
        (["shared_memory"], "elsewhere", "", "transports (shared_memory: on another host)"),
        (["gloo", "nccl"], HERE, "", "transports (none in common)"),
        ([], HERE, "", "transports (none in common)"),
    ],
)
def test_the_first_of_the_writers_transports_that_serves_both(theirs, host, device, said):
    assert answer(["shared_memory", "tcp"], theirs, host, device) == said


def test_all_that_stands_in_the_way_is_named():
    said = answer(["shared_memory", "nccl"], ["nccl", "shared_memory"], "elsewhere")
    assert said == "transports (nccl: its blocks must be on a GPU; shared_memory: on another host)"
