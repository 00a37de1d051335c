"""Images in bodies: data URLs, and remote ones, which are fetched or refused where images are decoded."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb

_HEAD: Final = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?(?:;[a-z-]+=[^;,]*)*(;base64)?,", re.IGNORECASE)
_LONGEST_HEAD: Final = 256
_JPG: Final = {"image/jpg": "image/jpeg"}


def put_image(path: str, url: str, image: pb.Image) -> None:
    """Read the URL at ``path`` into ``image``. Raises InvalidParameter."""
    if url[:8].lower().startswith(("http://", "https://")):
        image.url = url
        return
    head = _HEAD.match(url[:_LONGEST_HEAD])
    if head is None:
        raise InvalidParameter(path, "must be a data URL, data:image/png;base64,…, or an http or https URL")
    media_type, encoded = (head[1] or "").lower(), head[2]
    if encoded is None:
        raise InvalidParameter(path, "must be in base64: data:image/png;base64,…")
    put_base64(path, url[head.end() :], media_type, image)


def put_base64(path: str, encoded: str, media_type: str, image: pb.Image) -> None:
    """Read base64 at ``path`` into ``image``. Raises InvalidParameter."""
    try:
        image.data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameter(path, "is not valid base64") from None
    image.media_type = _JPG.get(media_type, media_type)


def check_detail(path: str, detail: str | None) -> None:
    """Raise UnsupportedFeature for a ``detail`` that would change what the model sees."""
    if detail not in (None, "auto", "high"):
        raise UnsupportedFeature(path, "must be auto or high: the model has one resolution for images")
