"""Refusal of files that are no model: each says what it is and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.engine.models.families import FAMILIES
from diptych.engine.weights import gguf_shape
from diptych.runtime.model_files import GGUF_ARCHITECTURES, MODEL_TYPES, UnusableModel, check_model_files
from diptych.runtime.settings import resolve_model
from tests.diptych.runtime.odd_models import CASES, INDEX, WHOLE, folder, gguf_file, safetensors


@pytest.mark.parametrize("case", CASES)
def test_refusal_says_what_a_file_is_and_what_to_do(case: str, tmp_path: Path) -> None:
    write, said = CASES[case]
    with pytest.raises(UnusableModel, match=said) as refused:
        check_model_files(write(tmp_path))
    assert "\n" not in str(refused.value)


def test_models_of_either_form_pass(tmp_path: Path) -> None:
    check_model_files(resolve_model("bundled"))
    check_model_files(gguf_file(tmp_path / "m.gguf", "qwen3"))
    check_model_files(folder(tmp_path / "whole", WHOLE))
    parts = {name: safetensors() for name in INDEX["weight_map"].values()}
    index = {"model.safetensors.index.json": INDEX}
    check_model_files(
        folder(tmp_path / "parts", {**WHOLE, **parts, **index}),
    )
    named_by_its_part = gguf_file(tmp_path / "m-00001-of-00001.gguf")
    check_model_files(named_by_its_part)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "m.gguf"
    loop.symlink_to(loop)
    with pytest.raises(UnusableModel, match=r"m.gguf cannot be read: "):
        check_model_files(loop)


def test_families_are_those_of_the_engine() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)
    assert GGUF_ARCHITECTURES == gguf_shape._FAMILIES
