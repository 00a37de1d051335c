"""The images of one prompt: their pixels until they are encoded, then their embeddings.

A prompt needs the images whose rows are not cached: those that end after its computed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from diptych.engine.batch import EmbeddingRows
from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.runtime.image_rows import ImageRows


@dataclass(slots=True, eq=False)
class ImageState:
    """An image on its way from tiles of pixels to rows of embeddings."""

    digest: bytes
    tiles: torch.Tensor | None
    """Uint8 `[tiles, channels, height, width]`; None once encoded, or where another worker encodes."""
    done: list[torch.Tensor] = field(default_factory=list)
    """Embeddings of the first tiles."""
    rows: torch.Tensor | None = None
    """`[rows, hidden]`, when all tiles are encoded."""

    def next_tile(self) -> torch.Tensor:
        """Return the tile to encode. Raises RuntimeError if there is none."""
        if self.tiles is None:
            raise RuntimeError("the image is encoded")
        return self.tiles[len(self.done)]

    def add(self, rows: torch.Tensor) -> bool:
        """Take the embeddings of the next tile; return whether the image is complete. Its pixels go then."""
        self.done.append(rows)
        if self.tiles is None or len(self.done) < len(self.tiles):
            return False
        self.complete(torch.cat(self.done))
        return True

    def take_cached(self, cache: EmbeddingCache) -> bool:
        """Take the embeddings that `cache` has of it; return whether it has them."""
        if (rows := cache.get(self.digest)) is None:
            return False
        self.complete(rows)
        return True

    def complete(self, rows: torch.Tensor) -> None:
        """Take the embeddings of the whole image."""
        self.rows, self.tiles = rows, None
        self.done.clear()


@dataclass(slots=True, eq=False)
class RequestImages:
    """The images of an attempt, by digest, and where their rows are."""

    spans: Sequence[ImageRows]
    states: Mapping[bytes, ImageState]
    whole: bool = False
    """Rows of an image see one another: no chunk ends among them."""
    awaited: set[bytes] = field(default_factory=set)
    """Digests of images whose rows are to come from an encode worker."""
    fetched_at: float | None = None
    """Time of the last rows that came before the prompt's grant; None if it waited for none."""
    encoded_at: float | None = None
    """Time of the last rows that were made, or came, after its grant; likewise."""

    def unbroken(self, computed: int) -> tuple[tuple[int, int], ...]:
        """Return begin and end of the stretches after the first `computed` tokens within which no chunk may
        end; counted from there.
        """
        if not self.whole:
            return ()
        return tuple(
            (span.first - computed, span.end - computed) for span in self.spans if span.end > computed
        )

    def ready(self, computed: int) -> bool:
        """Return whether all images are encoded that have rows after the first `computed` tokens."""
        return not self.missing(computed)

    def missing(self, computed: int) -> list[bytes]:
        """Return the digests of images that are needed after `computed` tokens and not encoded, in order."""
        needed = dict.fromkeys(span.digest for span in self.spans if span.end > computed)
        return [digest for digest in needed if self.states[digest].rows is None]

    def next_to_encode(self, computed: int) -> ImageState | None:
        """Return the first image that is needed after `computed` tokens, not encoded, and here as pixels;
        None if there is none.
        """
        waiting = (self.states[digest] for digest in self.missing(computed))
        return next((image for image in waiting if image.tiles is not None), None)

    def rows(self, start: int, tokens: int) -> list[EmbeddingRows]:
        """Return the embeddings of a chunk of `tokens` tokens from position `start` on.

        Raises RuntimeError for an image that is not encoded.
        """
        found = []
        for span in self.spans:
            first, end = max(span.first, start), min(span.end, start + tokens)
            if first >= end:
                continue
            rows = self.states[span.digest].rows
            if rows is None:
                raise RuntimeError("a chunk needs an image that is not encoded")
            row = span.first_row + first - span.first
            found.append(EmbeddingRows(first - start, rows[row : row + end - first], self.whole))
        return found
