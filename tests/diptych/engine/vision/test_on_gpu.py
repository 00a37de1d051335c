"""Encoders and text parts of models with images on a GPU: the rows and the tokens of a CPU, in float32."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from diptych.engine.vision.registry import load_encoder
from tests.diptych.engine.vision.conftest import TEXT_HIDDEN, Vision
from tests.diptych.engine.vision.test_encoders import PICTURES, greedy_tokens, prefilled

pytestmark = pytest.mark.gpu
CLOSE = 1e-3
"""Deviation of rows and logits whose products are added in another order."""


@pytest.fixture(autouse=True)
def _full_float32() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = False


def test_an_encoder_gives_the_rows_of_the_cpu(vision: Vision) -> None:
    encoder = load_encoder(vision.folder, TEXT_HIDDEN, "fp32", "cuda")
    assert encoder is not None
    for tile in vision.tiles(PICTURES[0]):
        pixels = torch.from_numpy(tile.copy())
        rows, expected = encoder.encode(pixels), vision.encoder.encode(pixels)
        print(vision.family, "rows", tuple(rows.shape), f"{(rows.cpu() - expected).abs().max():.2e}")
        assert rows.device.type == "cuda"
        assert torch.equal(rows, encoder.encode(pixels))
        assert torch.allclose(rows.cpu(), expected, rtol=0, atol=CLOSE)
    # Control: a patch shifted by one pixel.
    shifted = encoder.encode(pixels.roll(1, 2)).cpu()
    assert not torch.allclose(shifted, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_greedy_tokens_behind_images_are_those_of_the_cpu(vision: Vision, backend: str) -> None:
    encoder = load_encoder(vision.folder, TEXT_HIDDEN, "fp32", "cuda")
    assert encoder is not None
    ids = vision.inputs(PICTURES)["input_ids"][0].tolist()
    spans = vision.spans(ids, *PICTURES)
    eos = vision.model.generation_config.eos_token_id
    found = []
    for device, name in (("cpu", "torch"), ("cuda", backend)):
        of_device = vision.with_encoder(vision.encoder if device == "cpu" else encoder)
        rows = of_device.embeddings(*PICTURES)
        runner = Runner(load_model(vision.folder, torch.float32, backend=name, device=device), 1)  # type: ignore[arg-type]
        logits, memory = prefilled(runner, vision, ids, rows, 64, spans)
        found.append((logits.cpu(), greedy_tokens(runner, memory, ids, logits[-1], eos, spans)))
    print(vision.family, backend, f"logits {(found[0][0] - found[1][0]).abs().max():.2e}")
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=CLOSE)
    assert found[0][1] == found[1][1]
    # Control: the rows of the images shifted by one.
    other, _ = prefilled(runner, vision, ids, rows.roll(1, 0), 64, spans)
    assert not torch.allclose(other.cpu(), found[0][0], rtol=0, atol=CLOSE)
