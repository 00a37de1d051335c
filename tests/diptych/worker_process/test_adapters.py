"""LoRA adapters through both workers' real loops: tokens of each, waits for slots, and refusals."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import layer_shapes
from diptych.runtime.adapter_files import read_adapter
from diptych.worker.v1 import work_pb2
from diptych.worker_process.adapter_store import AdapterNotLoaded
from tests.diptych.worker_process import test_random_interleavings
from tests.diptych.worker_process.both_workers import SHAPE, House, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.diptych.worker_process.test_random_interleavings import Plan, Walk

NOT_LOADED = "FAILURE_REASON_ADAPTER_NOT_LOADED"
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
PROMPT = tuple(range(1, 14))


def write(folder: Path, seed: int, shape: ModelShape = SHAPE, rank: int = 3) -> Path:
    """Write a random adapter of all modules that changes most tokens."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for field, size in layer_shapes(shape, layer):
            if field in MODULES:
                name = f"base_model.model.model.layers.{layer}.{MODULES[field]}"
                a = torch.randn(rank, size[1], generator=generator)
                b = torch.randn(size[0], rank, generator=generator) * size[1] ** -0.5
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [name.rpartition(".")[2] for name in MODULES.values()]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def adapters(tmp_path: Path) -> dict[bytes, Path]:
    """Three adapters by their digests."""
    paths = [write(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2, 3)]
    return {read_adapter(path).digest: path for path in paths}


async def load(made: House, adapters: dict[bytes, Path]) -> None:
    """Load them on every worker."""
    for worker in (*made.decodes, *made.prefills):
        for digest, path in adapters.items():
            await worker.loop.requests.adapters.load(digest, path)


class AdapterWalk(Walk):
    """Requests of the base and of several adapters, in random order over random times."""

    def __init__(self, made: House, seed: int, adapters: dict[bytes, Path]) -> None:
        super().__init__(made, seed)
        self.adapters = adapters

    def adapter_of(self, name: str) -> bytes:
        """Return the digest of a request's adapter; empty: the base model."""
        return random.Random(name).choice([b"", *self.adapters])

    def work(self, key: tuple[str, int], *arguments: Any, **changes: Any) -> work_pb2.Work:
        return work(key, *arguments, **changes, adapter=self.adapter_of(key[0]))

    def expected(self, planned: Plan) -> tuple[int, ...]:
        adapter = self.adapter_of(planned.name)
        return greedy(planned.prompt, planned.max_tokens, self.adapters.get(adapter))


