"""Images of a prompt: which model reads them, the tokens that stand for one, and where its rows are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diptych.image_spec import ImageSpec, UnreadableImages
from diptych.runtime.image_rows import ImageRows, keyed_digest
from diptych.runtime.model_images import UnusableMmproj, model_images
from diptych.runtime.settings import StartupError
from diptych.runtime.tokenizer.control_tokens import ControlToken, ControlTokens
from diptych.runtime.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_ENDS: Final = "<end_of_image>"
_AROUND: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"
TEXT, IMAGE = "text", "image"
"""Modalities of a prompt."""


class UnusableImages(StartupError, ValueError):
    """A model whose images cannot be prepared as its files say."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedImage:
    """An image as tiles of pixels. It is kept until its request ends: a lost worker's successor needs it
    again.
    """

    shape: tuple[int, int, int, int]
    """Tiles, channels, height, width."""
    data: bytes = field(repr=False)
    """Uint8 pixels."""
    rows: int
    columns: int
    """Grid that all tiles but the last form; 0 without a grid."""
    digest: bytes = field(repr=False)
    """`diptych.runtime.image_rows.pixels_digest`."""


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Tokens `first` to `first + rows` of a prompt: rows from `first_row` on of its image number `image`."""

    first: int
    rows: int
    image: int
    first_row: int
    columns: int = 0
    """Columns of the grid on which the rows have their positions; 0: they have their places'."""


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, in its order, and where their rows are."""

    images: tuple[PreparedImage, ...] = field(repr=False)
    places: tuple[ImagePlace, ...]

    @property
    def end(self) -> int:
        """Position after the last row of an image."""
        return self.places[-1].first + self.places[-1].rows

    @property
    def rows(self) -> int:
        """Rows of all images, one that the prompt has twice once."""
        return sum({(at.image, at.first_row): at.rows for at in self.places}.values())

    def digests(self, namespace: bytes) -> list[bytes]:
        """Return the images' digests in a namespace of block hashes."""
        return [keyed_digest(namespace, image.digest) for image in self.images]

    def image_rows(self, namespace: bytes) -> tuple[ImageRows, ...]:
        """Return where the images' rows are, as block hashes and workers take it."""
        digests = self.digests(namespace)
        return tuple(
            ImageRows(at.first, at.rows, digests[at.image], at.first_row, at.columns) for at in self.places
        )


@dataclass(frozen=True)
class ImageSupport:
    """Tokens and tiles of images in the served model."""

    spec: ImageSpec
    control_tokens: ControlTokens
    shown_id: int
    """Id of the token that stands for an image in the chat template."""
    mmproj: Path | None = None
    """The file with the encoder, where that is not the model's own."""

    @classmethod
    def of(cls, path: Path, tokenizer: Tokenizer, mmproj: Path | None = None) -> ImageSupport | None:
        """Return the support of the model at ``path``; None for one that reads text only.

        Raises UnusableImages, UnusableMmproj.
        """
        try:
            found = model_images(path, mmproj)
        except UnusableMmproj:
            raise
        except UnreadableImages as error:
            raise UnusableImages(str(error)) from error
        if found is None:
            return None
        spec = found.spec
        if tokenizer.id_of(spec.token) != spec.token_id:
            raise UnusableImages(f"the tokenizer's {spec.token} is not the config's token {spec.token_id}")
        shown = tokenizer.id_of(spec.shown or spec.token)
        if shown is None:
            raise UnusableImages(f"the tokenizer has no {spec.shown}, which stands for an image")
        return cls(spec, tokenizer.control_tokens, shown, found.mmproj)

    def tokens_of(self, image: PreparedImage) -> tuple[ControlToken | str, ...]:
        """Return what stands for an image in the prompt."""
        return self.control_tokens.split(_text_of(image, self.spec))

    def expand(
        self, parts: Sequence[ControlToken | str], images: Sequence[PreparedImage]
    ) -> tuple[ControlToken | str, ...] | None:
        """Return a rendered conversation with each image's tokens in place of the template's one.

        None: the template has not written one for each image.
        """
        waiting = iter(images)
        made: list[ControlToken | str] = []
        for part in parts:
            if not self._stands_for_image(part):
                made.append(part)
                continue
            image = next(waiting, None)
            if image is None:
                return None
            made += self.tokens_of(image)
        return _neighbours_joined(made) if next(waiting, None) is None else None

    def _stands_for_image(self, part: ControlToken | str) -> bool:
        return isinstance(part, ControlToken) and part.token_id == self.shown_id

    def locate(self, token_ids: Sequence[int], images: tuple[PreparedImage, ...]) -> PromptImages:
        """Return where the rows of images are among the tokens of their prompt.

        Raises ValueError if these are not as many as the images have.
        """
        rows = [self.spec.rows_of(image.shape) for image in images]
        owners = [(number, row) for number, count in enumerate(rows) for row in range(count)]
        at = [place for place, token in enumerate(token_ids) if token == self.spec.token_id]
        if len(at) != len(owners):
            raise ValueError(f"{len(at)} tokens for {len(owners)} rows of images")
        columns = [self.spec.columns_of(image.shape) for image in images]
        places = tuple(_joined(at, owners, columns))
        if any(columns) and len(places) != len(images):
            raise ValueError("an image whose rows form a grid is not in one piece")
        return PromptImages(images, places)


def _neighbours_joined(parts: Sequence[ControlToken | str]) -> tuple[ControlToken | str, ...]:
    """Return parts with neighbouring texts as one: what stands around an image is tokenized with the text
    before it.
    """
    made: list[ControlToken | str] = []
    for part in parts:
        if isinstance(part, str) and made and isinstance(made[-1], str):
            made[-1] += part
        else:
            made.append(part)
    return tuple(made)


def _joined(
    at: Sequence[int], owners: Sequence[tuple[int, int]], columns: Sequence[int]
) -> Iterator[ImagePlace]:
    """Yield the stretches of positions that follow one another and are of one image."""
    begin = 0
    for index in range(1, len(at) + 1):
        if index < len(at) and at[index] == at[index - 1] + 1 and owners[index][0] == owners[begin][0]:
            continue
        image, row = owners[begin]
        yield ImagePlace(at[begin], index - begin, image, row, columns[image])
        begin = index


def _text_of(image: PreparedImage, spec: ImageSpec) -> str:
    if spec.family == "gemma3":
        return f"\n\n{spec.shown}{spec.token * spec.rows_of(image.shape)}{_ENDS}\n\n"
    if spec.family != "idefics3":
        return spec.token * spec.rows_of(image.shape)
    tile = spec.token * spec.rows_per_tile
    whole = f"{_AROUND}{_WHOLE}{tile}{_AROUND}"
    if not image.rows:
        return whole
    lines = (
        "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(image.columns))
        for row in range(image.rows)
    )
    return "".join(f"{line}\n" for line in lines) + "\n" + whole
