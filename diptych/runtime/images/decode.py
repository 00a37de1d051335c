"""`python -m diptych.runtime.images.decode`: makes tiles of one image file after another.

Runs as a child of the gateway: a file that crashes a decoder, fills memory or takes for ever costs this
process and no other. The kernel bounds its memory, and each file's processor time; past it the kernel ends
the process, and the gateway starts another.

A question is a frame of JSON (`bounded_child`): `spec`, `media_type`, `max_pixels` and `bytes`, the length of
the file, which follows. An answer is a frame of JSON, too: `fault`, words about the file, else `shape`,
`rows` and `columns`, and the tiles' pixels follow.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import warnings
from typing import Any, Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from diptych.image_spec import ImageSpec
from diptych.runtime.bounded_child import bound_process, cpu_limit, frame, read_frame
from diptych.runtime.images.media_types import MEDIA_TYPES
from diptych.runtime.images.prepare import Pixels, Prepared, Unpreparable, prepare

CPU_SECONDS: Final = 10.0
MEMORY_BYTES: Final = 4 << 30  # of address space
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_MEDIA_TYPES: Final = dict(zip(_FORMATS, MEDIA_TYPES, strict=True))
_DEEP: Final = ("I", "F")  # modes of more than 8 bits a channel, with their kin (I;16)


class BadImage(ValueError):
    """An image that is refused; the words follow the name of its field."""


def main() -> None:
    """Serve until the other end closes."""
    bound_process(MEMORY_BYTES)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (asked := read_frame(source)) is not None:
        question = json.loads(asked)
        data = source.read(question["bytes"])
        with cpu_limit(CPU_SECONDS):
            head, pixels = _answer(question, data)
        sink.write(frame(json.dumps(head).encode()))
        sink.write(pixels)
        sink.flush()


def _answer(question: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        made = decode(data, spec_of(question["spec"]), question["media_type"], question["max_pixels"])
    except BadImage as error:
        return {"fault": str(error)}, b""
    except MemoryError:
        return {"fault": "takes too much memory"}, b""
    return {"shape": made.tiles.shape, "rows": made.rows, "columns": made.columns}, made.tiles.tobytes()


def decode(data: bytes, spec: ImageSpec, media_type: str, max_pixels: int) -> Prepared:
    """Return the tiles of an image file. Raises BadImage."""
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            kind = _MEDIA_TYPES[str(image.format)]
            if media_type and media_type != kind:
                raise BadImage(f"is {kind}, not {media_type}")
            if image.width * image.height > max_pixels:
                raise BadImage(f"has {image.width} x {image.height} pixels; at most {max_pixels} are decoded")
            if image.mode.startswith(_DEEP):
                raise BadImage("has more than 8 bits a channel, which is not read")
            image.load()  # of an animation the first frame
            pixels = _rgb(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadImage(f"has more than {max_pixels} pixels, the most that are decoded") from error
    except UnidentifiedImageError as error:
        raise BadImage("is no PNG, JPEG, WebP or GIF image") from error
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        IndexError,
        KeyError,
        TypeError,
    ) as error:
        if isinstance(error, BadImage):
            raise
        # What decoders raise of broken files; their words may quote the file.
        raise BadImage("is broken or cut off") from error
    try:
        return prepare(pixels, spec)
    except Unpreparable as error:
        raise BadImage(str(error)) from error


def _rgb(image: Image.Image) -> Pixels:
    """Return `[3, height, width]`; what is transparent lies on white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)


def spec_of(fields: dict[str, Any]) -> ImageSpec:
    """Return the spec of its fields as JSON has them."""
    given: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()
    }
    return ImageSpec(**given)


if __name__ == "__main__":
    main()
