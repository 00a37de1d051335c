"""Input `image` of a request: a BYTES tensor of image files, shown in one turn of a user ahead of its text.

The name is that of Triton's vLLM backend, whose clients send the files in base64. They are taken so, and as
they are. Unlike there the text has no placeholders: a model's chat template knows where its images stand.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.kserve.parameters import one_text
from gateway.frontends.kserve.tensors import Tensor

IMAGE: Final = "image"
_BEGINNINGS: Final = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8")
"""First bytes of files, none of which begins base64: its alphabet lacks the first two, and a decoded RIFF or
GIF8 is no image.
"""


def put_turn(request: pb.GenerateRequest, prompt: Tensor, images: Tensor) -> dict[str, str]:
    """Set the prompt to a turn with images. Returns path of the core's field → path in the client's message.

    Raises InvalidParameter.
    """
    if prompt.datatype != "BYTES":
        raise InvalidParameter(images.path, "goes with text_input, not with token ids")
    if images.datatype != "BYTES":
        raise InvalidParameter(f"{images.path}.datatype", "must be BYTES")
    turn = request.chat.messages.add(role="user")
    for value in images.values:
        turn.parts.add(image=pb.Image(data=_file(images.path, value)))
    text = one_text(prompt)
    if text:
        turn.parts.add(text=text)
    named = {f"chat.messages[0].parts[{index}].image": images.path for index in range(len(images.values))}
    return {**named, "chat": prompt.path}


def _file(path: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidParameter(f"{path}.datatype", "must be BYTES")
    if not value or value.startswith(_BEGINNINGS):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameter(path, "is no PNG, JPEG, WebP or GIF image, and no base64") from None
