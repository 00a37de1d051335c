"""Media types of the images that are decoded, for a gateway that does not import Pillow."""

from typing import Final

MEDIA_TYPES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")
