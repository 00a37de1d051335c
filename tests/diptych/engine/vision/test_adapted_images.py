"""Adapters of models that read images: transformers' logits and tokens with merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych.engine.adapters.adapter import BadAdapter
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.loaded_model import BackendChoice, load_model
from diptych.engine.runner import Runner
from tests.adapters import merged, write_adapter, write_text_adapter
from tests.diptych.engine.vision.conftest import Vision
from tests.diptych.engine.vision.test_encoders import (
    CLOSE,
    GREEDY,
    PICTURES,
    greedy_tokens,
    prefilled,
)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_logits_and_greedy_tokens_are_those_of_merged_weights(
    vision: Vision, backend: BackendChoice, tmp_path: Path
) -> None:
    """The rows of the images come from the encoder as it is: the adapter changes the text model alone."""
    one, other = (write_text_adapter(tmp_path / str(seed), vision.model, seed=seed) for seed in (1, 2))
    model, inputs = merged(vision.model, one), vision.inputs(PICTURES)
    ids = inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        expected = model(**inputs).logits[0]
        found = model.generate(
            **inputs, max_new_tokens=GREEDY, min_new_tokens=GREEDY, do_sample=False, pad_token_id=0
        )
    runner = Runner(load_model(vision.folder, torch.float32, backend=backend), 1)
    assert runner.allow_adapters(2, 8) is None
    for slot, folder in enumerate((one, other)):
        runner.place_adapter(slot, runner.prepare_adapter(read_adapter(folder, runner.model.shape, 8)))
    spans, rows = vision.spans(ids, *PICTURES), vision.embeddings(*PICTURES)
    logits, memory = prefilled(runner, vision, ids, rows, 16, spans, adapter=0)
    assert torch.allclose(logits, expected, rtol=0, atol=CLOSE)
    eos = vision.model.generation_config.eos_token_id
    tokens = greedy_tokens(runner, memory, ids, logits[-1], eos, spans, adapter=0)
    assert tokens == found[0].tolist()[-GREEDY:]
    for slot in (1, None):  # control: the other adapter, and none
        wrong, _ = prefilled(runner, vision, ids, rows, 64, spans, adapter=slot)
        assert (wrong - expected).abs().max() > 0.01


def test_an_adapter_of_the_encoder_is_refused_by_name(vision: Vision, tmp_path: Path) -> None:
    ends = ("q_proj", "qkv")
    folder = write_adapter(tmp_path / "a", vision.model, seed=1, targets=ends)
    shape = load_model(vision.folder, torch.float32, backend="torch").shape
    with pytest.raises(BadAdapter, match="what encodes images are not computed"):
        read_adapter(folder, shape, 8)
