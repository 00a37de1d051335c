"""The framing between the gateway and the child that decodes images: a length, and so many bytes."""

import struct
from typing import Final

LENGTH: Final = struct.Struct("<I")
MEDIA_TYPES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")
