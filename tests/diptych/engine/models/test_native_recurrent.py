"""Families with recurrent layers in the native step against transformers, with controls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.loaded_model import load_model
from diptych.engine.weights import Checkpoint
from diptych.engine.weights.checkpoint import read_checkpoint
from tests.diptych.engine.models.family_models import (
    TEXT,
    Stepper,
    check_bfloat16,
    check_greedy,
    oracle_logits,
    text_of,
)
from tests.diptych.engine.models.recurrent_models import CASES, oracle_of, save

EXACT = 1e-4
"""Largest difference of a logit in float32."""
SHOWS = 1e-3
"""Least difference of some logit where something is left out."""
SAMPLE = frozenset(
    {
        "qwen3-next",
        "olmo-hybrid",
        "granite4-h",
        "falcon-h1",
        "nemotron-h-experts",
        "jamba",
        "lfm2-experts",
    }
)
"""Cases of every kind of layer."""
GREEDY = [pytest.param(12, 3, id="short"), pytest.param(64, 16, id="long", marks=pytest.mark.full)]
"""Tokens of each text, and texts in a step."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    scope="module",
    params=[name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of a case, transformers' own and its folder; in the short form one of each kind of layer."""
    oracle = oracle_of(request.param)
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


def logits_of(backend: Any, checkpoint: Checkpoint, chunk: int = TEXT) -> torch.Tensor:
    """Return a backend's logits of a text in chunks, `[tokens, vocab]`."""
    return Stepper(backend, checkpoint.shape).logits(text_of(TEXT), chunk)


def test_logits_equal_transformers_in_the_same_bits_however_the_text_is_cut(case: tuple[Any, Path]) -> None:
    oracle, folder = case
    expected = oracle_logits(oracle, text_of(TEXT))
    model, checkpoint = load_model(folder, torch.float32), read_checkpoint(folder, "fp32")
    assert model.backend_name == "native"
    whole = logits_of(model.backend, checkpoint)
    torch.testing.assert_close(whole, expected, atol=EXACT, rtol=0)
    for chunk, threads in ((16, 1), (23, 3), (1, 2)):
        model.backend.set_threads(threads)
        assert torch.equal(logits_of(model.backend, checkpoint, chunk), whole)


@pytest.mark.parametrize(("tokens", "texts"), GREEDY)
def test_greedy_tokens_equal_transformers_alone_and_mixed(
    case: tuple[Any, Path], tokens: int, texts: int
) -> None:
    oracle, folder = case
    model = load_model(folder, torch.float32, backend="native")
    check_greedy(oracle, model.backend, model.shape, tokens, texts)


def test_bfloat16_is_as_near_to_float32_as_transformers(case: tuple[Any, Path]) -> None:
    oracle, folder = case
    check_bfloat16(oracle, load_model(folder, torch.bfloat16, backend="native"))


def test_int8_is_as_near_to_float32_as_torch(case: tuple[Any, Path]) -> None:
    oracle, folder = case
    exact = oracle_logits(oracle, text_of(TEXT))
    found = []
    for backend in ("native", "torch"):
        model = load_model(folder, "int8", backend=backend)  # type: ignore[arg-type]
        found.append(Stepper(model.backend, model.shape, torch.bfloat16).logits(text_of(TEXT), TEXT))
    ours, theirs = ((one - exact).norm(dim=1).median() for one in found)
    assert ours < 1.25 * theirs
    assert (found[0] - exact).norm() < 0.25 * exact.norm()


def test_each_tensor_and_switch_left_out_shows(case: tuple[Any, Path]) -> None:
    checkpoint = read_checkpoint(case[1], "fp32")
    exact = logits_of(NativeBackend(checkpoint.shape, checkpoint.weights, torch.float32), checkpoint)
    for name, other in _without_each(checkpoint):
        logits = logits_of(NativeBackend(other.shape, other.weights, torch.float32), other)
        assert (logits - exact).abs().max() > SHOWS, name


def _without_each(checkpoint: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the model with zeros for each tensor of its recurrences, and without its attention's gate."""
    layers = checkpoint.weights.layers
    names = {name for layer in layers for name in layer.recurrent or ()}
    for name in sorted(names):
        changed = tuple(
            replace(layer, recurrent={**layer.recurrent, name: torch.zeros_like(layer.recurrent[name])})
            if layer.recurrent is not None and name in layer.recurrent
            else layer
            for layer in layers
        )
        yield name, replace(checkpoint, weights=replace(checkpoint.weights, layers=changed))
    if checkpoint.shape.attention_gate:
        ungated = tuple(replace(layer, q_gate=None) for layer in layers)
        shape = replace(checkpoint.shape, attention_gate=False)
        yield "q_gate", replace(checkpoint, shape=shape, weights=replace(checkpoint.weights, layers=ungated))
