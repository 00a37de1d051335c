"""Refusal of files that are no model: each says what it is and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.engine.models.registry import family_of, gguf_family_of
from diptych.model_families import GGUF_ARCHITECTURES, MODEL_TYPES, NOT_COMPUTED
from diptych.runtime.model_files import UnusableModel, check_model_files
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
    code = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    phi3 = {"config.json": {"model_type": "phi3", "auto_map": code}}
    check_model_files(folder(tmp_path / "with code that transformers has, too", {**WHOLE, **phi3}))
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


def test_every_family_of_the_table_is_read_by_the_engine() -> None:
    assert [family_of(name).name for name in MODEL_TYPES] == list(MODEL_TYPES)
    assert [gguf_family_of(name).architecture for name in GGUF_ARCHITECTURES] == list(GGUF_ARCHITECTURES)
    assert not NOT_COMPUTED.keys() & {*MODEL_TYPES, *GGUF_ARCHITECTURES}
