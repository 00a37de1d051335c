"""Registry of the image encoders, by the family of the spec (diptych/image_spec.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from diptych.engine.dtype import Precision, plain_dtype
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.vision.encoder import EncoderSource, ImageEncoder
from diptych.engine.vision.gemma3 import Gemma3Encoder
from diptych.engine.vision.idefics3 import Idefics3Encoder
from diptych.engine.vision.llava import LlavaEncoder
from diptych.engine.vision.mmproj_tensors import MmprojTensors
from diptych.engine.vision.qwen2_vl import QwenEncoder
from diptych.engine.vision.qwen3_vl import Qwen3Encoder
from diptych.engine.weights.tensor_files import TensorFiles
from diptych.image_spec import ImageSpec, UnreadableImages, image_spec
from diptych.mmproj import ImagePair

_ENCODERS: dict[str, Callable[[EncoderSource], ImageEncoder]] = {
    "gemma3": Gemma3Encoder,
    "idefics3": Idefics3Encoder,
    "llava": LlavaEncoder,
    "qwen2_vl": QwenEncoder,
    "qwen3_vl": Qwen3Encoder,
}


class FolderTensors(TensorFiles):
    """The tensors of a folder; implements `EncoderFiles`."""

    def stored_name(self, name: str) -> str:
        """See `EncoderFiles.stored_name`."""
        return name


def rows_dtype(precision: Precision) -> torch.dtype:
    """Return what an image encoder computes in, and what its rows are of: the plain type, else float32."""
    return plain_dtype(precision) or torch.float32


def load_encoder(
    path: Path,
    text_hidden: int,
    precision: Precision,
    device: torch.device | str = "cpu",
    *,
    pair: ImagePair | None = None,
    spec: ImageSpec | None = None,
) -> ImageEncoder | None:
    """Return the image encoder of the model at `path`, or that of the mmproj file of its `pair`; None if the
    model reads text only.

    It computes in `rows_dtype`. `spec` is that of a folder, where it was read already. Raises
    UnsupportedModel, BadModelFile.
    """
    where, dtype = torch.device(device), rows_dtype(precision)
    if pair is not None:
        tensors = MmprojTensors(pair.mmproj, pair.spec.family)
        source = EncoderSource(pair.config, pair.spec, tensors, text_hidden, dtype, where)
        return _ENCODERS[pair.spec.family](source)
    try:
        spec = spec or image_spec(path)
    except UnreadableImages as error:
        raise UnsupportedModel(str(error)) from error
    if spec is None:
        return None
    config = json.loads((path / "config.json").read_bytes())
    source = EncoderSource(config, spec, FolderTensors(path), text_hidden, dtype, where)
    return _ENCODERS[spec.family](source)
