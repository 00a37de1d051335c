"""Gateways of one directory: what one is told about models and aliases, all do, and later ones begin with."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from diptych.runtime.model_digest import model_digest
from diptych.v1 import admin_pb2 as admin
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import ids_of, until, valkey
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker, answering
from tests.gateway.test_several_models import ONE, SPLIT, TWO, Several, several

KEY = "diptych:names:models"
NEW = [31, 32, 33]
OTHER = "7" * 64
Workers = Mapping[str, tuple[ScriptedWorker, ...]]


@pytest.fixture
def own_redis_url() -> Iterator[str]:
    """Yield the URL of a directory of this test alone: records outlive gateways."""
    with valkey() as url:
        yield url


@pytest.fixture
def new_digest(bundled_path: Path) -> str:
    return model_digest(bundled_path)


@contextlib.asynccontextmanager
async def two_gateways(
    bundled: ServedModel, url: str, workers: Workers, **settings: Any
) -> AsyncIterator[tuple[Several, Several]]:
    async with (
        several(bundled, url, workers, worker_id="first", incarnation=11, **settings) as first,
        several(bundled, url, {}, worker_id="second", incarnation=12, **settings) as second,
    ):
        yield first, second


async def load(system: Several, name: str, path: Path) -> None:
    await system.operator.LoadModel(admin.LoadModelRequest(name=name, path=str(path)))


async def set_alias(system: Several, name: str, **shares: int) -> None:
    parts = [admin.ModelShare(model=model, weight=weight) for model, weight in shares.items()]
    alias = admin.ModelAlias(name=name, shares=parts)
    await system.operator.SetModelAlias(admin.SetModelAliasRequest(alias=alias))


def served(system: Several) -> dict[str, str]:
    """Return what a gateway serves: digests of models, shares of aliases."""
    models = system.gateway.models
    found = {core.name: core.digest for core in models}
    return found | {
        one.name: ",".join(f"{share.model}:{share.weight}" for share in one.shares) for one in models.aliases
    }


async def agree(*systems: Several, **expected: str) -> None:
    await until(lambda: all(served(system) == expected for system in systems))


async def test_other_gateways_follow_loads_aliases_and_unloads(
    bundled: ServedModel, bundled_path: Path, own_redis_url: str, new_digest: str
) -> None:
    workers = {new_digest: (ScriptedPrefill(), ScriptedDecode(answering(NEW)))}
    settings = {"model_split": SPLIT}
    async with two_gateways(bundled, own_redis_url, workers, **settings) as (first, second):
        await load(first, "three", bundled_path)
        await agree(first, second, one=ONE, two=TWO, three=new_digest, chat="one:90,two:10")
        await until(lambda: not second.gateway.lacks("three"))
        assert await second.ids("three") == NEW
        await set_alias(second, "chat", three=1)
        await set_alias(second, "best", three=2, one=1)
        await agree(first, second, one=ONE, two=TWO, three=new_digest, chat="three:1", best="three:2,one:1")
        assert await first.ids("chat") == NEW
        await first.operator.UnloadModel(admin.UnloadModelRequest(name="two"))
        await set_alias(first, "best")
        late = several(bundled, own_redis_url, {}, worker_id="late", incarnation=13, **settings)
        async with late as third:
            await agree(third, first, second, one=ONE, three=new_digest, chat="three:1")
            await until(lambda: not third.gateway.lacks("three"))
            assert ids_of(await third.messages("chat")) == NEW
            await set_alias(second, "chat", one=1)
            await second.operator.UnloadModel(admin.UnloadModelRequest(name="three"))
            await agree(first, second, third, one=ONE, chat="one:1")


async def test_each_goes_on_alone_while_redis_is_away(
    bundled: ServedModel, bundled_path: Path, own_redis_url: str, new_digest: str
) -> None:
    workers = {new_digest: (ScriptedPrefill(), ScriptedDecode(answering(NEW)))}
    redis = Redis.from_url(own_redis_url)
    async with redis, two_gateways(bundled, own_redis_url, workers) as (first, second):
        await load(first, "three", bundled_path)
        await agree(first, second, one=ONE, two=TWO, three=new_digest)
        await redis.execute_command("CLIENT", "PAUSE", "3000", "ALL")
        await set_alias(first, "chat", three=1)
        await second.operator.UnloadModel(admin.UnloadModelRequest(name="two"))
        await asyncio.sleep(1.0)
        assert served(first) == {"one": ONE, "two": TWO, "three": new_digest, "chat": "three:1"}
        assert served(second) == {"one": ONE, "three": new_digest}
        assert await second.ids("three") == NEW
        await agree(first, second, one=ONE, three=new_digest, chat="three:1")
        await redis.flushall()
        await until_kept(redis)
        assert served(first) == served(second) == {"one": ONE, "three": new_digest, "chat": "three:1"}


async def until_kept(redis: Redis) -> None:
    """Wait until the gateways have told an empty directory what they know."""
    async with asyncio.timeout(30):
        while await redis.hlen(KEY) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_gateway_begins_with_records_unless_its_settings_are_newer(
    bundled: ServedModel, bundled_path: Path, own_redis_url: str, new_digest: str
) -> None:
    """The third one, whose settings name another content than was ever replaced, is the control."""
    workers = {new_digest: (ScriptedPrefill(), ScriptedDecode(answering(NEW)))}
    async with two_gateways(bundled, own_redis_url, workers, model_split=SPLIT) as (first, second):
        await load(first, "one", bundled_path)
        await agree(first, second, one=new_digest, two=TWO, chat="one:90,two:10")
        await set_alias(second, "chat", two=1)
        await agree(first, second, one=new_digest, two=TWO, chat="two:1")
        again = several(bundled, own_redis_url, {}, worker_id="a", incarnation=13, model_split=SPLIT)
        async with again as restarted:
            assert served(restarted) == served(first)
        settings = {"digests": {"one": OTHER, "two": TWO}, "model_split": "chat=one:1,two:1"}
        newer = several(bundled, own_redis_url, {}, worker_id="b", incarnation=14, **settings)
        async with newer as control:
            await asyncio.sleep(0.7)
            assert served(control) == {"one": OTHER, "two": TWO, "chat": "one:1,two:1"}
            await set_alias(first, "chat", one=7)
            await agree(control, one=OTHER, two=TWO, chat="one:7")
        assert served(first)["one"] == new_digest


async def test_what_cannot_be_followed_is_listed_with_its_reason(
    bundled: ServedModel, bundled_path: Path, own_redis_url: str, new_digest: str
) -> None:
    redis = Redis.from_url(own_redis_url)
    async with redis, several(bundled, own_redis_url, {}) as system:
        for path, why in (("/nowhere", "no model at /nowhere"), (bundled_path, "has other content")):
            value = {"path": str(path), "digest": OTHER, "over": []}
            record = json.dumps({"at": 1.0 if path == "/nowhere" else 2.0, "value": value})
            await redis.hset(KEY, "model:three", record)
            await until(lambda why=why: any(why in one for one in problems(system)))
            assert problems(system)[0].startswith("three: path: ")
        listed = await system.operator.ListServedModels(admin.ListServedModelsRequest())
        assert list(listed.problems) == problems(system)
        await load(system, "three", bundled_path)
        await until(lambda: not problems(system))
        assert served(system)["three"] == new_digest


def problems(system: Several) -> list[str]:
    return system.gateway._model_service.problems
