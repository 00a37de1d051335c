"""Models with experts and with latents through both workers: handoff, shared prefixes and copy-on-write."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import ExpertsShape, LatentShape, ModelShape
from tests.diptych.worker_process import both_workers
from tests.diptych.worker_process.both_workers import SHAPE, VOCABULARY, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kernels.cpu.tiny_models import weights_of

EXPERTS = replace(
    SHAPE,
    layers=tuple(replace(layer, experts=number > 0) for number, layer in enumerate(SHAPE.layers)),
    experts=ExpertsShape(6, 2, 10, routing="sigmoid", correction_bias=True, normalise=True, shared_size=12),
)
SHAPES: dict[str, ModelShape] = {
    "experts": EXPERTS,
    "latents": replace(SHAPE, latent=LatentShape(rank=9, plain=6, value=5, query_rank=7)),
    "latents-and-experts": replace(EXPERTS, latent=LatentShape(rank=9, plain=6, value=5)),
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    """Make both workers compute another model."""
    shape = SHAPES[request.param]
    backend = TorchBackend(shape, weights_of(shape, torch.float32))
    other = Model(shape, "fp32", torch.float32, backend, "torch")
    monkeypatch.setattr(both_workers, "model", lambda shape=None: other)
    monkeypatch.setitem(both_workers.MODELS, "torch", lambda shape: other)
    return shape


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_tokens_equal_those_of_one_engine(transport: str, shape: ModelShape) -> None:
    greedy = both_workers.greedy.__wrapped__
    prompts = [tuple((7 * n + 3 * row) % VOCABULARY for n in range(3 + 4 * row)) for row in range(4)]
    prompts.append((*prompts[3], 5, 9))  # a prefix of which is there already
    async with house(transport, blocks=96, scratch=48) as made:
        assert (made.decodes[0].memory.layout.name == "block-major/latent/1") == (shape.latent is not None)
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        for batch in (prompts[:4], prompts[4:]):
            heard = [
                gateway.start(decode, prefill, work((f"{row} {len(prompt)}", 1), prompt, 12))
                for row, prompt in enumerate(batch)
            ]
            await asyncio.gather(*(one.ended.wait() for one in heard))
            assert [tuple(one.tokens) for one in heard] == [greedy(prompt, 12) for prompt in batch]
        both = gateway.start(decode, prefill, work(("both", 1), prompts[2], 9, choices=(0, 1)))
        await both.ended.wait()  # choices share blocks until they write
        assert [tuple(both.outputs[choice]) for choice in (0, 1)] == [greedy(prompts[2], 9)] * 2
        assert await made.empty() == []
        await gateway.close()
