"""Operators at the admin port of a real system. Of several workers test_many_workers.py makes more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from diptych.client import Client
from diptych.client.failure import read_failure
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end.reference import MODEL
from tests.end_to_end.stack import Stack
from tests.faults.system import eventually

Code = grpc.StatusCode
PREFIX = "Once upon a time there was a river that ran uphill, and nobody could say why it did. " * 4


@pytest.fixture(scope="module")
def stack(bundled: Stack) -> Stack:
    return bundled


@pytest.fixture
def admin(stack: Stack) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    with grpc.insecure_channel(stack.admin_address) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def test_it_says_what_it_is(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    def ask() -> pb.GetServerInfoResponse:
        return admin.GetServerInfo(pb.GetServerInfoRequest())

    # A starved Redis is given up for a moment and asked again.
    eventually(lambda: ask().directory_connected, 60, "Redis is linked")
    info = ask()
    assert info.ready
    assert not info.draining
    assert info.model == MODEL
    assert info.kv_block_size == 16
    assert info.start_time.ToNanoseconds() <= time.time_ns()


def test_a_piped_list_has_the_whole_ids_that_drain_and_flush_ask_for(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diptych", "workers", "--address", stack.admin_address],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    rows = {words[0]: words for words in map(str.split, done.stdout.splitlines()) if words}
    for one in (*stack.account["prefill"], *stack.account["decode"]):
        assert one["worker_id"].startswith(f"{one['name']}-")
        assert rows[one["worker_id"]][1] == one["name"].partition("-")[0]


def test_it_tells_the_load_again_and_again(admin: admin_pb2_grpc.AdminServiceStub, stack: Stack) -> None:
    request = pb.WatchLoadRequest()
    request.interval.FromMilliseconds(100)
    with Client(stack.address) as client:
        stream = client.stream(PREFIX, max_tokens=200, ignore_eos=True)
        next(stream)
        watch = admin.WatchLoad(request)
        seen = [next(watch) for _ in range(3)]
        watch.cancel()
        stream.close()
    assert [message.running for message in seen] == [1, 1, 1]
    assert [message.phases.decode for message in seen] == [1, 1, 1]
    (tenant,) = seen[-1].tenants
    assert (tenant.tenant, tenant.phases.decode) == ("", 1)
    counts = [message.generated_tokens for message in seen]
    assert counts == sorted(counts)
    assert counts[0] >= 1


def test_top_prints_one_sample_for_people_and_for_programs(stack: Stack) -> None:
    command = [sys.executable, "-m", "diptych", "top", "--once", "--interval", "0.2", "--address"]
    command.append(stack.admin_address)
    with Client(stack.address) as client:
        stream = client.stream(PREFIX, max_tokens=2000, ignore_eos=True)
        next(stream)
        screen = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        found = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60)
        stream.close()
    assert "1 running  0 waiting" in screen
    for one in (*stack.account["prefill"], *stack.account["decode"]):
        assert one["worker_id"] in screen
    sample = json.loads(found.stdout)
    assert sample["phases"]["decode"] == 1
    assert sample["generated_tokens_per_s"] > 0


def test_a_flush_makes_the_next_prompt_cold(admin: admin_pb2_grpc.AdminServiceStub, stack: Stack) -> None:
    with Client(stack.address) as client:
        client.generate(PREFIX, max_tokens=1)
        assert client.generate(PREFIX, max_tokens=1).usage.cached_prompt_tokens > 0
        assert admin.FlushPrefixCache(pb.FlushPrefixCacheRequest()).blocks > 0
        assert client.generate(PREFIX, max_tokens=1).usage.cached_prompt_tokens == 0


def test_a_flush_reaches_the_copies_that_prefill_workers_push_from(bundled_tcp: Stack) -> None:
    """Whoever flushes because something is wrong with what is cached wants none of it used again."""
    decode_id = bundled_tcp.account["decode"][0]["worker_id"]
    with (
        grpc.insecure_channel(bundled_tcp.admin_address) as channel,
        Client(bundled_tcp.address) as client,
    ):
        admin = admin_pb2_grpc.AdminServiceStub(channel)

        def cached() -> int:
            return client.generate(PREFIX, max_tokens=1).usage.cached_prompt_tokens

        cached()
        assert admin.FlushPrefixCache(pb.FlushPrefixCacheRequest(worker_id=decode_id)).blocks > 0
        assert cached() > 0, "the prefill worker should have had a copy: this test shows nothing"
        assert admin.FlushPrefixCache(pb.FlushPrefixCacheRequest()).blocks > 0
        assert cached() == 0


@pytest.mark.parametrize(
    ("rpc", "request_", "code", "reason", "field"),
    [
        ("DrainWorker", pb.DrainWorkerRequest(), Code.INVALID_ARGUMENT, "INVALID_PARAMETER", "worker_id"),
        ("DrainWorker", pb.DrainWorkerRequest(worker_id="x"), Code.NOT_FOUND, "UNKNOWN_WORKER", None),
        (
            "FlushPrefixCache",
            pb.FlushPrefixCacheRequest(worker_id="x"),
            Code.NOT_FOUND,
            "UNKNOWN_WORKER",
            None,
        ),
    ],
)
def test_what_is_wrong_is_named(
    admin: admin_pb2_grpc.AdminServiceStub,
    rpc: str,
    request_: object,
    code: Code,
    reason: str,
    field: str | None,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(admin, rpc)(request_)
    failure = read_failure(caught.value)
    assert (failure.code, failure.reason) == (code, reason)
    assert field is None or set(failure.violations) == {field}


@pytest.mark.parametrize("seconds", [0.05, 4000.0, -1.0])
def test_an_interval_out_of_bounds_is_refused(admin: admin_pb2_grpc.AdminServiceStub, seconds: float) -> None:
    request = pb.WatchLoadRequest()
    request.interval.FromNanoseconds(int(seconds * 1e9))
    with pytest.raises(grpc.RpcError) as caught:
        next(admin.WatchLoad(request))
    assert read_failure(caught.value).violations.keys() == {"interval"}


def test_health_and_reflection_are_those_of_the_port(stack: Stack) -> None:
    for address, service in (
        (stack.address, "diptych.v1.InferenceService"),
        (stack.admin_address, "diptych.v1.AdminService"),
    ):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", service):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as caught:
                health.Check(health_pb2.HealthCheckRequest(service="diptych.v1.NoSuchService"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            watched = next(health.Watch(health_pb2.HealthCheckRequest(service=service)))
            assert watched.status == health_pb2.HealthCheckResponse.SERVING
            listed = set(ProtoReflectionDescriptorDatabase(channel).get_services())
            assert service in listed
            assert {"diptych.v1.AdminService", "diptych.v1.InferenceService"} - listed  # never both
