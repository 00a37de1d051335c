"""The rows of an image in a prompt, and the digests by which gateway and workers tell images apart.

An image is decoded and resized in the gateway to `Pixels`: tiles of equal size. Their digest has two steps.
The first is of the pixels alone and is made once; the second is keyed by the namespace of the request's block
hashes, which holds the server's secret, tenant, salt and model: two tenants' digests of one image have
nothing in common.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

DIGEST_BYTES = 32


class ImageRows(NamedTuple):
    """Tokens `first` to `first + rows` of a prompt, which stand for rows of an image's embeddings."""

    first: int
    rows: int
    digest: bytes
    """Digest of the image: `keyed_digest`."""
    first_row: int = 0
    """Number of the first of them among the image's rows."""
    columns: int = 0
    """Columns of the grid that gives them their positions (image_positions.py); 0: positions are places."""

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + self.rows


def pixels_digest(shape: Sequence[int], data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32-byte digest of uint8 pixels of `shape` (tiles, channels, height, width)."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"diptych pixels")
    digest.update(struct.pack("<4I", *shape))
    digest.update(data)
    return digest.digest()


def keyed_digest(namespace: bytes, pixels: bytes) -> bytes:
    """Return the digest of an image in a namespace of block hashes; `pixels` is its `pixels_digest`."""
    return hashlib.blake2b(pixels, digest_size=DIGEST_BYTES, key=namespace, person=b"diptych image").digest()


def last_image_position(images: Sequence[ImageRows]) -> int:
    """Return the position after the last row of an image; 0 without images."""
    return max((image.end for image in images), default=0)
