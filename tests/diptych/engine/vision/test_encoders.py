"""Encoders and steps with rows of images against transformers: embeddings, logits, greedy tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.batch import BatchError, EmbeddingRows, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import BackendChoice, load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.runner import Runner
from diptych.engine.vision.registry import load_encoder
from diptych.runtime.image_positions import grid_positions, position_shift
from diptych.runtime.image_rows import ImageRows
from tests import vision_models
from tests.diptych.engine.vision.conftest import TEXT_HIDDEN, Vision

CLOSE, GREEDY, BLOCKS = 1e-4, 64, 40
PICTURES = [vision_models.picture(1, 50, 40), vision_models.picture(2, 20, 70)]
FOUR = [*PICTURES, vision_models.picture(3, 97, 31), vision_models.picture(4, 110, 120)]


def test_embeddings_equal_transformers_and_do_not_depend_on_the_neighbours(vision: Vision) -> None:
    pixels = vision.inputs(FOUR)
    with torch.inference_mode():
        given = {name: pixels[name] for name in vision_models.PIXELS if name in pixels}
        found = vision.model.get_image_features(**given)
    expected = torch.cat(list(found.pooler_output)).reshape(-1, TEXT_HIDDEN)
    if (deep := getattr(found, "deepstack_features", None)) is not None:
        expected = torch.cat([expected, *(torch.cat(list(layer)) for layer in deep)], dim=1)
    mine = vision.embeddings(*FOUR)
    assert torch.allclose(mine, expected, rtol=0, atol=CLOSE)
    assert torch.equal(mine, torch.cat([vision.embeddings(one) for one in FOUR]))
    # Controls: the images in another order, and one whose patches are shifted by a pixel.
    assert not torch.allclose(mine, vision.embeddings(*reversed(FOUR)), rtol=0, atol=CLOSE)
    tile = torch.from_numpy(vision.tiles(FOUR[0])[0].copy())
    shifted = vision.encoder.encode(tile.roll(1, 2))
    assert torch.equal(vision.encoder.encode(tile), mine[: len(shifted)])
    assert not torch.allclose(shifted, mine[: len(shifted)], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    "backend", ["torch", "native", pytest.param("triton", marks=pytest.mark.full)]
)  # triton runs in its interpreter where there is no GPU: minutes
def test_logits_and_greedy_tokens_equal_transformers(vision: Vision, backend: BackendChoice) -> None:
    inputs = vision.inputs(PICTURES)
    ids = inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        expected = vision.model(**inputs).logits[0]
        found = vision.model.generate(
            **inputs, max_new_tokens=GREEDY, min_new_tokens=GREEDY, do_sample=False, pad_token_id=0
        )
    wanted = found[0].tolist()[-GREEDY:]
    rows = vision.embeddings(*PICTURES)
    runner = Runner(load_model(vision.folder, torch.float32, backend=backend), 1)
    spans = vision.spans(ids, *PICTURES)
    for chunk in (16, 64):
        logits, memory = prefilled(runner, vision, ids, rows, chunk, spans)
        assert torch.allclose(logits, expected, rtol=0, atol=CLOSE)
    eos = vision.model.generation_config.eos_token_id
    assert greedy_tokens(runner, memory, ids, logits[-1], eos, spans) == wanted
    # Controls: rows of the images shifted by one, those behind layers in another order, and grids turned by a
    # quarter.
    shifted, _ = prefilled(runner, vision, ids, rows.roll(1, 0), 64, spans)
    assert not torch.allclose(shifted, expected, rtol=0, atol=CLOSE)
    if rows.shape[1] > TEXT_HIDDEN:
        first, *behind = rows.split(TEXT_HIDDEN, dim=1)
        other, _ = prefilled(runner, vision, ids, torch.cat([first, *reversed(behind)], dim=1), 64, spans)
        assert not torch.allclose(other, expected, rtol=0, atol=CLOSE)
    if vision.spec.whole:  # as if rows saw none behind them
        causal, _ = prefilled(runner, vision, ids, rows, 64, whole=False)
        assert not torch.allclose(causal, expected, rtol=0, atol=CLOSE)
    if spans:
        turned = [span._replace(columns=span.rows // span.columns) for span in spans]
        other, _ = prefilled(runner, vision, ids, rows, 64, turned)
        assert not torch.allclose(other, expected, rtol=0, atol=CLOSE)


def test_a_prompt_with_images_has_the_same_logits_beside_text(vision: Vision) -> None:
    ids = vision.inputs(PICTURES)["input_ids"][0].tolist()
    rows = vision.embeddings(*PICTURES)
    runner = Runner(load_model(vision.folder, torch.float32, backend="native"), 1)
    spans = vision.spans(ids, *PICTURES)
    alone, _ = prefilled(runner, vision, ids, rows, len(ids), spans)
    memory = KVMemory(runner.model.kv_layout(16), 3 * BLOCKS)
    own = SequenceStep(
        memory,
        range(BLOCKS),
        0,
        ids,
        True,
        len(ids),
        embeddings=_of_chunk(vision, ids, rows, 0, len(ids)),
        grid=grid_positions(spans, 0, len(ids)),
    )
    text = [
        SequenceStep(memory, range(BLOCKS * n, BLOCKS * (n + 1)), 0, list(range(5, 5 + 30 * n)), True)
        for n in (1, 2)
    ]
    both = runner.step([text[0], own, text[1]])
    assert torch.equal(both[1:-1], alone)
    assert torch.equal(both[:1], runner.step([text[0]]))


def test_embeddings_outside_of_a_chunk_are_refused(vision: Vision) -> None:
    runner = Runner(load_model(vision.folder, torch.float32, backend="torch"), 1)
    memory = KVMemory(runner.model.kv_layout(16), 4)
    rows = (EmbeddingRows(2, torch.zeros(2, TEXT_HIDDEN)),)
    with pytest.raises(BatchError, match="embeddings of tokens"):
        runner.step([SequenceStep(memory, range(4), 0, [1, 2, 3], True, embeddings=rows)])


def test_a_tensor_that_the_encoder_does_not_read_is_refused_by_name(vision: Vision, tmp_path: Path) -> None:
    folder = shutil.copytree(vision.folder, tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "patch_embed" in name)
    odd = name.partition("patch_embed")[0] + "patch_gate.weight"
    save_file({**tensors, odd: torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=odd):
        load_encoder(folder, TEXT_HIDDEN, "fp32")


def _of_chunk(
    vision: Vision, ids: Sequence[int], rows: torch.Tensor, start: int, end: int
) -> tuple[EmbeddingRows, ...]:
    """Return the embeddings of a chunk, a row at a time."""
    at = [place for place, token in enumerate(ids) if token == vision.spec.token_id]
    assert len(at) == len(rows)
    if vision.spec.whole:
        return _whole_images(vision, at, rows, start, end)
    return tuple(
        EmbeddingRows(place - start, rows[row : row + 1])
        for row, place in enumerate(at)
        if start <= place < end
    )


def _whole_images(
    vision: Vision, at: Sequence[int], rows: torch.Tensor, start: int, end: int
) -> tuple[EmbeddingRows, ...]:
    """Return the embeddings of a chunk, an image at a time."""
    count = vision.spec.rows_per_tile
    return tuple(
        EmbeddingRows(at[row] - start, rows[row : row + count], whole=True)
        for row in range(0, len(rows), count)
        if start <= at[row] < end
    )


def _placed(step: SequenceStep, spans: Sequence[ImageRows]) -> SequenceStep:
    """Return a chunk with the positions of its tokens."""
    grid = grid_positions(spans, step.start, len(step.token_ids))
    return replace(step, grid=grid, shift=position_shift(spans, step.start) if grid is None else 0)


def prefilled(
    runner: Runner,
    vision: Vision,
    ids: Sequence[int],
    rows: torch.Tensor,
    chunk: int,
    spans: Sequence[ImageRows] = (),
    whole: bool = True,
    adapter: int | None = None,
) -> tuple[torch.Tensor, KVMemory]:
    layout, device = runner.model.kv_layout(16), runner.model.device
    on_cpu = device.type == "cpu"
    memory = KVMemory(layout, BLOCKS) if on_cpu else KVMemory.on_device(layout, BLOCKS, device)
    found = []
    end = 0
    while (start := end) < len(ids):
        end = min(start + chunk, len(ids))
        if vision.spec.whole:  # no chunk ends within an image
            inside = [n for n, token in enumerate(ids) if token == vision.spec.token_id]
            while end in inside and end - 1 in inside:
                end += 1
        given = _of_chunk(vision, ids, rows, start, end)
        given = tuple(replace(one, whole=one.whole and whole) for one in given)
        step = _placed(
            SequenceStep(
                memory,
                range(BLOCKS),
                start,
                list(ids[start:end]),
                True,
                end - start,
                embeddings=given,
                adapter=adapter,
            ),
            spans,
        )
        found.append(runner.step([step]).clone())
    return torch.cat(found), memory


def greedy_tokens(
    runner: Runner,
    memory: KVMemory,
    ids: Sequence[int],
    logits: torch.Tensor,
    eos: int,
    spans: Sequence[ImageRows],
    adapter: int | None = None,
) -> list[int]:
    tokens: list[int] = []
    while True:
        logits = logits.clone()
        logits[eos] = -torch.inf
        tokens.append(int(logits.argmax()))
        if len(tokens) == GREEDY:
            return tokens
        lane = len(ids) + len(tokens) - 1
        step = SequenceStep(memory, range(BLOCKS), lane, tokens[-1:], True, adapter=adapter)
        logits = runner.step([_placed(step, spans)])[0]
