"""Preparation against transformers' processors with Pillow, and files that are hostile or odd."""

from __future__ import annotations

import io
import random
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from diptych.image_spec import ImageSpec
from diptych.runtime.images.decode import BadImage, decode
from tests.vision_models import picture, png

HALF = (0.5, 0.5, 0.5)
IDEFICS3 = ImageSpec("idefics3", (36, 36), 9, "<image>", 5, 1, 1 / 255, HALF, HALF, 108, splits=True)
LLAVA = ImageSpec("llava", (35, 35), 25, "<image>", 5, 3, 1 / 255, HALF, HALF, shortest_edge=35)
SIZES = [(50, 40), (17, 90), (36, 36), (300, 20), (35, 34), (1, 1), (7, 400), (108, 108), (109, 54)]
EXACT = {"image_mean": HALF, "image_std": HALF}
CASES: dict[str, tuple[ImageSpec, Any]] = {
    "idefics3": (
        IDEFICS3,
        Idefics3ImageProcessorPil(size={"longest_edge": 108}, max_image_size={"longest_edge": 36}, **EXACT),
    ),
    "idefics3_whole": (
        replace(IDEFICS3, splits=False),
        Idefics3ImageProcessorPil(
            size={"longest_edge": 108}, max_image_size={"longest_edge": 36}, do_image_splitting=False, **EXACT
        ),
    ),
    "clip": (
        LLAVA,
        CLIPImageProcessorPil(size={"shortest_edge": 35}, crop_size={"height": 35, "width": 35}, **EXACT),
    ),
    "clip_smaller_than_its_crop": (
        replace(LLAVA, shortest_edge=21),
        CLIPImageProcessorPil(size={"shortest_edge": 21}, crop_size={"height": 35, "width": 35}, **EXACT),
    ),
    "clip_exact": (
        replace(LLAVA, resize_to=(35, 35)),
        CLIPImageProcessorPil(size={"height": 35, "width": 35}, do_center_crop=False, **EXACT),
    ),
    "gemma3": (
        ImageSpec("gemma3", (36, 36), 9, "<image>", 5, 2, 1 / 255, HALF, HALF),
        Gemma3ImageProcessorPil(size={"height": 36, "width": 36}, **EXACT),
    ),
    "llava_padded": (
        replace(LLAVA, pads=True),
        LlavaImageProcessorPil(
            size={"shortest_edge": 35}, crop_size={"height": 35, "width": 35}, do_pad=True, **EXACT
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pixels_equal_transformers(case: str) -> None:
    spec, processor = CASES[case]
    for width, height in SIZES:
        image = picture(width, width, height)
        tiles = decode(png(image), spec, "image/png", 10**6).tiles
        expected = np.asarray(processor(image)["pixel_values"])
        expected = expected.reshape(-1, *expected.shape[-3:])
        scaled = (tiles.astype(np.float64) / 255).astype(np.float32)
        assert np.array_equal((scaled - np.float32(0.5)) / np.float32(0.5), expected), (width, height)


def test_sizes_and_patches_of_qwen_equal_transformers() -> None:
    patch, merge = 6, 2
    unit = patch * merge
    least, most = 4 * unit**2, 40 * unit**2
    spec = ImageSpec("qwen2_vl", (unit, unit), 1, "<image>", 5, 3, 1 / 255, HALF, HALF)
    spec = replace(spec, unit=unit, least_pixels=least, most_pixels=most)
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=merge, size={"shortest_edge": least, "longest_edge": most}, **EXACT
    )
    for width, height in [*SIZES, (900, 5), (500, 400)]:
        image = picture(width, width, height)
        tiles = decode(png(image), spec, "image/png", 10**6).tiles
        found = processor(image)
        high, wide = (int(edge) // merge for edge in found["image_grid_thw"][0][1:])
        assert spec.rows_of(tiles.shape) == high * wide, (width, height)
        squares = np.asarray(found["pixel_values"]).reshape(high, wide, merge, merge, 3, 2, patch, patch)
        first, second = squares[:, :, :, :, :, 0], squares[:, :, :, :, :, 1]
        assert np.array_equal(first, second)
        expected = first.transpose(4, 0, 2, 5, 1, 3, 6).reshape(tiles.shape[1:])
        scaled = (tiles[0].astype(np.float64) / 255).astype(np.float32)
        assert np.array_equal((scaled - np.float32(0.5)) / np.float32(0.5), expected), (width, height)
    with pytest.raises(BadImage, match="200 times"):
        decode(png(picture(1, 603, 3)), spec, "", 10**6)


def test_transparent_palette_gray_and_cmyk_images_are_read() -> None:
    clear = Image.new("RGBA", (40, 40), (200, 0, 0, 0))
    assert (decode(png(clear), LLAVA, "", 10**6).tiles == 255).all()
    for mode, kind in (
        ("P", "GIF"),
        ("L", "JPEG"),
        ("LA", "PNG"),
        ("CMYK", "JPEG"),
        ("1", "PNG"),
        ("P", "PNG"),
    ):
        assert decode(png(picture(3, 40, 50).convert(mode), kind), LLAVA, "", 10**6).tiles.shape == (
            1,
            3,
            35,
            35,
        )


def test_an_image_of_several_parts_has_the_pixels_of_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [picture(5, 61, 47).convert("RGBA"), picture(6, 47, 61).convert("P")]
    found[0].putalpha(picture(7, 61, 47).convert("L"))
    for image in found:
        whole = decode(png(image), IDEFICS3, "", 10**6).tiles
        for part in (1, 20, 100):
            monkeypatch.setattr("diptych.runtime.images.decode._PART_PIXELS", part)
            assert np.array_equal(decode(png(image), IDEFICS3, "", 10**6).tiles, whole)
        monkeypatch.undo()


def test_the_first_frame_of_an_animation_is_read() -> None:
    frames = [picture(seed, 40, 40) for seed in range(3)]
    for kind in ("GIF", "WEBP"):
        moving = png(frames[0], kind, save_all=True, append_images=frames[1:], **_lossless(kind))
        still = png(frames[0], kind, **_lossless(kind))
        assert np.array_equal(decode(moving, LLAVA, "", 10**6).tiles, decode(still, LLAVA, "", 10**6).tiles)


def _lossless(kind: str) -> dict[str, bool]:
    return {"lossless": True} if kind == "WEBP" else {}


def test_an_image_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = picture(4, 60, 40)
    turned = png(upright, "PNG", exif=exif)
    expected = png(upright.transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal(
        decode(turned, IDEFICS3, "", 10**6).tiles, decode(expected, IDEFICS3, "", 10**6).tiles
    )


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """Return a PNG of a few bytes that claims to have many pixels."""
    return _png_of(width, height, 2, bytes(1000))


def clear(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that does have many pixels, of a palette's transparent colour."""
    palette = _chunk(b"PLTE", bytes(3)) + _chunk(b"tRNS", bytes(1))
    return _png_of(width, height, 3, bytes((width + 1) * height), palette)


def _png_of(width: int, height: int, colours: int, lines: bytes, more: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0))
    body = _chunk(b"IDAT", zlib.compress(lines, 1))
    return b"\x89PNG\r\n\x1a\n" + head + more + body + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        pytest.param(bomb(), "", "pixels", id="bomb"),
        pytest.param(bomb(1001, 1000), "", "pixels", id="a-pixel-too-many"),
        pytest.param(png(picture(1, 900, 800), "WEBP"), "", "at most 666666 are decoded", id="much-memory"),
        pytest.param(png(picture(1, 90, 90))[:-200], "", "broken or cut off", id="truncated"),
        pytest.param(b"no image at all", "", "is no PNG", id="text"),
        pytest.param(b"", "", "is no PNG", id="empty"),
        pytest.param(png(picture(1, 9, 9), "BMP"), "", "is no PNG", id="bmp"),
        pytest.param(png(picture(1, 9, 9)), "image/jpeg", "is image/png, not image/jpeg", id="media-type"),
        pytest.param(
            png(Image.fromarray(np.ones((9, 9), dtype=np.uint16))), "", "more than 8 bits", id="16-bit"
        ),
    ],
)
def test_a_bad_file_is_refused_in_words(data: bytes, kind: str, words: str) -> None:
    with pytest.raises(BadImage, match=words):
        decode(data, LLAVA, kind, 10**6)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_damaged_files_are_refused_or_read(kind: str) -> None:
    whole = png(picture(8, 48, 33), kind)
    chosen = random.Random(kind)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chosen.randint(1, 6)):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        try:
            made = decode(bytes(data[: chosen.randint(8, len(data))]), LLAVA, "", 10**6)
        except BadImage:
            continue
        assert made.tiles.shape == (1, 3, 35, 35)


def test_the_file_of_a_picture_is_one() -> None:
    """Control of the damaged ones."""
    assert Image.open(io.BytesIO(png(picture(8, 48, 33)))).size == (48, 33)
