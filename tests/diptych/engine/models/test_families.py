"""Every dense family against transformers: all logits, greedy tokens, and a control for each switch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.native.supports import supports as native_supports
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.supports import supports as triton_supports
from diptych.engine.loaded_model import load_model
from diptych.engine.models.family import Family, Stored
from diptych.engine.models.registry import family_of
from diptych.engine.models.shape import ModelShape, Rotation
from diptych.engine.weights import safetensors_folder
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.engine.weights.hf_config import read_config
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.models.family_models import (
    CASES,
    TEXT,
    Stepper,
    check_greedy,
    config_of,
    oracle_logits,
    oracle_of,
    save,
    spoiled,
    text_of,
)

EXACT = 1e-4
"""Largest difference of a logit in float32."""
SHOWS = 1e-2
"""Least difference of some logit where a switch is left out."""
SAMPLE = frozenset(
    {"gemma3", "phi3-longrope", "granite", "smollm3", "olmo3", "glm4", "cohere2", "starcoder2"}
)
"""Cases of every kind of switch."""
GREEDY = [pytest.param(16, 4, id="short"), pytest.param(64, 16, id="long", marks=pytest.mark.full)]
"""Tokens of each text, and texts in a step."""
SWITCHES = (
    *("qk_norm", "qk_norm_after_rotation", "attention_scale", "score_cap", "query_growth", "activation"),
    *("gated", "norm", "norms", "parallel_residual", "embedding_scale", "residual_scale", "logit_scale"),
    *("logit_cap", "qkv_bias", "output_bias", "mlp_bias"),
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of a case, transformers' own and its folder."""
    oracle = oracle_of(config_of(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


@pytest.fixture(
    scope="module",
    params=[name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model as `case` is; in the short form one of each kind."""
    oracle = oracle_of(config_of(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


def backends_of(folder: Path) -> Iterator[tuple[Any, ModelShape]]:
    """Yield each backend that claims the folder's shape; Triton's with the meaning of its kernels."""
    checkpoint = read_checkpoint(folder, "fp32")
    shape = checkpoint.shape
    yield load_model(folder, torch.float32, backend="torch").backend, shape
    if native_supports(shape) is None:
        yield load_model(folder, torch.float32, backend="native").backend, shape
    if triton_supports(shape) is None:
        yield TritonBackend(shape, checkpoint.weights, "cpu", REFERENCE_OPERATORS), shape


def test_logits_equal_transformers(case: tuple[Any, Path]) -> None:
    oracle, folder = case
    ids = text_of(TEXT)
    expected = oracle_logits(oracle, ids)
    assert expected.std() > 0.1
    for backend, shape in backends_of(folder):
        for chunk in (TEXT, 16, 23):
            got = Stepper(backend, shape).logits(ids, chunk)
            torch.testing.assert_close(got, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("tokens", "texts"), GREEDY)
def test_greedy_tokens_equal_transformers_alone_and_mixed(
    sample: tuple[Any, Path], tokens: int, texts: int
) -> None:
    oracle, folder = sample
    for backend, shape in backends_of(folder):
        check_greedy(oracle, backend, shape, tokens, texts)


def test_bfloat16_is_as_near_to_float32_as_transformers(sample: tuple[Any, Path]) -> None:
    oracle, folder = sample
    model = load_model(folder, torch.bfloat16, backend="torch")
    exact = oracle_logits(oracle, text_of(TEXT))
    got = Stepper(model.backend, model.shape, torch.bfloat16).logits(text_of(TEXT), TEXT)
    peer = oracle_logits(copy.deepcopy(oracle).bfloat16(), text_of(TEXT))
    assert (got - exact).norm() < 1.25 * (peer - exact).norm()


def test_int8_is_near_to_float32(sample: tuple[Any, Path]) -> None:
    oracle, folder = sample
    model = load_model(folder, "int8", backend="torch")
    got = Stepper(model.backend, model.shape, torch.bfloat16).logits(text_of(TEXT), TEXT)
    exact = oracle_logits(oracle, text_of(TEXT))
    assert (got - exact).norm() < 0.25 * exact.norm()


def test_each_switch_left_out_shows(case: tuple[Any, Path]) -> None:
    checkpoint = read_checkpoint(case[1], "fp32")
    exact = spoiled(checkpoint)
    for name, changes in without_each(checkpoint.shape):
        assert (spoiled(checkpoint, **changes) - exact).abs().max() > SHOWS, name


def test_tensors_read_otherwise_show(case: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation of other pairs, and norms without the one that their file leaves out."""
    model_type = str(read_config(case[1])["model_type"])
    checkpoint = read_checkpoint(case[1], "fp32")
    exact, rotated = spoiled(checkpoint), any(one.rotation is not None for one in checkpoint.shape.layers)
    for other in read_otherwise(family_of(model_type), rotated=rotated):
        monkeypatch.setattr(safetensors_folder, "family_of", lambda _, other=other: other)
        assert (spoiled(read_checkpoint(case[1], "fp32")) - exact).abs().max() > SHOWS


def read_otherwise(family: Family, *, rotated: bool) -> Iterator[Family]:
    """Yield the family with each mistake that its reader could make."""
    if rotated:
        yield replace(family, interleaved=not family.interleaved)
    if any(isinstance(place, Stored) and place.plus for place in family.layer.values()):
        yield replace(family, layer={field: _as_stored(place) for field, place in family.layer.items()})
    for place in family.layer.values():
        if isinstance(place, Stored) and len(place.rows_of) == 2:
            turned = replace(place, rows_of=place.rows_of[::-1])
            others = {one: turned for one, at in family.layer.items() if at == place}
            yield replace(family, layer={**family.layer, **others})
            break


def _as_stored(place: str | Stored) -> str | Stored:
    return replace(place, plus=0.0) if isinstance(place, Stored) else place


def without_each(shape: ModelShape) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the changes that leave out each switch of a shape, by the switch's name."""
    defaults = {field.name: field.default for field in fields(shape)}
    for name in SWITCHES:
        if getattr(shape, name) != defaults[name]:
            yield name, {name: defaults[name]}
    if any(shape.windows):
        yield "window", {"layers": tuple(replace(layer, window=None) for layer in shape.layers)}
    chosen = {layer.rotation for layer in shape.layers}
    for rotation in chosen - {None}:
        assert rotation is not None
        yield "rotation", {"rotations": _other(shape.rotations, rotation)}
    if None in chosen:
        yield "unrotated", {"layers": tuple(replace(layer, rotation=0) for layer in shape.layers)}
    if len(chosen) > 1:
        yield (
            "rotation by layer",
            {"layers": tuple(replace(one, rotation=min(chosen - {None})) for one in shape.layers)},
        )
    for number, rotation in enumerate(shape.rotations):
        if rotation.scaling is not None and number in chosen:
            yield "scaling", {"rotations": _put(shape.rotations, number, replace(rotation, scaling=None))}
        if rotation.width < shape.head_dim:
            wide = replace(rotation, width=shape.head_dim, scaling=None)
            yield "width", {"rotations": _put(shape.rotations, number, wide)}


def _other(rotations: tuple[Rotation, ...], number: int) -> tuple[Rotation, ...]:
    return _put(rotations, number, replace(rotations[number], theta=3.0 * rotations[number].theta))


def _put(rotations: tuple[Rotation, ...], number: int, rotation: Rotation) -> tuple[Rotation, ...]:
    return (*rotations[:number], rotation, *rotations[number + 1 :])
