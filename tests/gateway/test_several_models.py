"""Several models behind one gateway: names, aliases, shares, and models that come, are replaced and go."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc
from diptych.runtime.model_digest import model_digest
from diptych.v1 import admin_pb2 as admin
from diptych.v1 import admin_pb2_grpc, inference_pb2_grpc
from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.config import GatewaySettings
from gateway.model.served_model import ServedModel
from gateway.program import Gateway
from gateway.served_models.loading import LoadedModel
from tests.gateway.access.keys import Keys
from tests.gateway.adapters.folders import write as write_adapter
from tests.gateway.running_gateway import SECRET, collect, ids_of, reason_of, until
from tests.gateway.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, ScriptedWorker, answering

Code = grpc.StatusCode
ONE, TWO = "1" * 64, "2" * 64
IDS = {ONE: [11, 12, 13], TWO: [21, 22, 23]}
SPLIT = "chat=one:90,two:10"


@pytest.fixture
def redis_url(redis_url: str) -> str:
    """Return the URL of a directory in which no test has left anything: what is loaded outlives gateways."""
    with Redis.from_url(redis_url, retry=Retry(ConstantBackoff(0.05), 200)) as redis:  # it may still start
        redis.flushall()
    return redis_url


@dataclass
class Several:
    """A gateway with two models, `one` and `two`, and how to talk to it."""

    gateway: Gateway
    stub: Any
    operator: Any

    async def ids(self, model: str, **fields: Any) -> list[int]:
        return ids_of(await self.messages(model, **fields))

    async def messages(self, model: str, **fields: Any) -> list[pb.GenerateResponse]:
        return await collect(self.stub.StreamGenerate(pb.GenerateRequest(model=model, text="Hi", **fields)))

    async def refusal(self, call: Any) -> tuple[Code, str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code(), reason_of(caught.value), caught.value.details() or ""

    async def digest_header(self, path: str, model: str, **body: object) -> str | None:
        url = f"http://127.0.0.1:{self.gateway.http_port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"model": model, **body}) as answer,
        ):
            await answer.read()
            return answer.headers.get("x-model-digest")

    async def http(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()

        def ask() -> Any:
            url = f"http://127.0.0.1:{self.gateway.http_port}{path}"
            request = urllib.request.Request(url, data, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)

        return await asyncio.to_thread(ask)


def pair(digest: str) -> tuple[ScriptedPrefill, ScriptedDecode]:
    return ScriptedPrefill(), ScriptedDecode(answering(IDS[digest]))


def held(ids: list[int], release: asyncio.Event) -> Script:
    """Return the script of a worker that outputs one id, and the others when it is released."""

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, ids[:1])
        await release.wait()
        worker.tokens(work, 1, ids[1:])
        worker.finish(work)

    return script


@contextlib.asynccontextmanager
async def several(
    bundled: ServedModel,
    redis_url: str,
    workers: Mapping[str, tuple[ScriptedWorker, ...]],
    *,
    digests: Mapping[str, str] = {"one": ONE, "two": TWO},
    incarnation: int | None = None,
    **settings: Any,
) -> AsyncIterator[Several]:
    """The bundled model twice, under two names and digests; ready when both have workers, if they get any."""
    for digest, some in workers.items():
        for worker in some:
            await worker.start(redis_url, digest)
    loaded = [
        LoadedModel(dataclasses.replace(bundled, card=dataclasses.replace(bundled.card, name=name)), digest)
        for name, digest in digests.items()
    ]
    values = GatewaySettings(
        redis_url=redis_url,
        **{"grpc_port": 0, "http_port": 0, "secret": SECRET, "shutdown_timeout": 0.5, **settings},
    )
    gateway = Gateway(values, loaded, incarnation_id=incarnation)
    await gateway.start()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.admin_port}") as admin_channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        made = Several(gateway, stub, admin_pb2_grpc.AdminServiceStub(admin_channel))
        try:
            for core in gateway.models:
                if len(workers.get(core.digest, ())) > 1:
                    await until(lambda core=core: not core.why_not_ready())
            yield made
        finally:
            await gateway.close()
            for worker in (worker for some in workers.values() for worker in some):
                await worker.close()


async def test_each_name_is_answered_by_its_own_workers(bundled: ServedModel, redis_url: str) -> None:
    async with several(bundled, redis_url, {ONE: pair(ONE), TWO: pair(TWO)}) as system:
        for name, digest in (("one", ONE), ("two", TWO)):
            first, *_ = messages = await system.messages(name)
            assert (first.model, first.model_digest, ids_of(messages)) == (name, digest, IDS[digest])
            body = {"model": name, "prompt": "Hi"}
            answer = await system.http("/v1/completions", body)
            assert (answer["model"], answer["system_fingerprint"]) == (name, f"fp_{digest[:12]}")
            for stream in (False, True):
                assert await system.digest_header("/v1/responses", name, input="Hi", stream=stream) == digest
        listed = await system.http("/v1/models")
        assert [(one["id"], one["digest"]) for one in listed["data"]] == [("one", ONE), ("two", TWO)]
        info = await system.operator.GetServerInfo(admin.GetServerInfoRequest())
        assert [(one.name, one.digest, one.ready) for one in info.models] == [
            ("one", ONE, True),
            ("two", TWO, True),
        ]
        workers = (await system.operator.ListWorkers(admin.ListWorkersRequest())).workers
        assert Counter(worker.model for worker in workers) == {"one": 2, "two": 2}


async def test_name_that_stands_for_nothing_gets_the_names_that_do(
    bundled: ServedModel, redis_url: str
) -> None:
    async with several(bundled, redis_url, {}, model_split=SPLIT) as system:
        code, reason, text = await system.refusal(system.messages("three"))
        assert (code, reason) == (Code.NOT_FOUND, "UNKNOWN_MODEL")
        assert text == "the model 'three' is not served here; served: one, two, chat"
        code, reason, text = await system.refusal(system.messages(""))
        assert (code, reason, text) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER", "model: is required")


async def test_alias_shares_requests_by_weight_and_answers_name_the_model(
    bundled: ServedModel, redis_url: str
) -> None:
    async with several(bundled, redis_url, {ONE: pair(ONE), TWO: pair(TWO)}, model_split=SPLIT) as system:
        heads = [
            messages[0] for messages in await asyncio.gather(*(system.messages("chat") for _ in range(200)))
        ]
        counts = Counter((head.model, head.model_digest) for head in heads)
        assert counts[("one", ONE)] + counts[("two", TWO)] == 200
        assert 4 <= counts[("two", TWO)] <= 40
        metric = system.gateway.registry.get_sample_value
        assert metric("diptych_model_alias_weight", {"alias": "chat", "model": "two"}) == 10
        of_session = {tuple(await system.ids("chat", session_id="s")) for _ in range(20)}
        assert len(of_session) == 1
        body = {"model": "chat", "prompt": ["Hi", "there"], "max_tokens": 3}
        answer = await system.http("/v1/completions", body)
        assert answer["model"] in ("one", "two")
        assert len({choice["text"] for choice in answer["choices"]}) == 1


async def test_alias_leaves_a_model_without_workers_out(bundled: ServedModel, redis_url: str) -> None:
    settings = {"model_split": SPLIT, "worker_wait_timeout": 0.1}
    async with several(bundled, redis_url, {TWO: pair(TWO)}, **settings) as system:
        assert {tuple(await system.ids("chat")) for _ in range(20)} == {tuple(IDS[TWO])}
        assert (await system.refusal(system.messages("one")))[1] == "NO_READY_WORKER"
        assert system.gateway.ready
        assert system.gateway.lacks("one")
        assert not system.gateway.lacks("chat")


async def test_small_prompts_go_to_the_smaller_model_while_it_has_workers(
    bundled: ServedModel, redis_url: str
) -> None:
    workers = {ONE: pair(ONE), TWO: pair(TWO)}
    async with several(bundled, redis_url, workers, small_requests="one=two:10") as system:
        assert await system.ids("one") == IDS[TWO]
        long = pb.GenerateRequest(model="one", text="x" * 11)
        assert ids_of(await collect(system.stub.StreamGenerate(long))) == IDS[ONE]
        body = {"model": "one", "prompt": ["x" * 11, "Hi"], "max_tokens": 3}
        assert (await system.http("/v1/completions", body))["model"] == "one"
        attached = await workers[ONE][1].wait_for("attach", 3)
        assert len(attached) == 3, "both prompts of a body go to one model"
        assert (await system.http("/v1/completions", {**body, "prompt": ["Hi", "Ho"]}))["model"] == "two"
        await asyncio.gather(*(worker.kill() for worker in workers[TWO]))
        await until(lambda: bool(system.gateway.lacks("two")))
        assert await system.ids("one") == IDS[ONE]


async def test_resume_token_finds_the_model_that_began(bundled: ServedModel, redis_url: str) -> None:
    """The alias stands for the other model by then; the control is a token that names no model here."""
    async with several(
        bundled, redis_url, {ONE: pair(ONE), TWO: pair(TWO)}, model_split="chat=two,never=one"
    ) as system:
        first = (await system.messages("chat"))[0]
        shares = [admin.ModelShare(model="one", weight=1), admin.ModelShare(model="two", weight=0)]
        alias = admin.ModelAlias(name="chat", shares=shares)
        await system.operator.SetModelAlias(admin.SetModelAliasRequest(alias=alias))
        assert await system.ids("chat") == IDS[ONE]
        again = {"resume_token": first.resume_token, "received_token_ids": IDS[TWO][:1]}
        assert await system.ids("chat", **again) == IDS[TWO][1:]
        refused = await system.refusal(system.messages("never", **again))
        assert refused[1:] == (
            "INVALID_PARAMETER",
            "resume_token: was made for another request, another model or another tenant",
        )


async def test_quota_of_a_key_counts_over_all_models(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    metadata = (("authorization", f"Bearer {keys.add('acme', requests_per_minute=3)}"),)
    workers = {ONE: pair(ONE), TWO: pair(TWO)}
    async with several(bundled, redis_url, workers, api_keys_file=keys.path) as system:
        for name in ("one", "two", "one"):
            await system.stub.Generate(pb.GenerateRequest(model=name, text="Hi"), metadata=metadata)
        for name in ("one", "two"):
            call = system.stub.Generate(pb.GenerateRequest(model=name, text="Hi"), metadata=metadata)
            assert (await system.refusal(call))[1] == "QUOTA_EXCEEDED"


async def test_every_api_finds_the_model_that_a_call_names(bundled: ServedModel, redis_url: str) -> None:
    workers = {ONE: pair(ONE), TWO: (ScriptedDecode(answering(IDS[TWO])),)}
    async with several(bundled, redis_url, workers, model_split="chat=one") as system:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}")
        async with channel:
            kserve = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            for name, ready in (("one", True), ("two", False), ("chat", True)):
                answer = await kserve.ModelReady(oip.ModelReadyRequest(name=name))
                assert answer.ready is ready
            with pytest.raises(grpc.aio.AioRpcError, match="served: one, two, chat"):
                await kserve.ModelReady(oip.ModelReadyRequest(name="three"))
        for name in ("two", "chat"):
            tokens = await system.http("/tokenize", {"model": name, "prompt": "Hi"})
            assert tokens["count"] > 0
        message = {"model": "chat", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await system.http("/v1/messages", message))["model"] == "one"
        described = await system.stub.GetModel(pb.GetModelRequest(model="chat"))
        assert (described.model.name, described.model.parent) == ("chat", "one")
        listed = await system.http("/v1/models/two")
        assert (listed["id"], listed["digest"]) == ("two", TWO)


async def test_model_is_removed_while_its_requests_run(bundled: ServedModel, redis_url: str) -> None:
    prefill, decode = pair(TWO)
    release = asyncio.Event()
    decode.script = held(IDS[TWO], release)
    async with several(bundled, redis_url, {ONE: pair(ONE), TWO: (prefill, decode)}) as system:
        running = asyncio.create_task(system.ids("two"))
        await decode.wait_for("attach")
        unload = system.operator.UnloadModel(admin.UnloadModelRequest(name="two"))
        unloading = asyncio.ensure_future(unload)
        await until(lambda: len(system.gateway.models) == 1)
        assert (await system.refusal(system.messages("two")))[1] == "UNKNOWN_MODEL"
        assert not unloading.done()
        release.set()
        assert await running == IDS[TWO]
        await unloading
        await until(lambda: not prefill.links and not decode.links)
        assert await system.ids("one") == IDS[ONE]
        last = await system.refusal(system.operator.UnloadModel(admin.UnloadModelRequest(name="one")))
        assert last[2] == "name: is the only model"


async def test_model_is_replaced_under_its_name_once_the_new_one_has_workers(
    bundled: ServedModel,
    bundled_path: Path,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = model_digest(bundled_path)
    workers = prefill, decode = ScriptedPrefill(), ScriptedDecode(answering([31, 32, 33]))
    prefill_of_old, decode_of_old = pair(ONE)
    release = asyncio.Event()
    decode_of_old.script = held(IDS[ONE], release)
    request = admin.LoadModelRequest(name="one", path=str(bundled_path))
    async with several(bundled, redis_url, {ONE: (prefill_of_old, decode_of_old)}) as system:
        monkeypatch.setattr("gateway.served_models.service.READY_S", 0.3)
        assert (await system.refusal(system.operator.LoadModel(request)))[1] == "NO_READY_WORKER"
        monkeypatch.undo()
        running = asyncio.create_task(system.ids("one"))
        await decode_of_old.wait_for("attach")
        for worker in workers:
            await worker.start(redis_url, digest)
        try:
            loaded = await system.operator.LoadModel(request)
            assert (loaded.model.digest, loaded.model.ready) == (digest, True)
            first, *_ = messages = await system.messages("one")
            assert (first.model, first.model_digest, ids_of(messages)) == ("one", digest, [31, 32, 33])
            assert not running.done()
            release.set()
            assert await running == IDS[ONE]
            await until(lambda: not prefill_of_old.links and not decode_of_old.links)
            assert (prefill.links, decode.links) == (1, 1)
            listed = await system.operator.ListServedModels(admin.ListServedModelsRequest())
            assert [(one.name, one.digest) for one in listed.models] == [("one", digest), ("two", TWO)]
            adapter = admin.LoadAdapterRequest(name="legal", path=str(write_adapter(tmp_path)), model="one")
            assert (await system.operator.LoadAdapter(adapter)).adapter.model == "one"
            assert await system.ids("legal") == [31, 32, 33]
            unnamed = admin.LoadAdapterRequest(name="other", path=adapter.path)
            refused = await system.refusal(system.operator.LoadAdapter(unnamed))
            assert refused[2] == "model: is required: several models are served"
        finally:
            for worker in workers:
                await worker.close()


async def test_what_cannot_be_served_is_refused_by_field(bundled: ServedModel, redis_url: str) -> None:
    async with several(bundled, redis_url, {}, model_split=SPLIT) as system:
        load, unload = system.operator.LoadModel, system.operator.UnloadModel
        for request, text in (
            (admin.LoadModelRequest(name="chat", path="/m"), "name: is an alias, or a name of another model"),
            (admin.LoadModelRequest(name="three", path="m"), "path: must be absolute"),
            (admin.LoadModelRequest(name="three", path="/nowhere"), "path: no model at /nowhere"),
            (admin.LoadModelRequest(name="-", path="/m"), "name: must be 1 to 128 letters"),
        ):
            assert text in (await system.refusal(load(request)))[2]
        named = await system.refusal(unload(admin.UnloadModelRequest(name="two")))
        assert named[2] == "name: the alias chat stands for it: change that first"
        alias = admin.ModelAlias(name="one", shares=[admin.ModelShare(model="two", weight=1)])
        refused = await system.refusal(system.operator.SetModelAlias(admin.SetModelAliasRequest(alias=alias)))
        assert refused[2] == "alias: one is the name of a model"
