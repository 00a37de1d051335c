"""Images as a model wants them: tiles, sizes, normalisation and placeholder, read from its folder.

The gateway resizes and splits images by it and the prefill worker normalises them, so that it stands below
both. Its fields are those of transformers' image processors of the families Gemma 3, Idefics3 (SmolVLM),
LLaVA and Qwen-VL; what of them is not computed is refused by the field's name. Data and plain functions:
imports nothing of Diptych.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

FAMILIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gemma3": "gemma3",
        "idefics3": "idefics3",
        "smolvlm": "idefics3",
        "llava": "llava",
        "qwen2_vl": "qwen2_vl",
        "qwen2_5_vl": "qwen2_vl",
        "qwen3_vl": "qwen3_vl",
    }
)
"""`model_type` of models whose images are read, and the family that says how."""
_IMAGENET: Final = (0.5, 0.5, 0.5)
_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
_MOST_RESAMPLE: Final = 5  # Pillow's filters are 0 to 5
_MOST_EDGE: Final = 8192


class UnreadableImages(ValueError):
    """Images of a model that are not read; the message names the file and the field."""


@dataclass(frozen=True)
class ImageSpec:
    """Rules that make images into tiles and tokens. Sizes are in pixels."""

    family: Literal["gemma3", "idefics3", "llava", "qwen2_vl", "qwen3_vl"]
    tile: tuple[int, int]
    """Height and width of all tiles; of the smallest ones where images keep sizes of their own."""
    rows_per_tile: int
    """Tokens, and rows of embeddings, of such a tile."""
    token: str
    """Text of the token that stands for each of an image's rows in the prompt."""
    token_id: int
    resample: int
    """Filter of a resize, as Pillow numbers them."""
    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    longest_edge: int = 0
    """Idefics3: the longest edge of an image before it is split into tiles."""
    splits: bool = False
    """Idefics3: an image is split into tiles, and followed by a small one of the whole."""
    resize_to: tuple[int, int] | None = None
    """LLaVA: height and width to which an image is resized, whatever its own."""
    shortest_edge: int = 0
    """LLaVA: else the shortest edge, before the centre is cut out."""
    pads: bool = False
    """LLaVA: an image is made a square first."""
    shown: str = ""
    """Text of the token that stands for an image in the chat template, where that is another one."""
    whole: bool = False
    """Gemma 3: rows of an image see one another, also those behind them."""
    unit: int = 0
    """Qwen-VL: the side of the square that gives one row. An image is one tile of whole squares, of about its
    own size, and its rows have positions on their grid."""
    least_pixels: int = 0
    """Qwen-VL: of an image as it is encoded."""
    most_pixels: int = 0

    def rows_of(self, shape: Sequence[int]) -> int:
        """Return the tokens of an image of `shape` (tiles, channels, height, width); 0 for one that the model
        does not take.
        """
        tiles, channels, height, width = shape
        if channels != 3 or min(shape) < 1:
            return 0
        if not self.unit:
            return tiles * self.rows_per_tile if (height, width) == self.tile else 0
        whole = tiles == 1 and not height % self.unit and not width % self.unit
        return (height // self.unit) * (width // self.unit) if whole else 0

    def columns_of(self, shape: Sequence[int]) -> int:
        """Return the columns of the grid on which an image's rows have their positions; 0: they have none."""
        return shape[3] // self.unit if self.unit else 0


def image_spec(folder: Path) -> ImageSpec | None:
    """Return how the model in `folder` wants images; None for a model of text, or one whose images are not
    read.

    Raises UnreadableImages for a family whose images are read, with fields that are not.
    """
    if not folder.is_dir():
        return None
    config = _object(folder / "config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    processor = _object(folder / "processor_config.json")
    inner = processor.get("image_processor")
    fields = (
        _Fields(inner) if isinstance(inner, dict) else _Fields(_object(folder / "preprocessor_config.json"))
    )
    if not fields.values and family == "gemma3":
        return None  # its text model is published with and without the encoder's files
    if not fields.values:
        raise UnreadableImages("it has no preprocessor_config.json, which says how images are prepared")
    return spec_of_config(config, fields.values)


def spec_of_config(config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageSpec:
    """Return how a model of `FAMILIES` wants images, by the fields of its config and of its image processor.

    Raises UnreadableImages.
    """
    family, fields = FAMILIES[str(config["model_type"])], _Fields(processor)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if fields.values.get(name) not in (None, True):
            raise UnreadableImages(f"preprocessor_config.json: {name} must be true")
    readers = {
        "gemma3": _gemma3,
        "idefics3": _idefics3,
        "llava": _llava,
        "qwen2_vl": _qwen,
        "qwen3_vl": _qwen,
    }
    return readers[family](config, fields)


def _idefics3(config: Mapping[str, Any], fields: _Fields) -> ImageSpec:
    vision, scale = _vision(config), _size(config, "scale_factor", 2)
    edge = fields.edge("max_image_size", "longest_edge", 364)
    patch = _size(vision, "patch_size", 32)
    side = edge // patch
    if edge % patch or side % scale:
        raise UnreadableImages(
            f"preprocessor_config.json: max_image_size {edge} is no whole number of patches"
        )
    return ImageSpec(
        family="idefics3",
        tile=(edge, edge),
        rows_per_tile=(side // scale) ** 2,
        token="<image>",
        token_id=_size(config, "image_token_id", 128257),
        longest_edge=fields.edge("size", "longest_edge", 4 * 364),
        splits=fields.values.get("do_image_splitting") is not False,
        **fields.shared(_LANCZOS, _IMAGENET, _IMAGENET),
    )


def _llava(config: Mapping[str, Any], fields: _Fields) -> ImageSpec:
    vision = _vision(config, "clip_vision_model")
    patch, edge = _size(vision, "patch_size", 14), _size(vision, "image_size", 336)
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise UnreadableImages(f"config.json: vision_feature_select_strategy {strategy!r}")
    size = fields.values.get("size") or {"shortest_edge": 224}
    exact = isinstance(size, dict) and "shortest_edge" not in size
    crops = fields.values.get("do_center_crop") is not False
    resize_to = (fields.edge("size", "height", 0), fields.edge("size", "width", 0)) if exact else None
    crop = fields.edge("crop_size", "height", 224), fields.edge("crop_size", "width", 224)
    tile = crop if crops else resize_to
    if tile != (edge, edge):
        raise UnreadableImages(f"preprocessor_config.json: crop_size is not the encoder's {edge} x {edge}")
    return ImageSpec(
        family="llava",
        tile=tile,
        rows_per_tile=(edge // patch) ** 2 + (strategy == "full"),
        token="<image>",
        token_id=_token_id(config, 32000),
        resize_to=resize_to,
        shortest_edge=0 if exact else fields.edge("size", "shortest_edge", 224),
        pads=fields.values.get("do_pad") is True,
        **fields.shared(_BICUBIC, _CLIP_MEAN, _CLIP_STD),
    )


def _gemma3(config: Mapping[str, Any], fields: _Fields) -> ImageSpec:
    vision = _vision(config, "siglip_vision_model")
    edge = _size(vision, "image_size", 224)
    tile = fields.edge("size", "height", 224), fields.edge("size", "width", 224)
    if tile != (edge, edge):
        raise UnreadableImages(f"preprocessor_config.json: size is not the encoder's {edge} x {edge}")
    if fields.values.get("do_pan_and_scan") not in (None, False):
        raise UnreadableImages("preprocessor_config.json: do_pan_and_scan is not computed")
    return ImageSpec(
        family="gemma3",
        tile=tile,
        rows_per_tile=_size(config, "mm_tokens_per_image", 256),
        token="<image_soft_token>",
        token_id=_token_id(config, 262144),
        shown="<start_of_image>",
        whole=True,
        **fields.shared(_BILINEAR, _IMAGENET, _IMAGENET),
    )


def _qwen(config: Mapping[str, Any], fields: _Fields) -> ImageSpec:
    vision = _vision(config)
    usual = 16 if config["model_type"] == "qwen3_vl" else 14
    patch, merge = fields.whole("patch_size", 14), fields.whole("merge_size", 2)
    sizes = {"patch_size": (patch, usual), "spatial_merge_size": (merge, 2)}
    for name, (used, default) in sizes.items():
        if _size(vision, name, default) != used:
            raise UnreadableImages(f"preprocessor_config.json: patches are not those of vision_config.{name}")
    size = fields.values.get("size")
    size = size if isinstance(size, dict) else {}
    unit = patch * merge
    least = _pixels(fields.values.get("min_pixels"), size.get("shortest_edge"), 4 * unit**2)
    most = _pixels(fields.values.get("max_pixels"), size.get("longest_edge"), 1280 * unit**2)
    if not unit**2 <= most or not least <= most:
        raise UnreadableImages("preprocessor_config.json: max_pixels is below min_pixels or one row's")
    return ImageSpec(
        family="qwen3_vl" if config["model_type"] == "qwen3_vl" else "qwen2_vl",
        tile=(unit, unit),
        rows_per_tile=1,
        token="<|image_pad|>",
        token_id=_size(config, "image_token_id", 151655),
        unit=unit,
        least_pixels=least,
        most_pixels=most,
        **fields.shared(_BICUBIC, _CLIP_MEAN, _CLIP_STD),
    )


def _pixels(given: object, within: object, default: int) -> int:
    """Return a bound on an image's pixels: by the older spelling, else as the edge that it is called."""
    value = default if given is None and within is None else within if given is None else given
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST_EDGE**2:
        raise UnreadableImages(f"preprocessor_config.json: size must be 1 to {_MOST_EDGE**2} pixels")
    return value


@dataclass(frozen=True)
class _Fields:
    """Fields of an image processor."""

    values: Mapping[str, Any]

    def edge(self, name: str, edge: str, default: int) -> int:
        """Return an edge of a size, which older files have as a number alone."""
        size = self.values.get(name)
        value = size.get(edge, default) if isinstance(size, dict) else size if size is not None else default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST_EDGE:
            raise UnreadableImages(
                f"preprocessor_config.json: {name}.{edge} must be 1 to {_MOST_EDGE} pixels"
            )
        return value

    def whole(self, name: str, default: int) -> int:
        """Return a whole number above 0."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST_EDGE:
            raise UnreadableImages(f"preprocessor_config.json: {name} must be a whole number above 0")
        return value

    def shared(self, resample: int, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
        """Return the fields that all families have."""
        given = self.values.get("resample", resample)
        if not isinstance(given, int) or not 0 <= given <= _MOST_RESAMPLE:
            raise UnreadableImages("preprocessor_config.json: resample must be a filter of Pillow's")
        factor = self.values.get("rescale_factor", 1 / 255)
        if not isinstance(factor, float | int) or not factor > 0:
            raise UnreadableImages("preprocessor_config.json: rescale_factor must be above 0")
        return {
            "resample": given,
            "factor": float(factor),
            "mean": self._channels("image_mean", mean),
            "std": self._channels("image_std", std),
        }

    def _channels(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        given = self.values.get(name, default)
        if not isinstance(given, list | tuple) or len(given) != 3:
            raise UnreadableImages(f"preprocessor_config.json: {name} must be three numbers")
        if not all(isinstance(one, float | int) for one in given) or (name == "image_std" and 0 in given):
            raise UnreadableImages(f"preprocessor_config.json: {name} must be three numbers")
        return tuple(map(float, given))


def _vision(config: Mapping[str, Any], kind: str | None = None) -> Mapping[str, Any]:
    """Return the `vision_config`, that of an encoder of `kind` where one is given."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise UnreadableImages("config.json has no vision_config")
    if kind is not None and (given := vision.get("model_type", kind)) != kind:
        raise UnreadableImages(f"config.json: vision_config.model_type {given!r}; {kind} is read")
    return vision


def _token_id(config: Mapping[str, Any], default: int) -> int:
    """Return the id of an image's token, by its name of now or the older one."""
    return _size(config, "image_token_id" if "image_token_id" in config else "image_token_index", default)


def _size(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnreadableImages(f"config.json: {name} must be a whole number above 0")
    return value


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnreadableImages(f"{path.name}: {error}") from error
    return value if isinstance(value, dict) else {}
