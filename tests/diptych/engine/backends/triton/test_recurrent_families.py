"""Families with recurrent layers by the Triton step: logits of torch, greedy tokens of transformers."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.supports import supports
from diptych.engine.weights.checkpoint import read_checkpoint
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.models.family_models import TEXT, Stepper, check_greedy, text_of
from tests.diptych.engine.models.recurrent_models import CASES, oracle_of, save
from tests.forms import sampled
from tests.triton_device import DEVICES, device_of

LEFT = {"nemotron-h-experts": "experts without a gate"}
"""Cases that torch computes, and what the Triton step lacks."""
SAMPLE = ("qwen3-next", "granite4-h", "falcon-h1", "jamba", "nemotron-h", "olmo-hybrid")
"""A case of each kind of layer, and of what else a family needs."""
CLOSE = {"atol": 1e-4, "rtol": 0.0}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=sampled([name for name in CASES if name not in LEFT], SAMPLE))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model of a case: transformers' own, and the checkpoint of its folder."""
    oracle = oracle_of(request.param)
    folder: Path = save(oracle, tmp_path_factory.mktemp(request.param))
    return oracle, read_checkpoint(folder, "fp32")


def computing(checkpoint: Any, operators: Operators = REFERENCE_OPERATORS) -> TritonBackend:
    return TritonBackend(checkpoint.shape, checkpoint.weights, "cpu", operators)


def test_logits_are_those_of_torch_however_the_text_is_cut(case: tuple[Any, Any]) -> None:
    _, checkpoint = case
    assert supports(checkpoint.shape) is None
    torch_step = TorchBackend(checkpoint.shape, checkpoint.weights)
    expected = Stepper(torch_step, checkpoint.shape).logits(text_of(TEXT), TEXT)
    for chunk in (TEXT, 23):
        got = Stepper(computing(checkpoint), checkpoint.shape).logits(text_of(TEXT), chunk)
        torch.testing.assert_close(got, expected, **CLOSE)


def test_greedy_tokens_are_those_of_transformers_alone_and_mixed(case: tuple[Any, Any]) -> None:
    oracle, checkpoint = case
    check_greedy(oracle, computing(checkpoint), checkpoint.shape, 8, 4)


@pytest.mark.parametrize("lost", ["delta_rule", "state_space", "selective_scan"])
def test_an_operator_that_forgets_shows(lost: str, tmp_path: Path) -> None:
    """Were states not read, the logits would have to differ."""
    name = {"delta_rule": "qwen3-next", "state_space": "granite4-h", "selective_scan": "jamba"}[lost]
    checkpoint = read_checkpoint(save(oracle_of(name), tmp_path), "fp32")
    whole = getattr(REFERENCE_OPERATORS, lost)

    def forgets(*given: Any, **more: Any) -> torch.Tensor:
        *before, runs, first = given
        nothing = dataclasses.replace(runs, starts=torch.zeros_like(runs.starts))
        return whole(*before, nothing, first, **more)

    operators = dataclasses.replace(REFERENCE_OPERATORS, **{lost: forgets})
    exact, got = (
        Stepper(computing(checkpoint, each), checkpoint.shape).logits(text_of(TEXT), 48)
        for each in (REFERENCE_OPERATORS, operators)
    )
    torch.testing.assert_close(got[:48], exact[:48], **CLOSE)
    assert (got[48:] - exact[48:]).abs().max() > 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "tokens"), sampled([("jamba", 9), *((name, 24) for name in SAMPLE)], [("jamba", 9)])
)
def test_the_kernels_give_the_logits_of_torch(name: str, tokens: int, device: str, tmp_path: Path) -> None:
    """A chunk that begins a text, one that goes on, and single tokens."""
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    checkpoint, on = read_checkpoint(save(oracle_of(name), tmp_path), "fp32"), device_of(device)
    backend, ids = TritonBackend(checkpoint.shape, checkpoint.weights, on), text_of(tokens)
    torch_step = TorchBackend(checkpoint.shape, checkpoint.weights)
    expected = Stepper(torch_step, checkpoint.shape).logits(ids, tokens)
    stepper, rows = Stepper(backend, checkpoint.shape, device=on), []
    tables = stepper.tables(tokens)
    cuts = (0, tokens - 4, tokens - 2, tokens - 1, tokens)
    for begin, end in pairwise(cuts):
        step = stepper.step(tables, begin, ids[begin:end], wants_logits=True)
        rows.append(backend.forward([step], None))
    torch.testing.assert_close(torch.cat(rows), expected[[end - 1 for end in cuts[1:]]], **CLOSE)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch_is_said(name: str, tmp_path: Path) -> None:
    assert supports(read_checkpoint(save(oracle_of(name), tmp_path), "fp32").shape) == LEFT[name]
