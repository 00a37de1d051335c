"""Check of the files at `--model` without reading weights, so that a program can refuse them at once.

Each refusal is one sentence: what the file or folder is, and what to do. `check_model_files` looks at names,
at config.json and at the heads of files, and takes milliseconds; what only the weights show is said by the
engine's readers (diptych/engine/weights/).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diptych.image_spec import UnreadableImages, image_spec
from diptych.model_families import (
    GGUF_ARCHITECTURES,
    MODEL_TYPES,
    NOT_COMPUTED,
    OWN_CODE,
    WRAPPERS,
    wrapped_text,
)
from diptych.runtime.gguf_split import all_parts, first_part, missing_parts
from diptych.runtime.hub import HubModel, download_model
from diptych.runtime.settings import StartupError, resolve_model
from diptych.runtime.tokenizer.gguf_metadata import MalformedGguf, read_scalars

VOCABULARY_FILES: Final = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")
"""Files that hold a folder's vocabulary, in the order in which they are looked for."""

_A_MODEL: Final = "a model is a .gguf file or a folder with config.json, tokenizer.json and safetensors files"
_LFS_HEAD: Final = b"version https://git-lfs"
_HEAD_BYTES: Final = 512
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD_NAME: Final = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_GGUFS: Final = {
    "adapter": "a LoRA adapter: give it as --lora NAME=PATH beside its base model, or merged into it "
    "(llama-export-lora)",
    "mmproj": "the image part (mmproj) of a model: give the GGUF file of its language model as --model and "
    "this one as --mmproj",
    "imatrix": "an importance matrix, made for quantising a model; give the model's own GGUF file",
}
_TEXT_OF_CLIP: Final = ("clip", "mmproj")
_MAX_HEADER_BYTES: Final = 100_000_000
"""Bytes of a safetensors file's header; the format's own bound."""


class UnusableModel(StartupError, ValueError):
    """Files that are no model that can be served. The message says what they are and what to do."""


def checked_model(model: str) -> Path:
    """Return the path of a model given by path or as "bundled". Raises NoModel or UnusableModel."""
    path = resolve_model(model)
    check_model_files(path)
    return path


def fetched_model(model: str) -> Path:
    """Return the path of a model as `checked_model` does, of one of the Hub downloaded before.

    Raises HubError as well.
    """
    if (of_hub := HubModel.parse(model)) is not None:
        download_model(of_hub)
    return checked_model(model)


def check_model_files(path: Path) -> None:
    """Raise UnusableModel unless `path` looks like a model that the engine reads."""
    try:
        if path.is_dir():
            _check_folder(path)
        else:
            _check_file(path)
    except OSError as error:
        raise UnusableModel(f"{error.filename or path} cannot be read: {error.strerror}") from error


def _check_file(path: Path) -> None:
    head = _head(path)
    _refuse_no_model(path, head)
    if path.suffix.lower() != ".gguf":
        raise UnusableModel(_other_file(path, head))
    if not head.startswith(b"GGUF"):
        raise UnusableModel(f"{path} is no GGUF file, though it is named so: {_A_MODEL}")
    _check_gguf(path)


def _other_file(path: Path, head: bytes) -> str:
    """Return what a file is that has no name of a GGUF file."""
    if head.startswith(b"GGUF"):
        return f"{path} is a GGUF file without its suffix: rename it, or link to it, as {path.name}.gguf"
    if path.suffix == ".safetensors" or path.name in ("config.json", "tokenizer.json", _INDEX):
        return f"{path} is one file of a model: pass --model {path.parent}, the folder that holds all of them"
    if path.suffix in _PICKLES:
        return f"{path} {_PICKLED}"
    return f"{path} is no model: {_A_MODEL}"


_PICKLED: Final = (
    "is a pickle, which can run code and is never read: get the model in safetensors, or convert it with "
    "transformers (from_pretrained, then save_pretrained)"
)


