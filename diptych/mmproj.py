"""The image part of a GGUF model: what a `mmproj` file's metadata says, in the fields of a folder's configs.

llama.cpp's converter writes the encoder of a model's images into a file of its own: architecture `clip`, keys
below `clip.vision.`, tensors `v.` (encoder) and `mm.` (what makes rows for the text model). Here its keys
become those of a `config.json` and of an image processor, so that one reader knows each family
(diptych/image_spec.py). What a family has and the file does not say is as published: how the sides of an
image are resized, and with which of Pillow's filters. Data and plain functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from diptych.image_spec import ImageSpec, UnreadableImages, spec_of_config

ARCHITECTURE: Final = "clip"
"""`general.architecture` of mmproj files."""
Sizes = Mapping[str, Sequence[int]]
"""Tensors of a file and their sizes, rows first."""
_VISION: Final = "clip.vision."
_QWEN_WINDOW: Final = 112
_QWEN_TOKENS: Final = (8, 4096)
"""Rows of one image of Qwen-VL, where the file does not bound its pixels: those of llama.cpp."""
_GEMMA_POOL: Final = 4
_DIGITS: Final = 10


@dataclass(frozen=True)
class ImagePair:
    """A text model's GGUF file and the file with the encoder of its images."""

    mmproj: Path
    config: Mapping[str, Any]
    """Fields as a folder's config.json has them."""
    spec: ImageSpec


@dataclass(frozen=True)
class _Projector:
    """Models of one `clip.projector_type`."""

    model_type: str
    texts: Collection[str]
    """Architectures of their text models; empty: any but those with positions of their own."""
    tokens: Sequence[str]
    """Tokens that may stand for a row of an image: the first that the vocabulary has."""
    width: tuple[str, int]
    """The tensor that makes rows for the text model, and the axis of their width."""
    fields: Callable[[_Keys], tuple[dict[str, Any], dict[str, Any]]]
    """Returns fields of the config and of the image processor."""


@dataclass(frozen=True)
class TextModel:
    """Properties of a text model that its GGUF file tells."""

    name: str
    architecture: str
    width: object
    tokens: Sequence[object]


def pair_of(mmproj: Path, keys: Mapping[str, object], sizes: Sizes, text: TextModel) -> ImagePair:
    """Return the pair of a text model and the mmproj file with these keys and tensors.

    Raises UnreadableImages, naming the key, for a file that is not read or is another model's.
    """
    if keys.get("general.architecture") != ARCHITECTURE:
        raise UnreadableImages(f"{mmproj.name} is no mmproj file: general.architecture is not {ARCHITECTURE}")
    if keys.get("clip.has_vision_encoder") is not True:
        raise UnreadableImages(f"{mmproj.name} has no encoder of images (clip.has_vision_encoder)")
    named = keys.get("clip.vision.projector_type", keys.get("clip.projector_type", "mlp"))
    projector = _PROJECTORS.get(str(named))
    if projector is None:
        known = ", ".join(_PROJECTORS)
        raise UnreadableImages(f"{mmproj.name}: clip.projector_type {named!r} is not computed; {known} are")
    _check_text(mmproj, str(named), projector, sizes, text)
    token = next((one for one in projector.tokens if one in text.tokens), None)
    if token is None:
        raise UnreadableImages(f"{text.name} has no token {projector.tokens[0]}, which stands for an image")
    config, processor = projector.fields(_Keys(mmproj.name, keys, sizes))
    config = {"model_type": projector.model_type, "image_token_id": text.tokens.index(token), **config}
    try:
        spec = spec_of_config(config, processor)
    except UnreadableImages as error:
        raise UnreadableImages(f"{mmproj.name}, in a folder's words: {error}") from error
    return ImagePair(mmproj, config, replace(spec, token=token))


