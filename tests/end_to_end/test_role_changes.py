"""Workers change their role under load, in both directions, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from diptych.client import AsyncClient
from diptych.client.failure import read_failure
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.faults.system import eventually

CLIENTS = 4
TOKENS = 60
CHANGE_S = 120.0
PREFILL, DECODE = pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE


def ready(admin: admin_pb2_grpc.AdminServiceStub, role: pb.WorkerRole) -> list[str]:
    """Ids of the ready workers of a role."""
    workers = admin.ListWorkers(pb.ListWorkersRequest()).workers
    return [w.worker_id for w in workers if w.role == role and w.state == pb.WORKER_STATE_READY]


def change(admin: admin_pb2_grpc.AdminServiceStub, role: pb.WorkerRole) -> str:
    """Let a ready worker of the other role become one of `role`, and wait until it is; return its name.

    It is the first one that is ready: on a busy machine this may be any.
    """
    other = DECODE if role == PREFILL else PREFILL
    ordered: list[str] = []

    def accepted() -> bool:
        """A busy machine's worker may not be ready yet; a lease is given back after its worker is."""
        worker_id = next(iter(ready(admin, other)), "")
        request = pb.ChangeWorkerRoleRequest(worker_id=worker_id, role=role)
        try:
            assert admin.ChangeWorkerRole(request).changed
        except grpc.RpcError as error:
            if read_failure(error).reason != "ROLE_CHANGE_REFUSED" and worker_id:
                raise
            return False
        ordered.append(worker_id)
        return True

    before = set(ready(admin, role))
    eventually(accepted, CHANGE_S, "the order is taken")
    eventually(
        lambda: set(ready(admin, role)) - before and ordered[0] not in ready(admin, other),
        CHANGE_S,
        "a worker is ready in its new role",
    )
    return ordered[0].rpartition("-")[0]


async def stream(client: AsyncClient, prompt: list[int]) -> list[int]:
    ids: list[int] = []
    async for chunk in client.stream(prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
        ids += chunk.token_ids
    return ids


async def changes_under_load(
    stack: Stack, prompts: list[list[int]], changes: int
) -> tuple[list[tuple[int, list[int]]], list[str]]:
    """Stream all the time while workers change their role.

    Returns:
        Each prompt's number and answer, and the names that the changed workers had.
    """
    over = asyncio.Event()
    answers: list[tuple[int, list[int]]] = []

    async def client(number: int) -> None:
        async with AsyncClient(stack.address) as one:
            turn = number
            while not over.is_set():
                turn = (turn + CLIENTS) % len(prompts)
                answers.append((turn, await stream(one, prompts[turn])))

    def change_all() -> list[str]:
        with grpc.insecure_channel(stack.admin_address) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            return [change(admin, PREFILL if number % 2 == 0 else DECODE) for number in range(changes)]

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        try:
            changed = await asyncio.to_thread(change_all)
            await asyncio.sleep(0.5)
        finally:
            over.set()
    return answers, changed


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """The oracle's answer, which no end of sequence ends."""
    model, ids = tiny_model.oracle(folder), list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def check(folder: Path, prompts: list[list[int]], answers: list[tuple[int, list[int]]]) -> None:
    """Every answer is whole and the oracle's."""
    right = [greedy(folder, prompt) for prompt in prompts]
    for number, ids in answers:
        assert ids == right[number]
    assert len({number for number, _ in answers}) == len(prompts)
    assert right[0] != right[1], "the check could not fail"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    folder = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    flags = ("--model", str(folder), "--model-name", "tiny", "--dtype", "fp32", "--kv-blocks", "256")
    with running_stack(*flags, "--decode-workers", "2", "--worker-shutdown-timeout", "1") as stack:
        yield stack, folder
        stack.wait_idle()


def test_no_client_notices_a_change_in_either_direction(tiny: tuple[Stack, Path]) -> None:
    stack, folder = tiny
    prompts = [tiny_model.prompt(seed, 20 + 9 * seed) for seed in range(8)]
    answers, (decode, prefill) = asyncio.run(changes_under_load(stack, prompts, changes=2))
    check(folder, prompts, answers)
    (prefill_stays,) = {"prefill-0", "prefill-1"} - {prefill}
    (decode_stays,) = {"decode-0", "decode-1"} - {decode}
    names = {role: [one["name"] for one in stack.account[role]] for role in ("prefill", "decode")}
    # The free name is that of the one that left, and processes are in the order of their start.
    assert names == {"prefill": [prefill_stays], "decode": [decode_stays, decode]}


def test_last_ready_worker_keeps_its_role(tiny: tuple[Stack, Path]) -> None:
    stack, _ = tiny
    with grpc.insecure_channel(stack.admin_address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        (only,) = ready(admin, PREFILL)
        with pytest.raises(grpc.RpcError) as refused:
            admin.ChangeWorkerRole(pb.ChangeWorkerRoleRequest(worker_id=only, role=DECODE))
        failure = read_failure(refused.value)
        assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "it is the last ready worker of its role" in str(failure)
        same = admin.ChangeWorkerRole(pb.ChangeWorkerRoleRequest(worker_id=only, role=PREFILL))
        assert not same.changed
        assert ready(admin, PREFILL) == [only]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_changes_and_a_kill(tiny: tuple[Stack, Path]) -> None:
    """`make test-full ARGS="tests/end_to_end/test_role_changes.py -s"` prints how many streams met them."""
    stack, folder = tiny
    prompts = [tiny_model.prompt(seed, 20 + 9 * seed) for seed in range(12)]
    began = time.monotonic()
    answers, _ = asyncio.run(changes_under_load(stack, prompts, changes=20))
    print(f"\n20 changes in {time.monotonic() - began:.0f} s: {len(answers)} streams, 0 errors")
    check(folder, prompts, answers)
    changed = next(one for one in stack.account["decode"] if one["restarts"])
    os.kill(changed["pid"], signal.SIGKILL)
    eventually(
        lambda: any(
            one["name"] == changed["name"] and one["pid"] not in (None, changed["pid"]) and "grpc_port" in one
            for one in stack.account["decode"]
        ),
        CHANGE_S,
        "the supervisor started it in its present role",
    )