def _check_gguf(path: Path) -> None:
    if missing := missing_parts(path):
        named = ", ".join(part.name for part in missing[:3])
        more = ", …" if len(missing) > 3 else ""
        raise UnusableModel(
            f"{path} is one of the {len(all_parts(path))} parts of a split GGUF file, of which "
            f"{len(missing)} are not in its folder: get {named}{more}"
        )
    for part in all_parts(path)[1:]:
        _refuse_no_model(part, _head(part))
    try:
        metadata = read_scalars(first_part(path))
    except MalformedGguf as error:
        raise UnusableModel(f"{path} is a broken or incomplete GGUF file ({error}): get it again") from error
    count, number = metadata.get("split.count"), metadata.get("split.no")
    if isinstance(count, int) and count != len(all_parts(path)) and count > 1 and isinstance(number, int):
        raise UnusableModel(
            f"{path} is part {number + 1} of a GGUF file that was split into {count}, and its name does not "
            f"say so: rename the parts to {path.stem}-00001-of-{count:05d}.gguf and so on"
        )
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    other = "mmproj" if architecture in _TEXT_OF_CLIP else str(kind)
    if other in _OTHER_GGUFS:
        raise UnusableModel(f"{path} is {_OTHER_GGUFS[other]}")
    if architecture not in GGUF_ARCHITECTURES:
        why = NOT_COMPUTED.get(str(architecture), f"supported are {', '.join(GGUF_ARCHITECTURES)}")
        raise UnusableModel(
            f"{path} is a model of architecture {architecture!r}, which is not computed: {why}"
        )


def _check_folder(folder: Path) -> None:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise UnusableModel(f"{folder} is empty: {_A_MODEL}")
    if "adapter_config.json" in names:
        raise UnusableModel(_adapter(folder))
    if "config.json" not in names:
        raise UnusableModel(_without_config(folder, names))
    config = _json_object(folder / "config.json")
    files = _weight_files(folder, names)
    _check_family(folder, config)
    for file in files:
        _check_safetensors(file)
    _check_tokenizer(folder, names)


def _adapter(folder: Path) -> str:
    base = _json_object(folder / "adapter_config.json").get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    return (
        f"{folder} holds a LoRA adapter{of} (adapter_config.json): give it as --lora NAME={folder} beside "
        "--model with its base model, or merged into it (peft: merge_and_unload, then save_pretrained)"
    )


def _without_config(folder: Path, names: Sequence[str]) -> str:
    if flags := _gguf_flags(folder, names):
        return f"{folder} is a folder with a GGUF file: pass the file, {flags}"
    snapshots = sorted((folder / "snapshots").glob("*/")) if "snapshots" in names else []
    if snapshots:
        return f"{folder} is a folder of the Hugging Face cache: pass --model {snapshots[-1]}, its snapshot"
    if "params.json" in names or "consolidated.safetensors" in names:
        return f"{folder} holds a model in Mistral's own files: get its Hugging Face files, with config.json"
    if "model_index.json" in names:
        return f"{folder} is a diffusion pipeline (model_index.json), no language model: {_A_MODEL}"
    inner = [name for name in names if (folder / name / "config.json").is_file()]
    if inner:
        return f"{folder} has no config.json, its folder {inner[0]} has: pass --model {folder / inner[0]}"
    return f"{folder} has no config.json, so that it is no model: {_A_MODEL}"


def _gguf_flags(folder: Path, names: Sequence[str]) -> str:
    """Return the flags that name up to three GGUF files of a folder; empty if it has none."""
    found = [name for name in names if name.lower().endswith(".gguf")]
    return " or ".join(f"--model {folder / name}" for name in found[:3])


def _check_family(folder: Path, config: Mapping[str, Any]) -> None:
    kind, code = config.get("model_type"), config.get("auto_map")
    if (
        isinstance(code, dict)
        and kind not in OWN_CODE
        and (kind not in MODEL_TYPES or "AutoModelForCausalLM" in code)
    ):
        raise UnusableModel(
            f"{folder} is computed by code of its own (auto_map in config.json), which is never run: "
            "get a version in the form of a supported family, or a GGUF file of one"
        )
    if kind in WRAPPERS:
        _check_text_model(folder, str(kind), wrapped_text(config))
        return
    supported = NOT_COMPUTED.get(str(kind), f"supported are {', '.join(MODEL_TYPES)}")
    if kind not in MODEL_TYPES:
        inner = next((config[key] for key in ("text_config", "llm_config") if key in config), None)
        if isinstance(inner, dict):
            text = inner.get("model_type")
            raise UnusableModel(
                f"{folder} is a wrapper of model_type {kind!r} around a text model ({text!r} in its "
                f"text_config), which is not computed: get the text model by itself; {supported}"
            )
        raise UnusableModel(f"{folder} is a model of model_type {kind!r}, which is not computed: {supported}")
    architectures = config.get("architectures") or ["ForCausalLM"]
    if isinstance(architectures, list) and not any(str(one).endswith("ForCausalLM") for one in architectures):
        raise UnusableModel(
            f"{folder} is a {', '.join(map(str, architectures))}, and only causal language models are served"
        )