def _check_text(mmproj: Path, named: str, projector: _Projector, sizes: Sizes, text: TextModel) -> None:
    """Raise UnreadableImages unless the encoder's rows are of the text model's kind and width."""
    with_own = {name for one in _PROJECTORS.values() for name in one.texts}
    fits = text.architecture in projector.texts if projector.texts else text.architecture not in with_own
    if not fits:
        of = " or ".join(projector.texts) or "other"
        raise UnreadableImages(
            f"{mmproj.name} (clip.projector_type {named}) is of {of} text models, {text.name} is a "
            f"{text.architecture}: give the mmproj file of the same model"
        )
    tensor, axis = projector.width
    size = sizes.get(tensor)
    if size is None or len(size) != 2:
        raise UnreadableImages(f"{mmproj.name}: tensor {tensor} is missing or no matrix")
    if size[axis] != text.width:
        raise UnreadableImages(
            f"{mmproj.name} makes rows of {size[axis]} numbers, {text.name} takes {text.width} "
            "(embedding_length): give the mmproj file of the same model"
        )


@dataclass(frozen=True)
class _Keys:
    """Keys and tensors of a mmproj file. Its methods raise UnreadableImages, naming the key."""

    file: str
    values: Mapping[str, object]
    sizes: Sizes

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number above 0."""
        value = self.values.get(_VISION + name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnreadableImages(f"{self.file}: {_VISION}{name} must be a whole number above 0")
        return value

    def number(self, name: str) -> float:
        """Return a number above 0."""
        value = self.values.get(_VISION + name)
        if not isinstance(value, float) or not value > 0:
            raise UnreadableImages(f"{self.file}: {_VISION}{name} must be a number above 0")
        return _short(value)

    def channels(self) -> dict[str, Any]:
        """Return mean and deviation of the channels; both must be there."""
        found: dict[str, Any] = {}
        for name in ("image_mean", "image_std"):
            values = self.values.get(_VISION + name)
            if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
                raise UnreadableImages(f"{self.file}: {_VISION}{name} must be three numbers")
            found[name] = [_short(value) for value in values]
        return found

    def flag(self, name: str) -> bool:
        return self.values.get(f"clip.{name}") is True

    def refuse(self, *names: str) -> None:
        for name in names:
            if self.values.get(_VISION + name) not in (None, [], "", 0, "flat"):
                raise UnreadableImages(f"{self.file}: {_VISION}{name} is not computed")

    def inner(self, hidden: int) -> int:
        """Return the width between the two matrices of a feed-forward, which old converters named in turn."""
        size = self.sizes.get("v.blk.0.ffn_up.weight", ())
        if len(size) != 2 or hidden not in size:
            raise UnreadableImages(
                f"{self.file}: tensor v.blk.0.ffn_up.weight is missing or of another width"
            )
        return size[0] if size[1] == hidden else size[1]

    def transformer(self, kind: str, activation: str) -> dict[str, Any]:
        """Return the `vision_config` of an encoder of SigLIP's or CLIP's form."""
        hidden = self.whole("embedding_length")
        return {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": self.inner(hidden),
            "num_hidden_layers": self.whole("block_count"),
            "num_attention_heads": self.whole("attention.head_count"),
            "image_size": self.whole("image_size"),
            "patch_size": self.whole("patch_size"),
            "layer_norm_eps": self.number("attention.layer_norm_epsilon"),
            "hidden_act": activation,
        }


def _short(value: float) -> float:
    """Return the shortest decimal number that this float32 stands for, as configs have it: 0.5 or 1e-06."""
    stored = struct.pack("<f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, _DIGITS))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == stored), value)


def _idefics3(keys: _Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    edge = keys.whole("image_size")
    config = {
        "vision_config": keys.transformer("idefics3_vision", "gelu_pytorch_tanh"),
        "scale_factor": keys.whole("projector.scale_factor"),
    }
    longest = keys.whole("preproc_image_size", edge)
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": edge}}
    return config, {**sizes, **keys.channels()}


def _gemma3(keys: _Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    edge, patch = keys.whole("image_size"), keys.whole("patch_size")
    side = edge // patch // keys.whole("projector.scale_factor", _GEMMA_POOL)
    config = {
        "vision_config": keys.transformer("siglip_vision_model", "gelu_pytorch_tanh"),
        "mm_tokens_per_image": side**2,
    }
    return config, {"size": {"height": edge, "width": edge}, **keys.channels()}


def _llava(keys: _Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    keys.refuse("image_grid_pinpoints", "mm_patch_merge_type")
    vision = keys.transformer("clip_vision_model", "gelu" if keys.flag("use_gelu") else "quick_gelu")
    layers: object = keys.values.get(_VISION + "feature_layer") or [vision["num_hidden_layers"]]
    if not isinstance(layers, list) or len(layers) != 1:
        raise UnreadableImages(f"{keys.file}: {_VISION}feature_layer: several layers are not computed")
    config = {
        "vision_config": vision,
        "vision_feature_layer": layers[0],
        "multimodal_projector_bias": "mm.0.bias" in keys.sizes,
    }
    edge = vision["image_size"]
    return config, {
        "size": {"shortest_edge": edge},
        "crop_size": {"height": edge, "width": edge},
        **keys.channels(),
    }


def _qwen(keys: _Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    hidden, patch = keys.whole("embedding_length"), keys.whole("patch_size")
    merge = keys.whole("spatial_merge_size", 2)
    vision: dict[str, Any] = {
        "depth": keys.whole("block_count"),
        "num_heads": keys.whole("attention.head_count"),
        "patch_size": patch,
        "spatial_merge_size": merge,
    }
    inner = keys.inner(hidden)
    if "v.blk.0.ffn_gate.weight" in keys.sizes:
        step = keys.whole("n_wa_pattern")
        vision |= {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "hidden_act": "silu",
            "window_size": keys.whole("window_size", _QWEN_WINDOW),
            "fullatt_block_indexes": list(range(step - 1, vision["depth"], step)),
        }
    else:
        vision |= {"embed_dim": hidden, "mlp_ratio": inner // hidden, "hidden_act": "quick_gelu"}
    return {"vision_config": vision}, _qwen_processor(keys, patch, merge)


def _qwen3(keys: _Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    hidden, depth = keys.whole("embedding_length"), keys.whole("block_count")
    flags = keys.values.get(_VISION + "is_deepstack_layers", [])
    if not isinstance(flags, list) or len(flags) > depth or not all(isinstance(one, bool) for one in flags):
        raise UnreadableImages(f"{keys.file}: {_VISION}is_deepstack_layers must be a flag for each layer")
    places = keys.sizes.get("v.position_embd.weight", ())
    if len(places) != 2:
        raise UnreadableImages(f"{keys.file}: tensor v.position_embd.weight is missing or no matrix")
    merge = keys.whole("spatial_merge_size", 2)
    vision: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": keys.inner(hidden),
        "depth": depth,
        "num_heads": keys.whole("attention.head_count"),
        "patch_size": keys.whole("patch_size"),
        "spatial_merge_size": merge,
        "num_position_embeddings": places[0],
        "deepstack_visual_indexes": [layer for layer, deep in enumerate(flags) if deep],
    }
    return {"vision_config": vision}, _qwen_processor(keys, vision["patch_size"], merge)


def _qwen_processor(keys: _Keys, patch: int, merge: int) -> dict[str, Any]:
    """Return the fields of the image processor, whose bounds are those of llama.cpp by default."""
    least, most = (count * (patch * merge) ** 2 for count in _QWEN_TOKENS)
    return {
        "patch_size": patch,
        "merge_size": merge,
        "min_pixels": keys.whole("image_min_pixels", least),
        "max_pixels": keys.whole("image_max_pixels", most),
        **keys.channels(),
    }


_QWEN_TOKEN: Final = ("<|image_pad|>",)
_IMAGE: Final = ("<image>",)
_PROJECTORS: Final[Mapping[str, _Projector]] = MappingProxyType(
    {
        "mlp": _Projector("llava", (), _IMAGE, ("mm.2.weight", 0), _llava),
        "idefics3": _Projector("idefics3", (), _IMAGE, ("mm.model.fc.weight", 0), _idefics3),
        "gemma3": _Projector(
            "gemma3",
            ("gemma3",),
            ("<image_soft_token>", "<unused0>"),  # files leave out tokens that only images need
            ("mm.input_projection.weight", 1),
            _gemma3,
        ),
        "qwen2vl_merger": _Projector("qwen2_vl", ("qwen2vl",), _QWEN_TOKEN, ("mm.2.weight", 0), _qwen),
        "qwen2.5vl_merger": _Projector("qwen2_5_vl", ("qwen2vl",), _QWEN_TOKEN, ("mm.2.weight", 0), _qwen),
        "qwen3vl_merger": _Projector("qwen3_vl", ("qwen3vl",), _QWEN_TOKEN, ("mm.2.weight", 0), _qwen3),
    }
)
"""Values of `clip.projector_type` that are read."""
