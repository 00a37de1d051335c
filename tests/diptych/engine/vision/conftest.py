"""A tiny model of each family with images, written once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.vision.encoder import ImageEncoder
from diptych.engine.vision.registry import load_encoder
from diptych.image_spec import ImageSpec, image_spec
from diptych.runtime.image_rows import ImageRows
from diptych.runtime.images.decode import decode
from diptych.runtime.images.prepare import Pixels
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
        tiles = [tile for picture in pictures for tile in self.tiles(picture)]
        return torch.cat([self.encoder.encode(torch.from_numpy(tile.copy())) for tile in tiles])

    def spans(self, ids: Sequence[int], *pictures: Any) -> list[ImageRows]:
        """Return where the rows of pictures are in a prompt, of pictures in one piece each."""
        if not self.spec.unit:
            return []
        found, place = [], 0
        for picture in pictures:
            shape = self.tiles(picture).shape
            place = ids.index(self.spec.token_id, place)
            columns = self.spec.columns_of(shape)
            found.append(ImageRows(place, self.spec.rows_of(shape), b"", columns=columns))
            place = found[-1].end
        return found

    def with_encoder(self, encoder: ImageEncoder) -> Vision:
        """Return the same model with another encoder."""
        return replace(self, encoder=encoder)

    def tiles(self, picture: Any) -> Pixels:
        """Return the tiles of a picture."""
        return decode(vision_models.png(picture), self.spec, "", 10**7).tiles

    def inputs(self, pictures: list[Any], words: str = "is") -> dict[str, torch.Tensor]:
        """Return transformers' inputs of a conversation about pictures."""
        parts = [part for _ in pictures for part in ({"type": "text", "text": words}, {"type": "image"})]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        return vision_models.inputs_of(self.processor, self.family, text, pictures)


@pytest.fixture(scope="package", params=[*vision_models.FAMILIES, "llava_qwen2", "qwen2_vl", "qwen3_vl"])
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    family = request.param
    folder = vision_models.write(family, tmp_path_factory.mktemp(family))
    spec, encoder = image_spec(folder), load_encoder(folder, TEXT_HIDDEN, "fp32")
    assert spec is not None
    assert encoder is not None
    oracle, processor = vision_models.oracle(family, folder), vision_models.processor(family, folder)
    return Vision(family, folder, spec, encoder, oracle, processor)
