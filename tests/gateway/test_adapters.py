"""Adapters through a real gateway, a real directory and scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.kserve.v2 import open_inference_pb2_grpc
from diptych.runtime.adapter_files import read_adapter
from diptych.v1 import admin_pb2 as admin
from diptych.v1 import admin_pb2_grpc
from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from gateway.model.served_model import ServedModel
from gateway.program import Gateway
from gateway.served_models.loading import LoadedModel
from gateway.session.retry_policy import MAX_REFUSALS
from tests.gateway import running_gateway
from tests.gateway.adapters.folders import write
from tests.gateway.frontends.kserve.tensors import asking
from tests.gateway.running_gateway import Stack, collect, ids_of, reason_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker, answering

IDS = [1, 2, 3]
Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the adapters of each test be its own: gateways of one model share them."""
    monkeypatch.setattr(running_gateway, "DIGEST", uuid.uuid4().hex * 2)


@contextlib.asynccontextmanager
async def serving(
    model: ServedModel, redis_url: str, *workers: ScriptedWorker, **settings: Any
) -> AsyncIterator[tuple[Stack, Any]]:
    """A gateway, and a stub of its admin port."""
    async with (
        running(model, redis_url, *workers, **settings) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.admin_port}") as channel,
    ):
        yield stack, admin_pb2_grpc.AdminServiceStub(channel)


def pair(**options: Any) -> tuple[ScriptedPrefill, ScriptedDecode]:
    return ScriptedPrefill(), ScriptedDecode(answering(IDS), **options)


def load(name: str, path: Path, **more: Any) -> admin.LoadAdapterRequest:
    return admin.LoadAdapterRequest(name=name, path=str(path), **more)


async def refusal(call: Any) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), reason_of(caught.value)


