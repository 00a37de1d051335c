"""Tenants of a real system behind TLS: they share nothing, and nothing of theirs is left anywhere.

1,000 tries to find another tenant's cached prefix in the long form (make test-full), 40 in the suite.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import aiohttp
import grpc
import pytest
import redis

from diptych.client import AsyncClient, CallFailed, Prompt
from diptych.kserve.v2 import open_inference_pb2, open_inference_pb2_grpc
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import secured
from tests.end_to_end.secured import Secured
from tests.end_to_end.tiny_system import MODEL
from tests.gateway.access.keys import Keys

PROMPT_TOKENS = 64  # four blocks
AT_A_TIME = 8
CONTROLS = 10  # one prompt in so many is asked again by its own tenant, which must find it


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    keys = Keys(folder / "keys.jsonl")
    keys.add("ops", "admin")
    with secured.serving(folder, keys) as running:
        yield running


def added(system: Secured, tenant: str, *scopes: str, **quotas: int) -> str:
    """A key that the gateway knows already."""
    key = system.keys.add(tenant, *scopes, **quotas)
    deadline = time.monotonic() + 30
    while status(system, key) == 401:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return key


def test_the_question_that_up_shows_works_once_its_variables_are_filled_in(system: Secured) -> None:
    shown = next(line for line in system.stack.log.read_text().splitlines() if "diptych generate" in line)
    values = {"DIPTYCH_CA_FILE": str(system.roots), "DIPTYCH_API_KEY": added(system, "reader")}
    words = shlex.split(shown)
    assert [word for word in words if word.endswith("=…")] == [f"{name}=…" for name in values]
    arguments = words[words.index("generate") :]
    done = subprocess.run(
        [sys.executable, "-m", "diptych", *arguments, "--raw", "--max-tokens=4"],
        env={**os.environ, **values},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Where the time went" in done.stderr


def status(system: Secured, key: str) -> int:
    async def ask() -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            context = ssl_context(system)
            async with session.get(f"{system.url}/v1/models", ssl=context) as answer:
                return answer.status

    return asyncio.run(ask())


def ssl_context(system: Secured) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=system.roots)


async def cached(client: AsyncClient, prompt: Prompt, salt: str) -> int:
    options: dict[str, Any] = {"cache_salt": salt} if salt else {}
    answer = await client.generate(prompt, max_tokens=1, temperature=0.0, timeout_s=60, **options)
    return answer.usage.cached_prompt_tokens


@pytest.mark.parametrize("tries", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_no_tenant_finds_anothers_prefix(system: Secured, tries: int) -> None:
    """With the same prompt and the same salt, none, or the owner's name for one."""
    owner, colleague, thief = (added(system, name) for name in ("acme", "acme", "thief"))
    rng = random.Random(tries)
    stolen: list[int] = []
    found: list[int] = []

    async def one(number: int, clients: list[AsyncClient], places: asyncio.Semaphore) -> None:
        own, same_tenant, other = clients
        prompt = [rng.randrange(300) for _ in range(PROMPT_TOKENS)]
        salt = ("", "shared", f"s{number}")[number % 3]
        async with places:
            assert await cached(own, prompt, salt) == 0
            stolen.append(await cached(other, prompt, ("", salt, "acme", salt)[number % 4]))
            if number % CONTROLS == 0:
                found.append(await cached(same_tenant, prompt, salt))

    async def all_of_them() -> None:
        async with system.client(owner) as a, system.client(colleague) as b, system.client(thief) as c:
            places = asyncio.Semaphore(AT_A_TIME)
            await asyncio.gather(*(one(number, [a, b, c], places) for number in range(tries)))

    asyncio.run(all_of_them())
    assert len(stolen) == tries
    assert sum(tokens > 0 for tokens in stolen) == 0
    # The tries could have worked: who has the right finds three blocks, unless they were evicted meanwhile.
    assert sum(tokens >= 48 for tokens in found) >= 0.8 * len(found)


