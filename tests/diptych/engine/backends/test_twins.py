"""Two backends over the same weights: the same numbers, at the same time, and nothing else in common."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from diptych.engine.backend import TwinBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.models.shape import ModelShape
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of

SHAPE = shape_of()


def made(name: str, shape: ModelShape = SHAPE) -> TwinBackend:
    weights = weights_of(shape, torch.float32)
    if name == "torch":
        return TorchBackend(shape, weights)
    return TritonBackend(shape, weights, "cpu", REFERENCE_OPERATORS)


def prompts(seed: int) -> list[list[SequenceStep]]:
    """Steps of growing sequences in a memory of their own."""
    pool = Pool(layout_of(SHAPE, 16, torch.float32), 30, seed=seed)
    one, two = pool.sequence(64), pool.sequence(64)
    return [
        [one.step(tokens_of(20, seed=seed)), two.step(tokens_of(7, seed=seed + 1))],
        *([one.step(tokens_of(1, seed=n)), two.step(tokens_of(3, seed=n))] for n in range(seed, seed + 6)),
    ]


def run(backend: TwinBackend, steps: Sequence[Sequence[SequenceStep]]) -> list[torch.Tensor]:
    return [backend.forward(step, None).clone() for step in steps]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_twins_compute_the_same_at_the_same_time(name: str) -> None:
    first = made(name)
    assert isinstance(first, TwinBackend)
    alone = {seed: run(made(name), prompts(seed)) for seed in (1, 2)}
    second = first.twin()
    together: dict[int, list[torch.Tensor]] = {}

    def compute(backend: object, seed: int) -> None:
        together[seed] = run(backend, prompts(seed))  # type: ignore[arg-type]

    threads = [threading.Thread(target=compute, args=pair) for pair in ((first, 1), (second, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, expected in alone.items():
        for got, right in zip(together[seed], expected, strict=True):
            torch.testing.assert_close(got, right, atol=1e-5, rtol=0)
    assert (alone[1][0] - alone[2][0]).abs().max() > 1e-3, "the check could not fail"


def test_triton_twins_share_weights_and_no_buffer() -> None:
    first = made("triton")
    assert isinstance(first, TritonBackend)
    first.forward(prompts(1)[0], None)
    first.plan_decode(4, 16)
    second = first.twin()
    assert second._layers.weights is first._layers.weights
    assert second._layers.rotary is not first._layers.rotary
    assert second._buffers is None
    assert second._graphs is None
    second.allow_adapters(2, 4)
    assert first._layers.adapters is None
