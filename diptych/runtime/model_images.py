"""Images as a served model wants them: a folder by its configs, a GGUF file by the mmproj file beside it.

A mmproj file is named with --mmproj, or lies beside the text model's file with `mmproj` in its name. One that
is named must fit; of those that are found, the largest that fits is taken: the same encoder is published in
several number types.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.image_spec import ImageSpec, UnreadableImages, image_spec
from diptych.mmproj import ImagePair, TextModel, pair_of
from diptych.runtime.gguf_split import first_part
from diptych.runtime.settings import StartupError
from diptych.runtime.tokenizer.gguf_metadata import MalformedGguf, read_metadata, read_with_sizes

_log = logging.getLogger(__name__)
_SUFFIX: Final = ".gguf"
_MARK: Final = "mmproj"


class UnusableMmproj(StartupError, UnreadableImages):
    """A file that was named with --mmproj and is not that of the model."""


@dataclass(frozen=True)
class ModelImages:
    """Images of a model that reads them."""

    spec: ImageSpec
    pair: ImagePair | None = None
    """The pair of GGUF files; None for a folder."""

    @property
    def mmproj(self) -> Path | None:
        """The file with the encoder, where it is not the model's own."""
        return None if self.pair is None else self.pair.mmproj


def model_images(path: Path, mmproj: Path | None = None) -> ModelImages | None:
    """Return how the model at `path` wants images, with the encoder in the file `mmproj` where one is named;
    None for a model of text.

    Raises UnusableMmproj for a file that is not that of the model, UnreadableImages for a folder whose images
    are not read.
    """
    if mmproj is not None:
        pair = _named(path, mmproj)
        return ModelImages(pair.spec, pair)
    if path.is_dir():
        spec = image_spec(path)
        return None if spec is None else ModelImages(spec)
    pairs, others = find_pairs(path)
    for file, why in others.items():
        _log.info("%s beside the model is not taken: %s", file.name, why)
    if not pairs:
        return None
    return ModelImages(pairs[0].spec, pairs[0])


def find_pairs(path: Path) -> tuple[list[ImagePair], dict[Path, str]]:
    """Return the pairs of a GGUF file with mmproj files beside it, the largest first, and why others are
    none.
    """
    pairs: list[ImagePair] = []
    others: dict[Path, str] = {}
    try:
        files = list(_beside(path))
        if not files:
            return pairs, others
        text = _text_model(path)
    except (MalformedGguf, OSError):
        return pairs, others  # the model's own reader says what is wrong with it
    for file in files:
        try:
            pairs.append(_pair(file, text))
        except (UnreadableImages, MalformedGguf, OSError) as error:
            others[file] = str(error)
    pairs.sort(key=lambda pair: (-pair.mmproj.stat().st_size, pair.mmproj.name))
    return pairs, others


def _named(path: Path, mmproj: Path) -> ImagePair:
    if path.is_dir() or path.suffix.lower() != _SUFFIX:
        raise UnusableMmproj(f"--mmproj goes with a GGUF file, {path} has its images' encoder in its folder")
    try:
        return _pair(mmproj, _text_model(path))
    except OSError as error:
        raise UnusableMmproj(f"--mmproj {mmproj}: {error.strerror}") from error
    except (UnreadableImages, MalformedGguf) as error:
        raise UnusableMmproj(f"--mmproj: {error}") from error


def _pair(mmproj: Path, text: TextModel) -> ImagePair:
    keys, sizes = read_with_sizes(mmproj)
    return pair_of(mmproj, keys, sizes, text)


def _text_model(path: Path) -> TextModel:
    keys = read_metadata(first_part(path))
    architecture = str(keys.get("general.architecture"))
    tokens = keys.get("tokenizer.ggml.tokens")
    width = keys.get(f"{architecture}.embedding_length")
    return TextModel(path.name, architecture, width, tokens if isinstance(tokens, list) else [])


def _beside(path: Path) -> Iterator[Path]:
    """Yield the files in a model's folder that are named as mmproj files."""
    if path.suffix.lower() != _SUFFIX or _MARK in path.name.lower():
        return
    for file in sorted(path.parent.iterdir()):
        if file.suffix.lower() == _SUFFIX and _MARK in file.name.lower() and file.is_file():
            yield file