def ask(stack: Stack, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": stack.model.card.name, "text": "Hello", **fields})


async def test_both_workers_are_told_the_adapter(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = prefill, decode = pair()
    digest = read_adapter(write(tmp_path)).digest
    async with serving(bundled, redis_url, *workers, lora=f"legal={tmp_path}") as (stack, _):
        for fields in ({"model": "legal"}, {"lora": "legal"}, {"model": "legal", "lora": "legal"}, {}):
            answer = await stack.stub.Generate(ask(stack, **fields), timeout=20)
            assert answer.model == ("legal" if fields else bundled.card.name)
        works = [message for kind, message in decode.sent if kind == "attach"]
        dispatched = [message.work for kind, message in prefill.sent if kind == "dispatch"]
        assert [work.adapter for work in works] == [digest] * 3 + [b""]
        assert [work.adapter for work in dispatched] == [work.adapter for work in works]
        spaces = [work.cache_namespace for work in works]
        assert len(set(spaces[:3])) == 1
        assert spaces[3] != spaces[0]


async def test_unknown_adapter_is_not_found(bundled: ServedModel, redis_url: str) -> None:
    async with serving(bundled, redis_url, *pair()) as (stack, operator):
        found = await refusal(stack.stub.Generate(ask(stack, lora="nothing"), timeout=20))
        assert found == (Code.NOT_FOUND, "UNKNOWN_ADAPTER")
        found = await refusal(stack.stub.Generate(ask(stack, model="nothing"), timeout=20))
        assert found == (Code.NOT_FOUND, "UNKNOWN_MODEL")
        found = await refusal(operator.UnloadAdapter(admin.UnloadAdapterRequest(name="nothing")))
        assert found == (Code.NOT_FOUND, "UNKNOWN_ADAPTER")


async def test_a_request_waits_until_its_adapter_is_there(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = prefill, decode = pair()
    decode.refusal = "silence"
    digest = read_adapter(write(tmp_path)).digest
    async with serving(bundled, redis_url, *workers, lora=f"legal={tmp_path}") as (stack, _):
        with pytest.raises(grpc.aio.AioRpcError, match=r"Deadline Exceeded|in phase routing"):
            await stack.stub.Generate(ask(stack, model="legal"), timeout=0.7)
        late = asyncio.ensure_future(collect(stack.stub.StreamGenerate(ask(stack, model="legal"))))
        await stack.stub.Generate(ask(stack), timeout=20)  # others do not wait
        await asyncio.sleep(0.3)
        assert not late.done()
        decode.adapters.add(digest)  # its next heartbeat says so
        assert ids_of(await asyncio.wait_for(late, 20)) == IDS
        assert len([1 for kind, _ in prefill.sent if kind == "dispatch"]) == 2


async def test_an_adapter_on_one_worker_only_is_no_base_text(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = prefill, decode = pair()
    prefill.refusal = "tensor q: does not fit"
    async with serving(bundled, redis_url, *workers, lora=f"legal={write(tmp_path)}") as (stack, operator):
        found = await refusal(stack.stub.Generate(ask(stack, model="legal"), timeout=20))
        assert found == (Code.UNAVAILABLE, "ADAPTER_NOT_LOADED")
        assert not [kind for kind, _ in (*prefill.sent, *decode.sent) if kind in ("attach", "dispatch")]
        [listed] = (await operator.ListAdapters(admin.ListAdaptersRequest())).adapters
        assert list(listed.refusals) == [f"{prefill.worker_id}: tensor q: does not fit"]
        assert list(listed.workers) == [decode.worker_id]


async def test_a_worker_without_adapters_gets_none_of_their_requests(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = prefill, _ = pair()
    prefill.max_loras, prefill.refusal = 0, "silence"  # as one of the release before
    async with serving(bundled, redis_url, *workers, lora=f"legal={write(tmp_path)}") as (stack, operator):
        found = await refusal(stack.stub.Generate(ask(stack, model="legal"), timeout=20))
        assert found == (Code.UNAVAILABLE, "ADAPTER_NOT_LOADED")
        (tmp_path / "other").mkdir()
        with pytest.raises(grpc.aio.AioRpcError, match="computes no adapters"):
            await operator.LoadAdapter(load("other", write(tmp_path / "other", "b")), timeout=20)


async def test_a_worker_that_lost_it_is_asked_again_and_the_text_goes_on(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = _, decode = pair()

    async def once(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, IDS[:2])
        worker.adapters.clear()
        worker.fail(work, work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED)
        worker.script = answering(IDS)

    decode.script = once
    async with serving(bundled, redis_url, *workers, lora=f"legal={write(tmp_path)}") as (stack, _):
        answers = await collect(stack.stub.StreamGenerate(ask(stack, model="legal"), timeout=20))
        assert ids_of(answers) == IDS
        assert len(await decode.wait_for("load_adapter", 2)) >= 2
        first, second = (message for kind, message in decode.sent if kind == "attach")
        assert first.adapter == second.adapter != b""
        assert list(second.token_ids) == [*first.token_ids, *IDS[:2]]


async def test_load_list_unload(bundled: ServedModel, redis_url: str, tmp_path: Path) -> None:
    workers = prefill, decode = pair()
    digest = read_adapter(write(tmp_path, rank=4)).digest
    async with serving(bundled, redis_url, *workers) as (stack, operator):
        loaded = (await operator.LoadAdapter(load("legal", tmp_path))).adapter
        assert (loaded.digest, loaded.rank) == (digest.hex(), 4)
        assert list(loaded.workers) == sorted(worker.worker_id for worker in workers)
        assert await operator.ListAdapters(admin.ListAdaptersRequest()) == admin.ListAdaptersResponse(
            adapters=[loaded]
        )
        models = (await stack.stub.ListModels(pb.ListModelsRequest())).models
        assert [(m.name, m.parent) for m in models] == [
            (bundled.card.name, ""),
            ("legal", bundled.card.name),
        ]
        assert list(models[0].lora_adapters) == ["legal"]
        await until(lambda: all(worker.adapters == {digest} for worker in workers))
        infos = (await operator.ListWorkers(admin.ListWorkersRequest())).workers
        await operator.LoadAdapter(load("legal", tmp_path))  # the same again changes nothing
        assert len([1 for kind, _ in decode.sent if kind == "load_adapter"]) <= 2
        assert (await stack.stub.Generate(ask(stack, model="legal"), timeout=20)).model == "legal"
        await operator.UnloadAdapter(admin.UnloadAdapterRequest(name="legal"))
        assert (prefill.adapters, decode.adapters) == (set(), set())
        assert not (await operator.ListAdapters(admin.ListAdaptersRequest())).adapters
        found = await refusal(stack.stub.Generate(ask(stack, model="legal"), timeout=20))
        assert found == (Code.NOT_FOUND, "UNKNOWN_MODEL")
        assert {info.load.max_loras for info in infos} <= {0, 8}


async def test_unload_waits_for_running_requests_and_refuses_new_ones(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = _, decode = pair()
    go_on = asyncio.Event()

    async def slow(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.tokens(work, 0, IDS[:1])
        await go_on.wait()
        worker.tokens(work, 1, IDS[1:])
        worker.finish(work)

    decode.script = slow
    async with serving(bundled, redis_url, *workers, lora=f"legal={write(tmp_path)}") as (stack, operator):
        running_one = asyncio.ensure_future(collect(stack.stub.StreamGenerate(ask(stack, model="legal"))))
        await decode.wait_for("attach")
        unload = asyncio.ensure_future(operator.UnloadAdapter(admin.UnloadAdapterRequest(name="legal")))
        await until(lambda: stack.core.adapters.get("legal") is None)
        found = await refusal(stack.stub.Generate(ask(stack, model="legal"), timeout=20))
        assert found == (Code.NOT_FOUND, "UNKNOWN_MODEL")
        [leaving] = (await operator.ListAdapters(admin.ListAdaptersRequest())).adapters
        assert (leaving.name, leaving.running, leaving.draining) == ("legal", 1, True)
        assert not unload.done()
        assert decode.adapters
        go_on.set()
        assert ids_of(await running_one) == IDS
        await unload
        assert not decode.adapters


async def test_a_load_that_one_worker_refuses_leaves_nothing(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = prefill, decode = pair()
    decode.refusal = "tensor q: does not fit"
    async with serving(bundled, redis_url, *workers) as (stack, operator):
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"{decode.worker_id}: tensor q: does not fit"
        ) as caught:
            await operator.LoadAdapter(load("legal", write(tmp_path)))
        assert (caught.value.code(), reason_of(caught.value)) == (Code.FAILED_PRECONDITION, "ADAPTER_REFUSED")
        assert stack.core.adapters.get("legal") is None
        await until(lambda: not prefill.adapters)
        decode.refusal = ""
        await operator.LoadAdapter(load("legal", tmp_path))


async def test_what_cannot_be_loaded_names_the_field(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    async with serving(bundled, redis_url, *pair(), max_lora_rank=16) as (_, operator):
        for request, words in (
            (load("", write(tmp_path)), "name: must be"),
            (load("a b", tmp_path), "name: must be"),
            (load(bundled.card.name, tmp_path), "name: is a name of the base model"),
            (load("a", Path("relative")), "path: must be absolute"),
            (load("a", tmp_path / "nowhere"), "path: no adapter at"),
            (load("a", write(tmp_path / "large", rank=17)), "rank 17, and --max-lora-rank is 16"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await operator.LoadAdapter(request)
            assert caught.value.code() is Code.INVALID_ARGUMENT


async def test_other_bytes_under_the_old_name_are_another_adapter(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = _, decode = pair()
    old, new = write(tmp_path / "old", "a"), write(tmp_path / "new", "b")
    async with serving(bundled, redis_url, *workers, lora=f"legal={old}") as (stack, operator):
        first = await collect(stack.stub.StreamGenerate(ask(stack, model="legal"), timeout=20))
        found = await refusal(operator.LoadAdapter(load("legal", new)))
        assert found == (Code.ALREADY_EXISTS, "ADAPTER_EXISTS")
        await operator.LoadAdapter(load("legal", new, replace=True))
        await stack.stub.Generate(ask(stack, model="legal"), timeout=20)
        before, after = (message for kind, message in decode.sent if kind == "attach")
        assert before.adapter != after.adapter
        assert before.cache_namespace != after.cache_namespace
        await until(lambda: decode.adapters == {read_adapter(new).digest})
        again = ask(stack, model="legal", resume_token=first[0].resume_token, received_token_ids=IDS[:1])
        found = await refusal(collect(stack.stub.StreamGenerate(again, timeout=20)))
        assert found[0] is Code.INVALID_ARGUMENT  # the token was made for another content
        await operator.LoadAdapter(load("legal", old, replace=True))
        again = await collect(stack.stub.StreamGenerate(again, timeout=20))
        assert ids_of(again) == IDS[1:]
        await operator.UnloadAdapter(admin.UnloadAdapterRequest(name="legal"))
        again = ask(stack, model="legal", resume_token=first[0].resume_token, received_token_ids=IDS[:1])
        assert (await refusal(collect(stack.stub.StreamGenerate(again, timeout=20))))[0] is Code.NOT_FOUND


async def test_a_worker_that_comes_later_gets_the_adapters(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = _, decode = pair()
    digest = read_adapter(write(tmp_path)).digest
    async with serving(bundled, redis_url, *workers, lora=f"legal={tmp_path}") as (stack, _):
        await until(lambda: digest in decode.adapters)
        await decode.close()
        successor = ScriptedDecode(answering(IDS))
        successor.replaces = decode.worker_id
        waiting = asyncio.ensure_future(stack.stub.Generate(ask(stack, model="legal"), timeout=30))
        await successor.start(redis_url, running_gateway.DIGEST)
        try:
            assert (await waiting).model == "legal"
            assert successor.adapters == {digest}
        finally:
            await successor.close()


async def test_gateways_agree_on_names(bundled: ServedModel, redis_url: str, tmp_path: Path) -> None:
    workers = _, decode = pair()
    async with serving(bundled, redis_url, *workers) as (stack, operator):
        other = Gateway(
            stack.gateway._settings, [LoadedModel(bundled, running_gateway.DIGEST)], incarnation_id=7
        )
        await other.start()
        try:
            await until(lambda: other.ready)
            await operator.LoadAdapter(load("legal", write(tmp_path)))
            await until(lambda: other.models.first.adapters.get("legal") is not None)
            assert other.models.first.adapters.get("legal") == stack.core.adapters.get("legal")
            await other.models.first.adapter_service.unload("legal")
            await until(lambda: stack.core.adapters.get("legal") is None)
            await until(lambda: not decode.adapters)
        finally:
            await other.close()


async def test_metrics_show_adapters_and_forget_them(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = _, decode = pair()
    decode.script = None
    settings = {"lora": f"legal={write(tmp_path)}", "metrics_compat": "vllm"}
    async with serving(bundled, redis_url, *workers, **settings) as (stack, operator):
        value = stack.registry.get_sample_value
        call = stack.stub.StreamGenerate(ask(stack, model="legal"))
        await decode.wait_for("attach")
        assert value("diptych_adapters", {"model": bundled.card.name}) == 1
        assert value("diptych_adapter_requests_running", {"adapter": "legal"}) == 1
        labels = {"running_lora_adapters": "legal", "waiting_lora_adapters": "", "max_lora": "8"}
        await until(lambda: value("vllm:lora_requests_info", labels) is not None)
        call.cancel()
        await stack.until_idle()
        await operator.UnloadAdapter(admin.UnloadAdapterRequest(name="legal"))
        assert value("diptych_adapters", {"model": bundled.card.name}) == 0
        assert value("diptych_adapter_requests_running", {"adapter": "legal"}) is None


async def test_kserve_serves_an_adapter_as_a_model(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = _, decode = pair()
    digest = read_adapter(write(tmp_path)).digest
    async with serving(bundled, redis_url, *workers, lora=f"legal={tmp_path}") as (stack, _):
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(stack.channel)
        assert (await stub.ModelReady(oip.ModelReadyRequest(name="legal"))).ready
        assert (await stub.ModelMetadata(oip.ModelMetadataRequest(name="legal"))).name == "legal"
        request = asking()
        request.model_name = "legal"
        assert (await stub.ModelInfer(request, timeout=20)).model_name == "legal"
        [work] = [message for kind, message in decode.sent if kind == "attach"]
        assert work.adapter == digest
        found = await refusal(stub.ModelReady(oip.ModelReadyRequest(name="nothing")))
        assert found == (Code.NOT_FOUND, "UNKNOWN_MODEL")


async def test_workers_that_never_have_it_end_the_request(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    """They say that they loaded it, and refuse every attempt."""
    workers = _, decode = pair()

    async def never(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        worker.fail(work, work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED)

    decode.script = never
    async with serving(bundled, redis_url, *workers, lora=f"legal={write(tmp_path)}") as (stack, _):
        found = await refusal(stack.stub.Generate(ask(stack, model="legal"), timeout=20))
        assert found == (Code.UNAVAILABLE, "ADAPTER_NOT_LOADED")
        assert len([1 for kind, _ in decode.sent if kind == "attach"]) == MAX_REFUSALS + 1
