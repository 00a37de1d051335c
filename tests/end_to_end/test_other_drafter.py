"""A drafter that one role lacks, in real processes: the same tokens without drafts, and through kills."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest

from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc as admin
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.test_draft_model import LONG, _streamed
from tests.end_to_end.test_medusa import PROMPT

pytestmark = pytest.mark.timeout(900)


def _details(stack: Stack) -> set[str]:
    """Return what operators are told of the workers."""
    with grpc.insecure_channel(stack.admin_address) as channel:
        workers = admin.AdminServiceStub(channel).ListWorkers(pb.ListWorkersRequest(), timeout=10).workers
    return {f"{pb.WorkerRole.Name(worker.role)}: {worker.detail}" for worker in workers if worker.detail}


@pytest.mark.full  # tests/diptych/worker_process/test_other_drafter.py has both workers in one process
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_only_one_role_has_the_draft_model(transport: str, role: str, tmp_path: Path) -> None:
    """The model drafts for itself, where it can; then a stream goes on on another decode worker."""
    model = tiny_model.write(tmp_path / "tiny")
    flags = ("--model", str(model), "--dtype", "fp32", "--transport", transport, "--decode-workers", "2")
    flags += ("--set", "gateway.local-prefill=never")
    with running_stack(*flags) as plain:
        expected = asyncio.run(_streamed(plain, PROMPT, kill=False))
        further = asyncio.run(_streamed(plain, PROMPT + expected[:40], kill=False))
    with running_stack(*flags, "--set", f"{role}.speculative-model={model}") as stack:
        assert asyncio.run(_streamed(stack, PROMPT, kill=False)) == expected
        assert asyncio.run(_streamed(stack, PROMPT + expected[:40], kill=False)) == further
        moved = sum(stack.metric("decode", "diptych_kv_transfer_bytes_total", index) for index in range(2))
        assert (moved > 0) == (transport == "tcp")
        (told,) = _details(stack)
        assert re.fullmatch(
            f"WORKER_ROLE_{role.upper()}: no worker of the other role has its drafter [0-9a-f]{{12}}: "
            "it drafts without it",
            told,
        )
        assert asyncio.run(_streamed(stack, PROMPT, kill=True)) == expected
    assert len(expected) == LONG
