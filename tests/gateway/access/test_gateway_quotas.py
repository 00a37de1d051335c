"""Quotas over the real sockets of a gateway: limits, charges and refunds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from diptych.kserve.v2 import open_inference_pb2_grpc
from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys, bearer
from tests.gateway.access.locked_gateway import OUTPUT, completion, failure, http, serving
from tests.gateway.failing_calls import check_http, told
from tests.gateway.frontends.kserve.tensors import asking
from tests.gateway.running_gateway import collect, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

Code = grpc.StatusCode


@pytest.fixture
def redis_url(redis_url: str) -> str:
    """Return the URL of a directory in which no test has used up a quota: pools outlive gateways."""
    with Redis.from_url(redis_url, retry=Retry(ConstantBackoff(0.05), 200)) as redis:  # it may still start
        redis.flushall()
    return redis_url


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.jsonl")


@pytest.mark.parametrize(
    ("quotas", "told_of"),
    [
        ({"requests_per_minute": 2}, "2 requests a minute"),
        ({"tokens_per_minute": 7}, "7 tokens a minute"),
    ],
)
async def test_quota_refuses_above_its_limit(
    bundled: ServedModel, redis_url: str, keys: Keys, quotas: dict[str, int], told_of: str
) -> None:
    """Two requests of one prompt token and three output tokens each, and then no more."""
    key, other = keys.add("acme", **quotas), keys.add("other")
    async with serving(bundled, redis_url, keys) as stack:
        for _ in range(2):
            await stack.stub.Generate(stack.request(), metadata=bearer(key))
        error = await failure(stack.stub.Generate(stack.request(), metadata=bearer(key)))
        found = told(error)
        assert (found.code, found.reason) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
        assert found.retry_s is not None
        violation = quota_violation(error)
        assert (violation.subject, violation.description) == ("key:acme-0", f"at most {told_of}")
        status, text, headers = await http(stack, "/v1/completions", key, completion(stack))
        assert (status, check_http(status, text, headers)["code"]) == (429, "quota_exceeded")
        assert int(headers["Retry-After"]) >= 1
        triton = open_inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel)
        assert (
            told(await failure(triton.ModelInfer(asking(), metadata=bearer(key)))).reason == "QUOTA_EXCEEDED"
        )
        await stack.stub.Generate(stack.request(), metadata=bearer(other))
        await stack.until_idle()


async def test_exhausted_key_is_refused_before_parsing(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    """Reading a long prompt costs more than refusing it."""
    key = keys.add("acme", requests_per_minute=1)
    async with serving(bundled, redis_url, keys) as stack:
        bad = stack.request(sampling={"temperature": -1})
        assert (
            told(await failure(stack.stub.Generate(bad, metadata=bearer(key)))).code is Code.INVALID_ARGUMENT
        )
        await stack.stub.Generate(stack.request(), metadata=bearer(key))
        assert told(await failure(stack.stub.Generate(bad, metadata=bearer(key)))).reason == "QUOTA_EXCEEDED"


def quota_violation(error: Any) -> Any:
    status = rpc_status.from_call(error)
    quota = error_details_pb2.QuotaFailure()
    assert status is not None
    assert any(detail.Unpack(quota) for detail in status.details)
    return quota.violations[0]


async def test_concurrent_requests_are_limited(bundled: ServedModel, redis_url: str, keys: Keys) -> None:
    key = keys.add("acme", concurrent_requests=1)
    async with serving(bundled, redis_url, keys, ScriptedDecode()) as stack:
        running = stack.stub.StreamGenerate(stack.request(), metadata=bearer(key))
        await until(lambda: stack.core.gate.queue.running == 1)
        found = told(await failure(stack.stub.Generate(stack.request(), metadata=bearer(key))))
        assert (found.reason, found.retry_s) == ("QUOTA_EXCEEDED", 1.0)
        running.cancel()
        await stack.until_idle()
        again = stack.stub.StreamGenerate(stack.request(), metadata=bearer(key))
        await until(lambda: stack.core.gate.queue.running == 1)
        again.cancel()
        await stack.until_idle()


async def unservable(worker: ScriptedDecode, work: work_pb2.Work) -> None:
    reason = work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
    worker.fail(work, reason)


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], "NO_READY_WORKER"),
        ([ScriptedPrefill, partial(ScriptedDecode, unservable)], "KV_TRANSFER_FAILED"),
    ],
)
async def test_unavailable_request_is_refunded(
    bundled: ServedModel, redis_url: str, keys: Keys, workers: list[Any], reason: str
) -> None:
    key = keys.add("acme", requests_per_minute=1, tokens_per_minute=1)
    made = [make() for make in workers]
    async with running(bundled, redis_url, *made, api_keys_file=keys.path, worker_wait_timeout=0) as stack:
        for _ in range(3):
            found = told(await failure(stack.stub.Generate(stack.request(), metadata=bearer(key))))
            assert (found.code, found.reason) == (Code.UNAVAILABLE, reason)


async def test_resumed_stream_is_charged_for_new_output_only(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    """Charge seven tokens: prompt and three of output, then the prompt again and the last of the three."""
    key = keys.add("acme", tokens_per_minute=7)
    decode = ScriptedDecode(answering(OUTPUT))
    async with serving(bundled, redis_url, keys, decode) as stack:
        request = stack.request(stopping={"max_tokens": 3})
        messages = await collect(stack.stub.StreamGenerate(request, metadata=bearer(key)))
        again = pb.GenerateRequest(resume_token=messages[0].resume_token, received_token_ids=OUTPUT[:2])
        again.MergeFrom(request)
        rest = await collect(stack.stub.StreamGenerate(again, metadata=bearer(key)))
        assert rest[-1].usage.completion_tokens == 3
        await stack.until_idle()
        assert stack.registry.get_sample_value("diptych_output_tokens_total") == 4.0
        await stack.stub.Generate(request, metadata=bearer(key))


@pytest.mark.parametrize("quota", ["concurrent_requests", "requests_per_minute"])
async def test_more_prompts_than_the_quota_are_an_invalid_request(
    bundled: ServedModel, redis_url: str, keys: Keys, quota: str
) -> None:
    key = keys.add("acme", **{quota: 2})
    async with serving(bundled, redis_url, keys) as stack:
        for stream in (False, True):
            many = completion(stack, prompt=["a", "b", "c"], stream=stream)
            status, text, headers = await http(stack, "/v1/completions", key, many)
            error = check_http(status, text, headers)
            assert (status, error["param"]) == (400, "prompt")
            assert "at most 2 prompts" in error["message"]
        # Nothing was used up by them, and what fits runs.
        two = completion(stack, prompt=["a", "b"])
        assert (await http(stack, "/v1/completions", key, two))[0] == 200


async def test_several_prompts_are_admitted_together_or_refused(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    key = keys.add("acme", concurrent_requests=2, requests_per_minute=2)
    async with serving(bundled, redis_url, keys, ScriptedDecode()) as stack:
        running = stack.stub.StreamGenerate(stack.request(), metadata=bearer(key))
        await until(lambda: stack.core.gate.queue.running == 1)
        two = completion(stack, prompt=["a", "b"])
        status, text, headers = await http(stack, "/v1/completions", key, two)
        assert (status, check_http(status, text, headers)["code"]) == (429, "quota_exceeded")
        # The one request that is left was not used up by it.
        last = stack.stub.StreamGenerate(stack.request(), metadata=bearer(key))
        await until(lambda: stack.core.gate.queue.running == 2)
        for call in (running, last):
            call.cancel()
        await stack.until_idle()


async def test_refused_batch_is_refunded_completely(bundled: ServedModel, redis_url: str, keys: Keys) -> None:
    """Run one prompt, queue another and refuse the third: the answer is the refusal alone."""
    key = keys.add("acme", requests_per_minute=3, tokens_per_minute=3, concurrent_requests=3)
    small = {"max_inflight": 1, "max_queued_tokens": 1, "api_keys_file": keys.path}
    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(), **small) as stack:
        for _ in range(3):
            three = completion(stack, prompt=["a", "b", "c"])
            status, text, headers = await http(stack, "/v1/completions", key, three)
            assert (status, check_http(status, text, headers)["code"]) == (429, "queue_full")
            await stack.until_idle()


async def test_batch_above_tokens_per_minute_is_served_and_overdraws(
    bundled: ServedModel, redis_url: str, keys: Keys
) -> None:
    """Serve the batch like a single longer prompt, which could else never be served."""
    key = keys.add("acme", tokens_per_minute=2)
    async with serving(bundled, redis_url, keys) as stack:
        three = completion(stack, prompt=["a", "b", "c"])
        assert (await http(stack, "/v1/completions", key, three))[0] == 200
        status, text, headers = await http(stack, "/v1/completions", key, completion(stack))
        assert (status, check_http(status, text, headers)["code"]) == (429, "quota_exceeded")
        assert int(headers["Retry-After"]) > 60  # 3 tokens of prompts and 9 of output, at 2 a minute