def test_the_commands_show_their_key_and_check_the_certificate(system: Secured) -> None:
    operator = next(iter(system.keys.entries))
    key = added(system, "shell")
    port = {"DIPTYCH_CA_FILE": str(system.roots)}

    def run(*words: str, key: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **port, "DIPTYCH_API_KEY": key}
        command = [sys.executable, "-m", "diptych", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    listed = run("workers", "--address", system.stack.admin_address, key=operator)
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.count("ready") == 2
    refused = run("workers", "--address", system.stack.admin_address, key=key)
    assert refused.returncode == 1
    assert "PERMISSION_DENIED" in refused.stderr
    asked = run("generate", "hello", "--raw", "--max-tokens", "4", "--address", system.stack.address, key=key)
    assert asked.returncode == 0, asked.stderr
    small = [
        "--num-prompts",
        "2",
        "--num-warmups",
        "1",
        "--random-input-len",
        "8",
        "--random-output-len",
        "4",
    ]
    small += ["--token-ids", "10:200", "--no-progress"]
    for target in (
        ["--address", system.stack.address],
        ["--backend", "kserve", "--address", system.stack.address],
        ["--base-url", system.url],
    ):
        measured = run("bench", *target, *small, key=key)
        assert measured.returncode == 0, measured.stderr


SENTINELS = {
    "prompt": "xyzzyPROMPTplugh",
    "salt": "xyzzySALTplugh",
    "stop": "xyzzySTOPplugh",
    "session": "xyzzySESSIONplugh",
    "tool": "xyzzyTOOLplugh",
    "bad key": "dk-xyzzyKEYplugh",
}


class Asker:
    """Asks in every way, and keeps what the server said of failures."""

    def __init__(self, system: Secured, key: str) -> None:
        self._system = system
        self._metadata = system.access(key).metadata
        self._headers = {"Authorization": f"Bearer {key}"}
        self.told: list[str] = []
        self.codes: set[str] = set()

    def request(self, **changes: Any) -> pb.GenerateRequest:
        fields: dict[str, Any] = {
            "model": MODEL,
            "session_id": SENTINELS["session"],
            "cache": {"salt": SENTINELS["salt"]},
            "text": SENTINELS["prompt"] * 4,
            **changes,
        }
        fields["stopping"] = {"max_tokens": 4, "stop": [SENTINELS["stop"]], **fields.get("stopping", {})}
        return pb.GenerateRequest(**fields)

    async def ask(self, expected: str, metadata: Any = None, within_s: float = 60, **changes: Any) -> None:
        await self._called(
            expected,
            lambda stub: stub.Generate(
                self.request(**changes),
                metadata=self._metadata if metadata is None else metadata,
                timeout=within_s,
            ),
        )

    async def cancelled(self) -> None:
        """After its first message."""
        async with self._channel() as channel:
            long = self.request(stopping={"max_tokens": 600, "ignore_eos": True})
            call = rpc.InferenceServiceStub(channel).StreamGenerate(long, metadata=self._metadata)
            await call.read()
            call.cancel()
        self.codes.add("CANCELLED")

    async def kserve(self) -> None:
        request = open_inference_pb2.ModelInferRequest(model_name=MODEL, id="k")
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(SENTINELS["prompt"].encode())
        async with self._channel() as channel:
            triton = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            await triton.ModelInfer(request, metadata=self._metadata, timeout=60)
            request.parameters["nonsense"].string_param = SENTINELS["tool"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await triton.ModelInfer(request, metadata=self._metadata, timeout=60)
            self.said(caught.value)

    async def http(self, expected: int, data: Any, headers: dict[str, str] | None = None) -> None:
        if not isinstance(data, bytes):
            data = json.dumps({"model": MODEL, "max_tokens": 4, **data}).encode()
        asked = {"Content-Type": "application/json", **(self._headers if headers is None else headers)}
        url = f"{self._system.url}/v1/completions"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=data, headers=asked, ssl=ssl_context(self._system)) as answer,
        ):
            text = await answer.text()
            assert answer.status == expected, text
            if answer.status != 200:
                self.told += [text, str(dict(answer.headers))]

    def said(self, error: grpc.aio.AioRpcError) -> None:
        self.codes.add(error.code().name)
        trailers = [(key, value) for key, value in error.trailing_metadata() or ()]
        self.told += [error.details() or "", repr(trailers)]

    async def _called(self, expected: str, ask: Any) -> None:
        async with self._channel() as channel:
            call = ask(rpc.InferenceServiceStub(channel))
            code = await call.code()
            self.codes.add(code.name)
            if code is not grpc.StatusCode.OK:
                trailers = [(key, value) for key, value in await call.trailing_metadata()]
                self.told += [await call.details() or "", repr(trailers)]
            assert code.name == expected, self.told[-2:]

    def _channel(self) -> grpc.aio.Channel:
        return self._system.access("").aio_channel(self._system.stack.address)


