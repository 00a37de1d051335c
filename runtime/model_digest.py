"""A stable identity for a model's files, cheap enough to compute at every start.

Two processes may exchange KV blocks only when they hold the same weights. Hashing 100 GB takes
minutes, so each weight file counts with its size and its first and last MiB: in both formats the
head holds every tensor's name, shape and place, and the tail the last tensor's data. That tells
apart every pair of models one meets by accident (another model, another quantisation, another fine
tune, a truncated download); it is no defence against somebody who edits the middle of a file.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

_MIB = 1 << 20
_WEIGHT_SUFFIX = ".safetensors"
_CONFIG_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)


def model_digest(path: Path) -> str:
    """Sha256 hex of a GGUF file or of a Hugging Face folder (config.json, *.safetensors, tokenizer).

    Names do not count, so a renamed file or a folder copied elsewhere is the same model. Raises
    FileNotFoundError when the path, the folder's config.json or its weights are missing.
    """
    digest = hashlib.sha256(b"diptych.model.1")
    if path.is_dir():
        weights = sorted(_weight_digest(file) for file in path.glob(f"*{_WEIGHT_SUFFIX}"))
        if not weights or not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} holds no config.json with {_WEIGHT_SUFFIX} files beside it")
        for name in _CONFIG_FILES:
            file = path / name
            if file.is_file():
                digest.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    else:
        weights = [_weight_digest(path)]
    for weight in weights:
        digest.update(weight)
    return digest.hexdigest()


def _weight_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return _ends_digest(file, path.stat().st_size)


def _ends_digest(file: BinaryIO, size: int) -> bytes:
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    digest.update(file.read(_MIB))
    if size > _MIB:
        file.seek(max(_MIB, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.digest()
