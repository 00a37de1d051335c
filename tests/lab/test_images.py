"""Files that `lab.images` makes, and its table."""

from __future__ import annotations

import itertools

import pytest

from diptych.image_spec import ImageSpec
from diptych.runtime.images.decode import BadImage, decode
from lab import hostile_images
from lab.images import bomb, hostile, picture, table

_HALF = (0.5, 0.5, 0.5)
SPEC = ImageSpec("llava", (8, 8), 4, "<image>", 1, 3, 1 / 255, _HALF, _HALF, resize_to=(8, 8))


def test_pictures_are_images_and_bombs_are_refused_by_their_size() -> None:
    made = [decode(picture(seed), SPEC, "", 1 << 20).tiles.tobytes() for seed in (1, 2)]
    assert made[0] != made[1]
    with pytest.raises(BadImage, match="pixels"):
        decode(bomb(20_000), SPEC, "", 1 << 20)


def test_most_hostile_files_are_refused_and_none_does_worse() -> None:
    refused = 0
    for data in itertools.islice(hostile(3), 60):
        try:
            decode(data, SPEC, "", 1 << 20)
        except BadImage:
            refused += 1
    assert refused >= 30


def test_a_table_has_medians_and_the_range_of_ratios() -> None:
    turns = {"apart": [{"ms": 1.0, "a / b": 1.0}, {"ms": 3.0, "a / b": 1.5}], "inside": []}
    assert table(turns).splitlines()[2:] == ["| ms | 2.0 |", "| a / b | 1.25 (1.00–1.50) |"]


def test_files_of_the_hostile_lab_are_no_images_and_its_addresses_private() -> None:
    for data in hostile_images.broken(20):
        with pytest.raises(BadImage):
            decode(data, SPEC, "", 1 << 20)
        assert hostile_images.data_url(data).startswith("data:image/")
    made = list(hostile_images.addresses(4321, 200))
    assert len(set(made)) == 200
    assert sum(":4321" in url for url in made) > 100