async def everything(system: Secured, asker: Asker, quota_key: str, operator: str) -> None:
    """Each success and each failure that a caller can bring about, with a sentinel in all that it sends."""
    tool = {"name": "f", "description": SENTINELS["tool"]}
    turns = {"messages": [{"role": "user", "content": SENTINELS["prompt"]}], "tools": [tool]}
    await asker.ask("OK")
    await asker.ask("OK", text="", chat=turns)
    await asker.ask("OK", structured_output={"choice": {"values": [SENTINELS["prompt"], "b"]}})
    await asker.kserve()
    await asker.http(200, {"prompt": SENTINELS["prompt"], "cache_salt": SENTINELS["salt"]})
    await asker.http(200, {"prompt": SENTINELS["prompt"], "stream": True})
    await asker.cancelled()
    await asker.ask("DEADLINE_EXCEEDED", within_s=0.05, stopping={"max_tokens": 700, "ignore_eos": True})
    await asker.ask("INVALID_ARGUMENT", text=SENTINELS["prompt"] * 200)  # over the context
    await asker.ask("INVALID_ARGUMENT", cache={"salt": SENTINELS["salt"] + "\n"})
    await asker.ask("INVALID_ARGUMENT", structured_output={"regex": f"({SENTINELS['prompt']}"})
    await asker.ask("INVALID_ARGUMENT", structured_output={"json_schema": f'{{"{SENTINELS["tool"]}"'})
    await asker.ask("INVALID_ARGUMENT", structured_output={"ebnf_grammar": f"root ::= {SENTINELS['tool']}"})
    await asker.ask("INVALID_ARGUMENT", text="", chat={"messages": [{"role": SENTINELS["prompt"]}]})
    await asker.ask("INVALID_ARGUMENT", resume_token=SENTINELS["prompt"])
    await asker.ask("UNAUTHENTICATED", metadata=(("authorization", f"Bearer {SENTINELS['bad key']}"),))
    await asker.ask("UNAUTHENTICATED", metadata=(("authorization", SENTINELS["bad key"]),))
    await asker.ask("PERMISSION_DENIED", metadata=system.access(operator).metadata)
    await asker.ask("OK", metadata=system.access(quota_key).metadata)
    await asker.ask("RESOURCE_EXHAUSTED", metadata=system.access(quota_key).metadata)
    await asker.http(401, {"prompt": "a"}, {"Authorization": f"Bearer {SENTINELS['bad key']}"})
    await asker.http(400, f'{{"prompt": "{SENTINELS["prompt"]}", '.encode())
    await asker.http(400, {"prompt": SENTINELS["prompt"], "nonsense": SENTINELS["tool"]})
    await asker.http(400, {"prompt": SENTINELS["prompt"], "stop": [SENTINELS["stop"]] * 20})


async def through_a_death(system: Secured, key: str) -> None:
    """A worker is killed under a stream, which goes on at its successor, or ends with a status."""
    async with system.client(key) as client:
        stream = client.stream(SENTINELS["prompt"], max_tokens=600, ignore_eos=True, timeout_s=90)
        async with stream:
            await stream.__anext__()
            os.kill(system.stack.account["decode"][0]["pid"], signal.SIGKILL)
            with contextlib.suppress(CallFailed):
                async for _ in stream:
                    pass


def test_nothing_of_a_request_is_left_anywhere(system: Secured) -> None:
    """The last of this module: it kills a worker. Looked through are the log of all processes at its loudest,
    all spans, all metrics, all that Redis holds, and all that clients were told.
    """
    key, quota_key = added(system, "acme"), added(system, "frugal", requests_per_minute=1)
    operator = next(iter(system.keys.entries))
    asker = Asker(system, key)
    asyncio.run(everything(system, asker, quota_key, operator))
    wanted = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "UNAUTHENTICATED"}
    assert asker.codes >= wanted | {"PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}
    redis_held = held_by_redis(system)
    asyncio.run(through_a_death(system, key))
    system.stack.wait_idle(60)
    time.sleep(1.0)  # the last spans
    spans = [f"{service} {span}" for service, span in system.collector.spans()]
    assert len(spans) > 100
    places = {
        "the log": system.stack.log.read_text(errors="replace"),
        "spans": "\n".join(spans),
        "metrics": metrics(system),
        "redis": redis_held + held_by_redis(system),
        "what clients were told": "\n".join(asker.told),
    }
    # Bytes of protobuf and of Redis are shown with escapes, which leave these words as they are.
    secrets = {**SENTINELS, "key": key, "quota key": quota_key, "operator": operator}
    secrets |= {f"digest of {name}": entry["sha256"] for name, entry in system.keys.entries.items()}
    for place, text in places.items():
        assert text, place
        for name, secret in secrets.items():
            assert secret not in text, f"{name} is in {place}"


def held_by_redis(system: Secured) -> str:
    """Every key and value, whatever its type."""
    with redis.Redis.from_url(system.stack.account["redis_url"]) as client:
        read = {
            b"string": client.get,
            b"hash": client.hgetall,
            b"set": client.smembers,
            b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
            b"list": lambda key: client.lrange(key, 0, -1),
            b"stream": client.xrange,
        }
        return "\n".join(f"{key!r} {read[client.type(key)](key)!r}" for key in client.scan_iter())


def metrics(system: Secured) -> str:
    account = system.stack.account
    workers = [f"http://127.0.0.1:{p['http_port']}" for role in ("prefill", "decode") for p in account[role]]
    texts = []
    for url in (system.url, *workers):
        context = ssl_context(system) if url.startswith("https") else None
        with urllib.request.urlopen(f"{url}/metrics", timeout=10, context=context) as answer:
            texts.append(answer.read().decode())
    return "\n".join(texts)
