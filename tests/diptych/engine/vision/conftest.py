"""A tiny model of each family with images, written once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.vision.encoder import ImageEncoder
from diptych.engine.vision.registry import load_encoder
from diptych.image_spec import ImageSpec, image_spec
from diptych.runtime.images.decode import decode
from tests import vision_models

TEXT_HIDDEN = 72


@dataclass(frozen=True)
class Vision:
    """A model, its encoder, and transformers' own of both."""

    family: str
    folder: Path
    spec: ImageSpec
    encoder: ImageEncoder
    model: Any
    processor: Any

    def embeddings(self, *pictures: Any) -> torch.Tensor:
        """Return the rows of pictures, encoded tile by tile."""
        tiles = [
            tile
            for picture in pictures
            for tile in decode(vision_models.png(picture), self.spec, "", 10**7).tiles
        ]
        return torch.cat([self.encoder.encode(torch.from_numpy(tile.copy())) for tile in tiles])

    def inputs(self, pictures: list[Any], words: str = "is") -> dict[str, torch.Tensor]:
        """Return transformers' inputs of a conversation about pictures."""
        parts = [part for _ in pictures for part in ({"type": "text", "text": words}, {"type": "image"})]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        images = [pictures] if self.family == "idefics3" else pictures
        found = self.processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
        names = ("input_ids", "pixel_values", "pixel_attention_mask")
        return {name: found[name] for name in found if name in names}


@pytest.fixture(scope="package", params=vision_models.FAMILIES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    family = request.param
    folder = vision_models.write(family, tmp_path_factory.mktemp(family))
    spec, encoder = image_spec(folder), load_encoder(folder, TEXT_HIDDEN, "fp32")
    assert spec is not None
    assert encoder is not None
    oracle, processor = vision_models.oracle(family, folder), vision_models.processor(family, folder)
    return Vision(family, folder, spec, encoder, oracle, processor)
