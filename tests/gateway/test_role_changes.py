"""Role changes through real gateways, a real directory and scripted workers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from diptych.client.failure import read_failure
from diptych.runtime.discovery.role_lease import RoleLease
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from diptych.worker.v1 import work_pb2
from gateway.attempt.types import Role
from gateway.model.served_model import ServedModel
from tests.gateway import running_gateway
from tests.gateway.running_gateway import Stack, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker

DECODE = pb.WORKER_ROLE_DECODE


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_gateway, "DIGEST", uuid.uuid4().hex * 2)


def fleet(roles: str = "prefill,decode") -> list[ScriptedWorker]:
    """Three prefill workers and a decode worker, whose supervisors can start them in these roles."""
    workers = [ScriptedPrefill(), ScriptedPrefill(), ScriptedPrefill(), ScriptedDecode()]
    for worker in workers:
        worker.roles = roles
    return workers


@asynccontextmanager
async def admin_of(stack: Stack) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.admin_port}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def refusal(admin: Any, worker: ScriptedWorker, role: pb.WorkerRole = DECODE) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.ChangeWorkerRole(pb.ChangeWorkerRoleRequest(worker_id=worker.worker_id, role=role))
    failure = read_failure(refused.value)
    assert failure.reason == "ROLE_CHANGE_REFUSED"
    return str(failure)


async def linked(stack: Stack, count: int) -> None:
    await until(lambda: sum(w.accepts_work and w.reported for w in stack.core.worker_pool.registry) == count)


async def test_one_worker_changes_at_a_time_over_two_gateways(bundled: ServedModel, redis_url: str) -> None:
    workers = fleet()
    first, second, third, _ = workers
    async with (
        running(bundled, redis_url, *workers) as stack,
        running(bundled, redis_url) as beside,
        admin_of(stack) as admin,
        admin_of(beside) as other_admin,
    ):
        await linked(stack, 4)
        await linked(beside, 4)
        order = pb.ChangeWorkerRoleRequest(worker_id=first.worker_id, role=DECODE)
        order.grace.FromSeconds(3)
        assert (await admin.ChangeWorkerRole(order)).changed
        [drain] = await first.wait_for("drain")
        assert (drain.become, drain.grace.ToSeconds()) == (work_pb2.WORKER_ROLE_DECODE, 3)
        assert "one changes at a time" in await refusal(other_admin, second)

        await first.close()  # it has drained, and ended
        assert "one changes at a time" in await refusal(other_admin, second), "before it is back"
        successor = ScriptedDecode()
        successor.roles, successor.replaces = "prefill,decode", first.worker_id
        await successor.start(redis_url, running_gateway.DIGEST)
        await until(lambda: stack.core.roles.done[Role.DECODE] == 1)
        await linked(beside, 4)
        request = pb.ChangeWorkerRoleRequest(worker_id=second.worker_id, role=DECODE)
        assert (await other_admin.ChangeWorkerRole(request)).changed
        await second.wait_for("drain")
        assert "becomes a decode worker" in await detail_of(admin, second)
        assert third.drains is None
        await successor.close()


async def detail_of(admin: Any, worker: ScriptedWorker) -> str:
    """The state in words, once the worker's heartbeat says that it drains."""
    while True:
        listed = (await admin.ListWorkers(pb.ListWorkersRequest())).workers
        detail: str = next(w.detail for w in listed if w.worker_id == worker.worker_id)
        if "takes nothing new" in detail:
            return detail


async def test_rules_are_told_in_words(bundled: ServedModel, redis_url: str) -> None:
    workers = fleet()
    async with running(bundled, redis_url, *workers) as stack, admin_of(stack) as admin:
        await linked(stack, 4)
        *_, decode = workers
        assert "the last ready worker" in await refusal(admin, decode, pb.WORKER_ROLE_PREFILL)
        same = pb.ChangeWorkerRoleRequest(worker_id=decode.worker_id, role=DECODE)
        assert not (await admin.ChangeWorkerRole(same)).changed
        with pytest.raises(grpc.aio.AioRpcError, match="must be WORKER_ROLE_PREFILL or"):
            await admin.ChangeWorkerRole(pb.ChangeWorkerRoleRequest(worker_id=decode.worker_id))
        assert not any(worker.drains for worker in workers)


async def test_gateway_is_not_ready_while_every_worker_of_a_role_drains(
    bundled: ServedModel, redis_url: str
) -> None:
    first, second, decode = ScriptedPrefill(), ScriptedPrefill(), ScriptedDecode()
    async with running(bundled, redis_url, first, second, decode) as stack:
        await linked(stack, 3)
        first.drains = work_pb2.Drain()
        await linked(stack, 2)
        assert stack.gateway.ready
        second.drains = work_pb2.Drain()
        await stack.until_ready(False)
        assert stack.gateway.why_not_ready() == "every prefill worker that is linked drains"
        first.drains = None
        await stack.until_ready()


@pytest.mark.parametrize("asked", [True, False], ids=["auto-roles", "control"])
async def test_role_that_is_short_takes_a_worker_where_that_is_asked_for(
    bundled: ServedModel, redis_url: str, asked: bool
) -> None:
    prefill, *decodes = ScriptedPrefill(), ScriptedDecode(), ScriptedDecode(), ScriptedDecode()
    for worker in (prefill, *decodes):
        worker.roles = "prefill,decode"
    async with running(bundled, redis_url, prefill, *decodes, auto_roles=asked) as stack:
        stack.core.auto_roles._balancer._hold_s = 0.0
        await linked(stack, 4)
        assert not any(worker.drains for worker in decodes)
        prefill.busy_share, prefill.waiting_tokens = 1.0, 50_000
        await until(lambda: stack.core.auto_roles.wanted_count(Role.PREFILL) > 4)
        assert stack.core.auto_roles.wanted_count(Role.DECODE) == 1
        if asked:
            await until(lambda: any(worker.drains for worker in decodes))
        await asyncio.sleep(1.2)  # two looks more
        orders = [worker.drains for worker in decodes if worker.drains is not None]
        assert [order.become for order in orders] == [work_pb2.WORKER_ROLE_PREFILL] * asked


async def test_without_redis_no_worker_changes(bundled: ServedModel, redis_url: str) -> None:
    workers = fleet()
    async with running(bundled, redis_url, *workers) as stack, admin_of(stack) as admin:
        await linked(stack, 4)
        stack.core.roles._lease = RoleLease("redis://127.0.0.1:1/0", running_gateway.DIGEST)
        assert "the directory does not answer" in await refusal(admin, workers[0])
        assert workers[0].drains is None


async def test_worker_without_a_supervisor_keeps_its_role(bundled: ServedModel, redis_url: str) -> None:
    workers = fleet(roles="")
    async with running(bundled, redis_url, *workers) as stack, admin_of(stack) as admin:
        await linked(stack, 4)
        assert "no supervisor can start it in the other role" in await refusal(admin, workers[0])
        lease = RoleLease(redis_url, running_gateway.DIGEST)
        assert await lease.take(1) is not None, "a refused change holds the lease"
        await lease.close()