def _check_text_model(folder: Path, kind: str, config: object) -> None:
    """Raise UnusableModel unless a wrapper's text model, the part that is served, is computed."""
    text = config.get("model_type") if isinstance(config, dict) else None
    if text not in MODEL_TYPES:
        why = NOT_COMPUTED.get(str(text), f"supported are {', '.join(MODEL_TYPES)}")
        raise UnusableModel(
            f"{folder} is a {kind} around a text model {text!r}, which is not computed: {why}"
        )
    try:
        image_spec(folder)
    except UnreadableImages as error:
        raise UnusableModel(f"{folder}: {error}") from error


def _weight_files(folder: Path, names: Sequence[str]) -> list[Path]:
    if _WHOLE in names:
        return [folder / _WHOLE]
    if _INDEX in names:
        return _shards(folder, names)
    if flags := _gguf_flags(folder, names):
        raise UnusableModel(f"{folder} is a folder with a GGUF file: pass the file, {flags}")
    if any(_SHARD_NAME.fullmatch(name) for name in names):
        raise UnusableModel(f"{folder} has parts of a model, but not their index: get {_INDEX}, too")
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise UnusableModel(f"{folder} has no safetensors files, and {pickles[0]} {_PICKLED}")
    others = [name for name in names if name.endswith(".safetensors")]
    named = f", only {others[0]}" if others else ""
    raise UnusableModel(f"{folder} has no weights: get {_WHOLE}, or {_INDEX} and its parts{named}")


def _shards(folder: Path, names: Sequence[str]) -> list[Path]:
    weight_map = _json_object(folder / _INDEX).get("weight_map")
    parts = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    missing = [part for part in parts if part not in names]
    if missing:
        first = ", ".join(missing if len(missing) <= 3 else [*missing[:3], "…"])
        raise UnusableModel(
            f"{folder} lacks {len(missing)} of the {len(parts)} files of its weights: get {first}"
        )
    return [folder / part for part in parts]


def _check_safetensors(path: Path) -> None:
    head = _head(path)
    _refuse_no_model(path, head)
    size = path.stat().st_size
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else size
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise UnusableModel(f"{path} is broken or incomplete, no safetensors file: get it again")
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(8 + length)[8:])
        ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        end = 8 + length + max(ends, default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UnusableModel(f"{path} is broken, no safetensors file: get it again") from error
    if size < end:
        raise UnusableModel(f"{path} is incomplete, {size} of {end} bytes: get it again")


def _check_tokenizer(folder: Path, names: Sequence[str]) -> None:
    form = next((name for name in VOCABULARY_FILES if name in names), None)
    if form is None:
        raise UnusableModel(
            f"{folder} has no tokenizer.json: get it from where the model came from, or its base model's"
        )
    _refuse_no_model(folder / form, _head(folder / form))
    if form == "vocab.json" and "merges.txt" not in names:
        raise UnusableModel(f"{folder} has vocab.json but not its merges.txt: get it, or tokenizer.json")


def _refuse_no_model(path: Path, head: bytes) -> None:
    """Raise UnusableModel for what stands in a file's place where a download went wrong."""
    if not head:
        raise UnusableModel(f"{path} is empty: get it again")
    if head.startswith(_LFS_HEAD):
        raise UnusableModel(
            f"{path} is a Git LFS pointer, {path.stat().st_size} bytes that stand for the file: "
            "run git lfs install, then git lfs pull, in its folder, or get it with hf download"
        )
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise UnusableModel(f"{path} is a web page, not the file that it is named for: get it again")


def _json_object(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    _refuse_no_model(path, data[:_HEAD_BYTES])
    try:
        value = json.loads(data)
    except ValueError as error:
        raise UnusableModel(f"{path} is not JSON ({error}): get it again") from error
    if not isinstance(value, dict):
        raise UnusableModel(f"{path} holds no JSON object: get it again")
    return value


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)
