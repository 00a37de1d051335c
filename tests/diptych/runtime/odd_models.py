"""Files and folders that are no model that can be served, as their users have them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4096\n"
CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def folder(path: Path, files: dict[str, Any]) -> Path:
    """Write a folder; what is no bytes is written as JSON."""
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def safetensors(data: int = 8, *, declared: int = 8) -> bytes:
    """Return a file with `data` bytes of the `declared` ones of a tensor."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [declared], "data_offsets": [0, declared]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


def gguf_file(path: Path, architecture: str = "llama", **fields: Any) -> Path:
    """Write a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        name = key.replace("__", ".")
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint16(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WHOLE = {"config.json": CONFIG, "tokenizer.json": {}, "model.safetensors": safetensors()}


def _without(*names: str, **more: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): content for name, content in more.items()}
    return {name: content for name, content in WHOLE.items() if name not in names} | named


def _file(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        (path / name).write_bytes(content)
        return path / name

    return write


def _folder(files: dict[str, Any]) -> Callable[[Path], Path]:
    return lambda path: folder(path / "m", files)


def _split(path: Path) -> Path:
    for part in (1, 3):
        gguf_file(path / f"big-{part:05d}-of-00003.gguf")
    return path / "big-00001-of-00003.gguf"


def _cache(path: Path) -> Path:
    folder(path / "models--org--name" / "snapshots" / "abc", WHOLE)
    return path / "models--org--name"


INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
CONVERT = "is a pickle, which can run code and is never read: get the model in safetensors, or convert it"
CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "lfs_gguf": (_file("m.gguf", LFS_POINTER), "m.gguf is a Git LFS pointer, 69 bytes .* git lfs pull"),
    "lfs_weights": (
        _folder(_without(model__safetensors=LFS_POINTER)),
        "model.safetensors is a Git LFS pointer",
    ),
    "lfs_config": (_folder(_without(config__json=LFS_POINTER)), "config.json is a Git LFS pointer"),
    "lfs_tokenizer": (_folder(_without(tokenizer__json=LFS_POINTER)), "tokenizer.json is a Git LFS pointer"),
    "web_page": (_file("m.gguf", b"<!DOCTYPE html><html>"), "m.gguf is a web page"),
    "empty_file": (_file("m.gguf", b""), "m.gguf is empty: get it again"),
    "other_gguf": (_file("m.gguf", b"no model"), "m.gguf is no GGUF file, though it is named so: a model is"),
    "cut_gguf": (_file("m.gguf", b"GGUF\x03\0\0\0" + bytes(7)), "m.gguf is a broken or incomplete GGUF file"),
    "no_suffix": (_file("5e88", b"GGUF\x03\0\0\0"), "5e88 is a GGUF file without its suffix"),
    "no_model": (_file("notes.txt", b"hello"), "notes.txt is no model: a model is a .gguf file or a folder"),
    "one_part": (_file("model.safetensors", safetensors()), "is one file of a model: pass --model .*, the"),
    "pickle": (_file("pytorch_model.bin", b"PK\x03\x04"), f"pytorch_model.bin {CONVERT}"),
    "split": (
        _split,
        "is one of the 3 parts of a split GGUF file, of which 1 are not in its folder: get big-00002-of-",
    ),
    "split_renamed": (
        lambda path: gguf_file(path / "m.gguf", split__count=2, split__no=1),
        "m.gguf is part 2 of a GGUF file that was split into 2, .* rename the parts to m-00001-of-00002.gguf",
    ),
    "architecture": (
        lambda path: gguf_file(path / "m.gguf", "bloom", tokenizer__ggml__model="llama"),
        "m.gguf is a model of architecture 'bloom', which is not computed: supported are llama, ",
    ),
    "mmproj": (lambda path: gguf_file(path / "m.gguf", "clip"), r"m.gguf is the image part \(mmproj\)"),
    "gguf_adapter": (
        lambda path: gguf_file(path / "m.gguf", general__type="adapter"),
        "m.gguf is a LoRA adapter: give it as --lora NAME=PATH beside its base model",
    ),
    "empty_folder": (_folder({}), "m is empty: a model is"),
    "no_config": (_folder(_without("config.json")), "m has no config.json, so that it is no model"),
    "folder_within": (lambda path: folder(path / "m" / "hf", WHOLE).parent, "pass --model .*/m/hf"),
    "cache": (_cache, "is a folder of the Hugging Face cache: pass --model .*/snapshots/abc"),
    "gguf_within": (_folder({"a.gguf": b"GGUF"}), "is a folder with a GGUF file: pass .* --model .*/a.gguf"),
    "gguf_beside_config": (
        _folder({"config.json": CONFIG, "a.gguf": b"", "b.gguf": b""}),
        "is a folder with a GGUF file: pass the file, --model .*/a.gguf or --model .*/b.gguf",
    ),
    "adapter": (
        _folder({"adapter_config.json": {"base_model_name_or_path": "org/base"}, "adapter_model.bin": b"x"}),
        r"holds a LoRA adapter of org/base .* --lora NAME=.* merged into it \(peft: merge_and_unload",
    ),
    "adapter_in_model": (
        _folder({**WHOLE, "adapter_config.json": {}}),
        "holds a LoRA adapter .* --lora NAME=",
    ),
    "mistral": (
        _folder({"params.json": {}, "consolidated.safetensors": b""}),
        "model in Mistral's own file",
    ),
    "diffusion": (_folder({"model_index.json": {}}), "is a diffusion pipeline"),
    "only_pickles": (
        _folder({"config.json": CONFIG, "tokenizer.json": {}, "pytorch_model.bin": b"PK"}),
        f"m has no safetensors files, and pytorch_model.bin {CONVERT}",
    ),
    "no_weights": (_folder(_without("model.safetensors")), "m has no weights: get model.safetensors"),
    "no_index": (
        _folder(_without("model.safetensors") | {"model-00001-of-00002.safetensors": safetensors()}),
        "has parts of a model, but not their index: get model.safetensors.index.json, too",
    ),
    "lacks_parts": (
        _folder(
            _without("model.safetensors")
            | {
                "model.safetensors.index.json": INDEX,
                "model-00001-of-00002.safetensors": safetensors(),
            }
        ),
        "m lacks 1 of the 2 files of its weights: get model-00002-of-00002.safetensors",
    ),
    "cut_weights": (
        _folder(_without(model__safetensors=safetensors(5))),
        r"model.safetensors is incomplete, \d+ of \d+ bytes: get it again",
    ),
    "odd_weights": (
        _folder(_without(model__safetensors=b"x" * 40)),
        "model.safetensors is broken or incom",
    ),
    "custom_code": (
        _folder(
            _without(config__json={"model_type": "internlm2", "auto_map": {"AutoConfig": "configuration.C"}})
        ),
        r"is computed by code of its own \(auto_map in config.json\), which is never run",
    ),
    "custom_code_of_a_family": (
        _folder(_without(config__json={**CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling.M"}})),
        "is computed by code of its own",
    ),
    "recurrent architecture": (
        lambda path: gguf_file(path / "m.gguf", "qwen3next", tokenizer__ggml__model="gpt2"),
        "architecture 'qwen3next', which is not computed: models with recurrent layers are read of",
    ),
    "recurrent layers": (
        _folder(_without(config__json={**CONFIG, "model_type": "mamba2"})),
        "model_type 'mamba2', which is not computed: its layers keep a recurrent state",
    ),
    "wrapper of another text model": (
        _folder(_without(config__json={"model_type": "mistral3", "text_config": {"model_type": "zamba"}})),
        "is a mistral3 around a text model 'zamba', which is not computed: its layers keep a recurrent state",
    ),
    "wrapper": (
        _folder(
            _without(config__json={"model_type": "internvl_chat", "text_config": {"model_type": "llama"}})
        ),
        r"is a wrapper of model_type 'internvl_chat' around a text model \('llama' in its text_config\)",
    ),
    "family": (_folder(_without(config__json={"model_type": "mamba"})), "model_type 'mamba', which is not"),
    "classifier": (
        _folder(_without(config__json={**CONFIG, "architectures": ["Qwen2ForSequenceClassification"]})),
        "m is a Qwen2ForSequenceClassification, and only causal language models are served",
    ),
    "broken_config": (
        _folder(_without(config__json=b'{"a":')),
        r"config.json is not JSON \(.*\): get it",
    ),
    "no_tokenizer": (_folder(_without("tokenizer.json")), "m has no tokenizer.json: get it from where"),
    "no_merges": (
        _folder(_without("tokenizer.json") | {"vocab.json": b"{}"}),
        "m has vocab.json but not its merges.txt: get it, or tokenizer.json",
    ),
}
"""By what it is: how it is written into a folder, and what its refusal says."""
