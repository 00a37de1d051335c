"""LoRA adapters through real processes: one slot a worker, so that two adapters always take turns."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from typer.testing import CliRunner

from diptych.cli.app import app
from diptych.client import CallFailed, Client
from diptych.v1 import admin_pb2 as admin
from diptych.v1 import admin_pb2_grpc
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.adapters import merged, write_adapter
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack

MODEL, A, B = "tiny", "a", "team/b"
SERVED = (MODEL, A, B)
LENGTHS = (1, 15, 16, 33, 100)
MAX_TOKENS = 12
LONG = 400


@dataclass(frozen=True)
class Adapted:
    """A running system with two decode workers, and the folders of its model and adapters."""

    stack: Stack
    folder: Path
    adapters: dict[str, Path]

    def oracle(self, name: str) -> Any:
        return _oracle(self.folder, self.adapters.get(name))

    def greedy(self, name: str, prompt: Sequence[int], count: int = MAX_TOKENS) -> list[int]:
        """The tokens of transformers with merged weights; the end of sequence is not taken."""
        return _greedy(self.folder, self.adapters.get(name), tuple(prompt), count)

    def admin(self) -> grpc.Channel:
        return grpc.insecure_channel(self.stack.admin_address)

    def ask(self, asked: Sequence[tuple[str, Sequence[int]]], at_once: int = 64) -> list[pb.GenerateResponse]:
        """Whole answers to all (model, prompt) pairs, many at once."""

        async def everything() -> list[pb.GenerateResponse]:
            room = asyncio.Semaphore(at_once)
            async with grpc.aio.insecure_channel(self.stack.address) as channel:
                stub = rpc.InferenceServiceStub(channel)
                return await asyncio.gather(*(one(stub, room, *pair) for pair in asked))

        async def one(
            stub: Any, room: asyncio.Semaphore, name: str, ids: Sequence[int]
        ) -> pb.GenerateResponse:
            request = pb.GenerateRequest(
                model=name,
                token_ids=pb.TokenIds(ids=ids),
                sampling=pb.SamplingParams(temperature=0),
                stopping=pb.StoppingCriteria(max_tokens=MAX_TOKENS, ignore_eos=True),
            )
            async with room:
                answer: pb.GenerateResponse = await stub.Generate(request, timeout=600)
            return answer

        return asyncio.run(everything())

    def cached(self, name: str, prompt: Sequence[int]) -> int:
        [answer] = self.ask([(name, prompt)])
        assert list(answer.outputs[0].token_ids) == self.greedy(name, prompt)
        return answer.usage.cached_prompt_tokens

    def tokens_of(self, name: str, path: Path) -> list[int]:
        """Return the tokens of one more adapter, after comparing them."""
        prompt = tiny_model.prompt(7000, 20)
        [answer] = self.ask([(name, prompt)])
        made = list(answer.outputs[0].token_ids)
        assert made == _greedy(self.folder, path, tuple(prompt), MAX_TOKENS)
        return made

    def finds_its_own(self, name: str, prompt: Sequence[int]) -> None:
        """Ask until the gateway has heard where the prompt is cached: there are two decode workers."""
        deadline = time.monotonic() + 20
        while not self.cached(name, prompt):
            assert time.monotonic() < deadline


@functools.cache
def _oracle(folder: Path, adapter: Path | None) -> Any:
    model = tiny_model.oracle(folder)
    return model if adapter is None else merged(model, adapter).eval()


@functools.cache
def _greedy(folder: Path, adapter: Path | None, prompt: tuple[int, ...], count: int) -> list[int]:
    model, ids = _oracle(folder, adapter), list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=["shared_memory", pytest.param("tcp", marks=pytest.mark.full)])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    base = tiny_model.oracle(folder)
    root = tmp_path_factory.mktemp("adapters")
    paths = {
        A: write_adapter(root / "a", base, seed=1, rank=4),
        B: write_adapter(root / "b", base, seed=2, rank=8, targets=("q_proj", "v_proj", "down_proj")),
    }
    flags = ["--model", str(folder), "--model-name", MODEL, "--dtype", "fp32", "--prefill-chunk", "48"]
    flags += ["--kv-blocks", "96", "--max-loras", "1", "--decode-workers", "2", "--transport", request.param]
    if request.param == "tcp":  # every prompt travels
        flags += ["--set", "gateway.local-prefill=never"]
    flags += [f"--lora={name}={path}" for name, path in paths.items()]
    with running_stack(*flags) as stack:
        yield Adapted(stack, folder, paths)
        stack.wait_idle()


def prompts(seed: int) -> list[list[int]]:
    return [tiny_model.prompt(seed + number, length) for number, length in enumerate(LENGTHS)]


def ids_of(answer: pb.GenerateResponse) -> list[int]:
    return list(answer.outputs[0].token_ids)


def test_base_and_adapters_side_by_side_equal_merged_weights(adapted: Adapted) -> None:
    asked = [(name, prompt) for prompt in prompts(0) for name in SERVED]
    for (name, prompt), answer in zip(asked, adapted.ask(asked), strict=True):
        assert ids_of(answer) == adapted.greedy(name, prompt)
        assert answer.model == name
    for prompt in prompts(0):  # the control: each of the others would be noticed
        assert len({tuple(adapted.greedy(name, prompt)) for name in SERVED}) == len(SERVED)


def test_beams_are_those_of_transformers_with_merged_weights(adapted: Adapted) -> None:
    prompt, width, found = tiny_model.prompt(1500, 30), 3, []
    for name in SERVED:
        with Client(adapted.stack.address) as client:
            answer = client.generate(
                prompt, lora="" if name == MODEL else name, beam_width=width, n=width, max_tokens=MAX_TOKENS
            )
        oracle = _oracle(adapted.folder, adapted.adapters.get(name))
        eos, ids = oracle.config.eos_token_id, torch.tensor([prompt])
        with torch.inference_mode():
            rows = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=0,
                eos_token_id=eos,
            )
        found.append([_through_end(row, eos) for row in rows[:, len(prompt) :].tolist()])
        assert [list(one.token_ids) for one in answer.choices] == found[-1]
    assert len({str(one) for one in found}) == len(SERVED)  # the control: the others' would be noticed


def _through_end(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def test_a_prompt_shares_no_cached_token_between_adapters(adapted: Adapted) -> None:
    prompt = tiny_model.prompt(1000, 100)
    assert [adapted.cached(name, prompt) for name in SERVED] == [0, 0, 0]
    for name in SERVED:  # the control
        adapted.finds_its_own(name, prompt)


def test_other_bytes_under_the_old_name_share_no_cached_token(adapted: Adapted, tmp_path: Path) -> None:
    prompt = tiny_model.prompt(1001, 100)
    base = tiny_model.oracle(adapted.folder)
    adapters = dict(adapted.adapters)
    with adapted.admin() as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for seed in (10, 11):
            path = write_adapter(tmp_path / str(seed), base, seed=seed)
            stub.LoadAdapter(admin.LoadAdapterRequest(name="c", path=str(path), replace=True))
            adapters["c"] = path
            served = Adapted(adapted.stack, adapted.folder, adapters)
            assert served.cached("c", prompt) == 0
            served.finds_its_own("c", prompt)
        stub.UnloadAdapter(admin.UnloadAdapterRequest(name="c"))
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        adapted.ask([("c", prompt)])
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


def test_commands_load_list_and_unload(adapted: Adapted, tmp_path: Path) -> None:
    """A folder that a worker cannot compute is refused in its words, and leaves nothing."""

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*words, "--address", adapted.stack.admin_address])
        return done.exit_code, done.output

    path = write_adapter(tmp_path / "d", tiny_model.oracle(adapted.folder), seed=20)
    assert run("lora", "load", "d", str(path))[0] == 0
    status, listed = run("lora", "list")
    assert status == 0
    assert [line.split()[0] for line in listed.splitlines()] == ["adapter", A, "d", B]
    assert len(adapted.tokens_of("d", path)) == MAX_TOKENS
    assert run("lora", "unload", "d") == (0, "d is unloaded\n")
    config = path / "adapter_config.json"
    config.write_text(config.read_text().replace('"bias": "none"', '"bias": "all"'))
    status, refused = run("lora", "load", "d", str(path))
    assert status == 1
    assert "ADAPTER_REFUSED" in refused
    assert "bias" in refused
    deadline = time.monotonic() + 10  # heartbeats say it
    while [line.split()[-4:-1] for line in run("workers")[1].splitlines()[1:]].count(["96", "a,", B]) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_two_adapters_and_one_slot_all_end(adapted: Adapted, count: int) -> None:
    asked = [((A, B)[n % 2], prompts(2000)[n // 2 % len(LENGTHS)]) for n in range(count)]
    for (name, prompt), answer in zip(asked, adapted.ask(asked), strict=True):
        assert ids_of(answer) == adapted.greedy(name, prompt)
    adapted.stack.wait_idle()


def memory_mib(stack: Stack) -> dict[str, float]:
    roles = ("gateway", *("prefill",) * 1, *("decode",) * 2)
    indices = (0, 0, 0, 1)
    return {
        f"{role}-{index}": stack.metric(role, "process_resident_memory_bytes", index) / 2**20
        for role, index in zip(roles, indices, strict=True)
    }


@pytest.mark.parametrize(
    "rounds", [8, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_loads_and_unloads_under_load_leave_nothing(adapted: Adapted, tmp_path: Path, rounds: int) -> None:
    base = tiny_model.oracle(adapted.folder)
    paths = [write_adapter(tmp_path / str(seed), base, seed=100 + seed) for seed in range(2)]
    prompt = tiny_model.prompt(3000, 40)
    before: dict[str, float] = {}
    with adapted.admin() as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for number in range(rounds):
            if number == min(20, rounds // 2):
                before = memory_mib(adapted.stack)
            name, path = f"round-{number}", paths[number % 2]
            stub.LoadAdapter(admin.LoadAdapterRequest(name=name, path=str(path)), timeout=60)
            served = Adapted(adapted.stack, adapted.folder, {**adapted.adapters, name: path})
            asked = [(name, prompt), (A, prompt), (MODEL, prompt), (name, prompt)]
            for (asked_name, _), answer in zip(asked, adapted.ask(asked), strict=True):
                assert ids_of(answer) == served.greedy(asked_name, prompt)
            stub.UnloadAdapter(admin.UnloadAdapterRequest(name=name), timeout=60)
        listed = stub.ListAdapters(admin.ListAdaptersRequest()).adapters
        assert sorted(one.name for one in listed) == sorted((A, B))
        deadline = time.monotonic() + 10
        while any(
            len(worker.load.adapters) != 2 for worker in stub.ListWorkers(admin.ListWorkersRequest()).workers
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    grown = {name: now - before[name] for name, now in memory_mib(adapted.stack).items()}
    assert all(mib < 32 for mib in grown.values()), grown


def test_a_stream_goes_on_exactly_when_its_decode_worker_is_killed(adapted: Adapted) -> None:
    prompt = tiny_model.prompt(4000, 30)
    expected = adapted.greedy(A, prompt, LONG)
    with Client(adapted.stack.address) as client:
        stream = client.stream(prompt, lora=A, max_tokens=LONG, temperature=0.0, ignore_eos=True)
        got = [token for _ in range(20) for token in next(stream).token_ids]
        for worker in adapted.stack.account["decode"]:  # one of them has it, and the other one takes over
            if "pid" in worker:
                os.kill(worker["pid"], signal.SIGKILL)
                break
        got += [token for chunk in stream for token in chunk.token_ids]
    assert got == expected
    adapted.stack.wait_idle()


def test_an_adapter_that_a_restarted_worker_cannot_load_gives_no_base_text(adapted: Adapted) -> None:
    """The file on one worker's host is another one: its digest is not what was asked for."""
    prompt, weights = tiny_model.prompt(5000, 20), adapted.adapters[B] / "adapter_model.safetensors"
    kept = shutil.copy(weights, weights.with_suffix(".kept"))
    shutil.copy(adapted.adapters[A] / "adapter_model.safetensors", weights)
    try:
        killed = [worker["pid"] for worker in adapted.stack.account["decode"]]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_restarted(adapted.stack, killed)
        [answer] = adapted.ask([(A, prompt)])
        assert ids_of(answer) == adapted.greedy(A, prompt)
        with Client(adapted.stack.address, retries=0) as client, pytest.raises(CallFailed) as failed:
            client.generate(prompt, lora=B, max_tokens=4, temperature=0.0, timeout_s=30)
        assert (failed.value.code, failed.value.reason) == (grpc.StatusCode.UNAVAILABLE, "ADAPTER_NOT_LOADED")
    finally:
        os.replace(kept, weights)
    deadline = time.monotonic() + 30  # it is tried again
    while True:
        try:
            assert adapted.cached(B, prompt) >= 0
            return
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
            assert time.monotonic() < deadline
            time.sleep(0.5)


def wait_restarted(stack: Stack, killed: Sequence[int]) -> None:
    deadline = time.monotonic() + 60
    while any(
        worker.get("pid") in (None, *killed) or "http_port" not in worker
        for worker in stack.account["decode"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
