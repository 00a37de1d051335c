"""Models of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.runtime.settings_sources import join_lists
from gateway.model.named_models import NamedModel, parse_models


def test_path_alone_is_one_model_without_a_name(tmp_path: Path) -> None:
    odd = tmp_path / "a=b,c=d"
    odd.mkdir()
    for path in ("bundled", "/models/x.gguf", str(odd)):
        assert parse_models(path) == (NamedModel(None, path),)


def test_names_stand_before_paths() -> None:
    assert parse_models("org/chat:v1=/m/one,two=~/x=y.gguf") == (
        NamedModel("org/chat:v1", "/m/one"),
        NamedModel("two", "~/x=y.gguf"),
    )
    assert parse_models("chat=/m/a,b") == (NamedModel("chat", "/m/a,b"),)


@pytest.mark.parametrize("text", ["/m/a,/m/b", "a=/m/a,a=/m/b", "a=", "-a=/m/a", "/m/a,b=/m/b"])
def test_what_names_no_models_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME=PATH|the name"):
        parse_models(text)


def test_repeated_flags_are_joined_and_single_ones_left_alone() -> None:
    assert join_lists(["--model", "a=x", "--lora=l=y", "--model=b=z", "prompt"]) == [
        "--model=a=x,b=z",
        "--lora=l=y",
        "prompt",
    ]
    assert join_lists(["generate", "--model", "m", "prompt"]) == ["generate", "--model", "m", "prompt"]
    assert join_lists(["--model-split", "a=x:1,y:2", "--model_split", "b=x"]) == [
        "--model-split=a=x:1,y:2,b=x"
    ]