@pytest.mark.parametrize(
    ("transport", "backend", "max_loras", "seed"),
    [
        ("shared_memory", "torch", 1, 1),
        ("tcp", "native", 2, 2),
        pytest.param("shared_memory", "device", 2, 5, marks=pytest.mark.full),
        pytest.param("tcp", "torch", 1, 3, marks=pytest.mark.full),
        pytest.param("shared_memory", "native", 1, 4, marks=pytest.mark.full),
    ],
)
async def test_requests_of_three_adapters_end_with_the_tokens_of_each_alone(
    transport: str,
    backend: str,
    max_loras: int,
    seed: int,
    adapters: dict[bytes, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 80)
    async with house(
        transport, decodes=2, prefills=2, blocks=24, backend=backend, max_loras=max_loras
    ) as made:
        await load(made, adapters)
        walk = AdapterWalk(made, seed, adapters)
        await walk.run()
        assert await made.empty() == []
    assert [record.getMessage() for record in caplog.records if "engine" not in record.name] == []
    assert walk.outcomes["decode finished"] > 10, walk.outcomes


def test_adapters_change_the_tokens(adapters: dict[bytes, Path]) -> None:
    """Control: else the tests here could not tell them apart."""
    outputs = {greedy(PROMPT, 12), *(greedy(PROMPT, 12, path) for path in adapters.values())}
    assert len(outputs) == 4


@pytest.mark.parametrize(
    "requests", [80, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
async def test_two_adapters_take_turns_in_one_slot(requests: int, adapters: dict[bytes, Path]) -> None:
    one, other, _ = adapters
    async with house("shared_memory", max_loras=1, blocks=64) as made:
        await load(made, adapters)
        gateway = Gateway(made)
        digests = [one, other] * (requests // 2)
        heard = [
            gateway.start(made.decodes[0], made.prefills[0], work((f"r{n}", 1), PROMPT, 6, adapter=digest))
            for n, digest in enumerate(digests)
        ]
        base = gateway.start(made.decodes[0], made.prefills[0], work(("base", 1), PROMPT, 6))
        async with asyncio.timeout(250 if requests < 1000 else 3000):
            await base.ended.wait()
            waiting = sum(not one.ended.is_set() for one in heard)
            await asyncio.gather(*(one.ended.wait() for one in heard))
        assert waiting > 20, "a request of the base waited for slots of adapters"
        for digest, of_request in zip(digests, heard, strict=True):
            assert tuple(of_request.tokens) == greedy(PROMPT, 6, adapters[digest])
        assert await made.empty() == []
        await gateway.close()


async def test_an_adapter_that_one_worker_lacks_fails_and_gives_no_token_of_the_base(
    adapters: dict[bytes, Path],
) -> None:
    digest, path = next(iter(adapters.items()))
    async with house("shared_memory", max_loras=1) as made:
        decode, prefill = made.decodes[0], made.prefills[0]
        await decode.loop.requests.adapters.load(digest, path)
        gateway = Gateway(made)
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 6, adapter=digest))
        await heard.ended.wait()
        assert heard.terminal_messages == [f"prefill {NOT_LOADED}"]
        decode.loop.requests.cancel(("r", 1))
        await decode.loop.requests.adapters.unload(digest)
        await prefill.loop.requests.adapters.load(digest, path)
        heard = gateway.start(decode, prefill, work(("s", 1), PROMPT, 6, adapter=digest, choices=(0, 1)))
        await heard.ended.wait()
        assert set(heard.terminal_messages) == {f"decode {NOT_LOADED}"}
        prefill.loop.requests.cancel(("s", 1))
        heard = gateway.start_local(
            decode, work(("t", 1), PROMPT, 6, adapter=digest, local=work_pb2.LOCAL_PREFILL_SHORT)
        )
        await heard.ended.wait()
        assert heard.terminal_messages == [f"decode {NOT_LOADED}"]
        assert not heard.tokens
        assert await made.empty() == []
        await gateway.close()


async def test_unload_waits_for_running_attempts_and_refuses_new_ones(adapters: dict[bytes, Path]) -> None:
    digest, path = next(iter(adapters.items()))
    async with house("shared_memory", max_loras=1, blocks=64) as made:
        await load(made, adapters)
        decode, prefill = made.decodes[0], made.prefills[0]
        store, gateway = decode.loop.requests.adapters, Gateway(made)
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 40, adapter=digest))
        while not heard.tokens:  # noqa: ASYNC110 -- messages are only kept
            await asyncio.sleep(0.001)
        unloading = asyncio.create_task(store.unload(digest))
        await asyncio.sleep(0)
        assert digest not in store.digests
        refused = gateway.start_local(
            decode, work(("s", 1), PROMPT, 6, adapter=digest, local=work_pb2.LOCAL_PREFILL_SHORT)
        )
        await refused.ended.wait()
        assert refused.terminal_messages == [f"decode {NOT_LOADED}"]
        assert not unloading.done()
        await heard.ended.wait()
        await unloading
        assert tuple(heard.tokens) == greedy(PROMPT, 40, path)
        assert len(store.digests) == 2
        await gateway.close()


async def test_load_takes_an_unload_back(adapters: dict[bytes, Path]) -> None:
    digest, path = next(iter(adapters.items()))
    async with house("shared_memory", max_loras=1) as made:
        store = made.decodes[0].loop.requests.adapters
        await store.load(digest, path)
        use = store.use("a test", digest)
        assert use is not None
        unloading = asyncio.create_task(store.unload(digest))
        await asyncio.sleep(0)
        await store.load(digest, path)
        await unloading
        use.release()
        assert store.digests == [digest]


async def test_load_refuses_other_content_and_names_the_path(adapters: dict[bytes, Path]) -> None:
    (one, path), (other, _), _ = adapters.items()
    async with house("shared_memory", max_loras=1) as made:
        store = made.prefills[0].loop.requests.adapters
        with pytest.raises(AdapterNotLoaded, match=f"{path}: its content is {one.hex()[:12]}"):
            await store.load(other, path)
        with pytest.raises(AdapterNotLoaded, match="no adapter at"):
            await store.load(one, path / "nowhere")
        assert store.digests == []


async def test_worker_without_slots_says_so(adapters: dict[bytes, Path]) -> None:
    digest, path = next(iter(adapters.items()))
    async with house("shared_memory") as made:
        with pytest.raises(AdapterNotLoaded, match="--max-loras is 0"):
            await made.decodes[0].loop.requests.adapters.load(digest, path)


@pytest.mark.parametrize(
    "rounds", [100, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
async def test_loads_and_unloads_under_load_leave_nothing(rounds: int, adapters: dict[bytes, Path]) -> None:
    (one, path), (other, second), _ = adapters.items()
    async with house("shared_memory", max_loras=1, blocks=64) as made:
        decode = made.decodes[0]
        store, gateway = decode.loop.requests.adapters, Gateway(made)
        ended = 0
        local = work_pb2.LOCAL_PREFILL_SHORT
        await store.load(one, path)
        for number in range(rounds):
            heard = gateway.start_local(decode, work((f"r{number}", 1), PROMPT, 3, adapter=one, local=local))
            await store.load(other, second)
            await store.unload(other)
            if number % 10 == 0:
                await heard.ended.wait()
                ended += tuple(heard.tokens) == greedy(PROMPT, 3, path)
        assert ended == rounds // 10
        assert await made.empty() == []
        assert store.digests == [one]
        await gateway.close()
