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
from diptych.runtime.bounded_child import bound_data, bound_process, cpu_limit, frame, read_frame
from diptych.runtime.images.media_types import MEDIA_TYPES
from diptych.runtime.images.prepare import Pixels, Prepared, Unpreparable, prepare

CPU_SECONDS: Final = 2.0
ADDRESS_BYTES: Final = 4 << 30
"""Address space of the process."""
MEMORY_BYTES: Final = 440 << 20
"""Memory for an image beside the some 30 MiB of the process itself, with the pixels of the default limit."""
DEFAULT_PIXELS: Final = 36_000_000
_PART_PIXELS: Final = 1 << 20
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_MEDIA_TYPES: Final = dict(zip(_FORMATS, MEDIA_TYPES, strict=True))
_DEEP: Final = ("I", "F")  # modes of more than 8 bits a channel, with their kin (I;16)


class BadImage(ValueError):
    """An image that is refused; the words follow the name of its field."""


def main() -> None:
    """Serve until the other end closes."""
    bound_process(ADDRESS_BYTES)
    bounded = False
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (asked := read_frame(source)) is not None:
        question = json.loads(asked)
        if not bounded:
            bounded = True
            bound_data(MEMORY_BYTES * max(1, question["max_pixels"] // DEFAULT_PIXELS))
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
    """Return the tiles of an image file. Raises BadImage, MemoryError."""
    pixels = _read(data, media_type, max_pixels)
    try:
        return prepare(pixels, spec)
    except Unpreparable as error:
        raise BadImage(str(error)) from error
    except (OverflowError, ValueError) as error:  # Pillow's, of an edge beyond all numbers or of none
        height, width = pixels.shape[1:]
        raise BadImage(f"of {width} x {height} pixels cannot be resized for this model") from error


def _read(data: bytes, media_type: str, max_pixels: int) -> Pixels:
    """Return the pixels `[3, height, width]` of an image file. Raises BadImage, MemoryError."""
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            kind = _MEDIA_TYPES[str(image.format)]
            if media_type and media_type != kind:
                raise BadImage(f"is {kind}, not {media_type}")
            most = max_pixels if image.format != "WEBP" else max_pixels * 2 // 3
            if image.width * image.height > most:
                raise BadImage(f"has {image.width} x {image.height} pixels; at most {most} are decoded")
            if image.mode.startswith(_DEEP):
                raise BadImage("has more than 8 bits a channel, which is not read")
            image.load()  # of an animation the first frame
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)
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


def _rgb(image: Image.Image) -> Pixels:
    """Return `[3, height, width]`; what is transparent lies on white.

    Part by part: an image that is converted as a whole is there four times meanwhile.
    """
    width, height = image.size
    found = np.empty((height, width, 3), dtype=np.uint8)
    wide = min(width, _PART_PIXELS)
    high = max(1, _PART_PIXELS // wide)
    clear = "A" in image.getbands() or image.info.get("transparency") is not None
    for top in range(0, height, high):
        for left in range(0, width, wide):
            part = image.crop((left, top, min(left + wide, width), min(top + high, height)))
            there = found[top : top + high, left : left + wide]
            there[:] = np.asarray((_on_white(part) if clear else part).convert("RGB"))
    return np.moveaxis(found, -1, 0)


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA"))


def spec_of(fields: dict[str, Any]) -> ImageSpec:
    """Return the spec of its fields as JSON has them."""
    given: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()
    }
    return ImageSpec(**given)


if __name__ == "__main__":
    main()
