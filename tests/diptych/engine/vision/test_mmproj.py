"""Pairs of GGUF files against the folders that they were made of, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.loaded_model import load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.runner import Runner
from diptych.engine.vision.registry import load_encoder
from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_images import ModelImages, UnusableMmproj, find_pairs, model_images
from tests import mmproj_twins, vision_models
from tests.diptych.engine.vision.conftest import TEXT_HIDDEN, Vision
from tests.diptych.engine.vision.test_encoders import PICTURES, greedy_tokens, prefilled
from tests.mmproj_twins import Keys, Tensors

CLOSE = 1e-4
_PREFIX = "clip.vision."


@dataclass(frozen=True)
class Twin:
    """A model's folder, its pair of files, and what is in the second one."""

    vision: Vision
    folder: Path
    text: Path
    mmproj: Path
    keys: Keys
    tensors: Tensors

    def other(self, name: str, change: Callable[[Keys, Tensors], None]) -> Path:
        """Write the mmproj file with a change, into a folder of its own; return its path."""
        keys, tensors = dict(self.keys), dict(self.tensors)
        change(keys, tensors)
        folder = self.mmproj.parent / name
        folder.mkdir(exist_ok=True)
        return mmproj_twins.write_mmproj(folder / "mmproj.gguf", keys, tensors)

    @property
    def seen(self) -> ModelImages:
        found = model_images(self.text)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def twin(vision: Vision, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    if vision.family not in mmproj_twins.FAMILIES:
        pytest.skip("its pairs are not read")
    at = tmp_path_factory.mktemp("pair")
    folder = vision.folder
    if vision.family == "gemma3":  # in a GGUF file each sixth layer has full attention: here none
        folder = mmproj_twins.with_windows_only(folder, at / "folder")
    pair = mmproj_twins.write(vision.family, folder, at)
    oracle = vision_models.oracle(vision.family, folder)
    return Twin(vision, folder, pair.text, pair.mmproj, *mmproj_twins.mmproj(vision.family, oracle, folder))


def test_a_pair_computes_what_its_folder_does(twin: Twin) -> None:
    vision, seen = twin.vision, twin.seen
    assert seen.mmproj == twin.mmproj
    spec = replace(seen.spec, mean=vision.spec.mean, std=vision.spec.std)
    assert spec == vision.spec
    assert np.allclose(
        [seen.spec.mean, seen.spec.std], [vision.spec.mean, vision.spec.std], rtol=0, atol=1e-7
    )
    encoder = load_encoder(twin.text, TEXT_HIDDEN, "fp32", pair=seen.pair)
    assert encoder is not None
    paired = replace(vision, spec=seen.spec, encoder=encoder)
    rows = paired.embeddings(*PICTURES)
    assert torch.equal(rows, vision.embeddings(*PICTURES))
    ids = vision.inputs(PICTURES)["input_ids"][0].tolist()
    spans = paired.spans(ids, *PICTURES)
    eos = vision.model.generation_config.eos_token_id
    answers = []
    for path in (twin.text, twin.folder):
        runner = Runner(load_model(path, torch.float32, backend="native"), 1)
        logits, memory = prefilled(runner, paired, ids, rows, 64, spans)
        answers.append((logits, greedy_tokens(runner, memory, ids, logits[-1], eos, spans)))
    assert torch.allclose(answers[0][0], answers[1][0], rtol=0, atol=CLOSE)
    assert answers[0][1] == answers[1][1]


def test_tensors_in_each_others_place_show(twin: Twin) -> None:
    def swap(keys: Keys, tensors: Tensors) -> None:
        first, second = (f"v.blk.0.attn_{part}.weight" for part in "qk")
        if twin.vision.family == "qwen3_vl":  # which has the two in one
            first, second = (f"v.deepstack.{layer}.fc1.weight" for layer in (0, 1))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    other = model_images(twin.text, twin.other("swapped", swap))
    assert other is not None
    encoder = load_encoder(twin.text, TEXT_HIDDEN, "fp32", pair=other.pair)
    assert encoder is not None
    rows = replace(twin.vision, encoder=encoder).embeddings(PICTURES[0])
    assert not torch.allclose(rows, twin.vision.embeddings(PICTURES[0]), rtol=0, atol=CLOSE)


def test_a_tensor_that_no_encoder_has_is_refused_by_name(twin: Twin) -> None:
    def add(keys: Keys, tensors: Tensors) -> None:
        tensors["v.blk.0.ls1.weight"] = np.ones(40, np.float32)

    other = model_images(twin.text, twin.other("more", add))
    assert other is not None
    with pytest.raises(UnsupportedModel, match=r"v\.blk\.0\.ls1\.weight"):
        load_encoder(twin.text, TEXT_HIDDEN, "fp32", pair=other.pair)


def _set(key: str, value: Any) -> Callable[[Keys, Tensors], None]:
    return lambda keys, tensors: keys.__setitem__(key, value)


def _drop(key: str) -> Callable[[Keys, Tensors], None]:
    def drop(keys: Keys, tensors: Tensors) -> None:
        del keys[key]

    return drop


def _narrow(keys: Keys, tensors: Tensors) -> None:
    for name, axis in (("mm.2.weight", 0), ("mm.model.fc.weight", 0), ("mm.input_projection.weight", 1)):
        if name in tensors:
            tensors[name] = np.take(tensors[name], range(TEXT_HIDDEN - 8), axis)


REFUSED: dict[str, tuple[Callable[[Keys, Tensors], None], str]] = {
    "projector": (
        _set("clip.projector_type", "resampler"),
        "clip.projector_type 'resampler' is not computed",
    ),
    "audio": (_set("clip.has_vision_encoder", False), "clip.has_vision_encoder"),
    "mean": (_drop(f"{_PREFIX}image_mean"), f"{_PREFIX}image_mean must be three numbers"),
    "heads": (_set(f"{_PREFIX}attention.head_count", 0), "attention.head_count must be a whole number"),
    "width": (_narrow, "makes rows of 64 numbers, model.gguf takes 72"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_says_and_is_not_computed_is_refused_by_its_key(twin: Twin, case: str) -> None:
    change, words = REFUSED[case]
    with pytest.raises(UnusableMmproj, match=words):
        model_images(twin.text, twin.other(case, change))


def test_a_file_of_another_model_is_refused_by_name(twin: Twin, tmp_path: Path) -> None:
    other = "idefics3" if "qwen" in twin.vision.family or twin.vision.family == "gemma3" else "qwen2_5_vl"
    folder = tmp_path / other
    folder.mkdir()
    pair = mmproj_twins.write(other, vision_models.write(other, folder), tmp_path)
    with pytest.raises(UnusableMmproj, match=r"mmproj-model\.gguf .* is of .* text models, model\.gguf is a"):
        model_images(twin.text, pair.mmproj)
    with pytest.raises(UnusableMmproj, match=r"model\.gguf is no mmproj file"):
        model_images(twin.text, pair.text)
    with pytest.raises(UnusableMmproj, match="goes with a GGUF file"):
        model_images(folder, pair.mmproj)
    with pytest.raises(UnusableMmproj, match="No such file"):
        model_images(twin.text, tmp_path / "none.gguf")


def test_of_files_beside_the_model_the_largest_that_fits_is_taken(twin: Twin, tmp_path: Path) -> None:
    text = tmp_path / "model.gguf"
    text.symlink_to(twin.text)
    assert model_images(text) is None
    half = {name: array.astype(np.float16) for name, array in twin.tensors.items()}
    small = mmproj_twins.write_mmproj(tmp_path / "a-mmproj-f16.gguf", twin.keys, half)
    alone = model_images(text)
    assert alone is not None
    assert alone.mmproj == small
    large = mmproj_twins.write_mmproj(tmp_path / "b-mmproj-f32.gguf", twin.keys, twin.tensors)
    odd = mmproj_twins.write_mmproj(
        tmp_path / "c-mmproj.gguf", {**twin.keys, "clip.projector_type": "ldp"}, twin.tensors
    )
    found = model_images(text)
    assert found is not None
    assert found.mmproj == large
    assert list(find_pairs(text)[1]) == [odd]
    digests = {model_digest(text), model_digest(text, small), model_digest(text, large)}
    assert len(digests) == 3


def test_file_in_a_folder_that_cannot_be_listed_is_a_model_of_text(tmp_path: Path) -> None:
    assert model_images(tmp_path / "absent" / "model.gguf") is None
