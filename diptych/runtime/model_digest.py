"""A stable identity for a model's files, cheap enough to compute at every start.

Two processes may exchange KV blocks only when they hold the same weights. Hashing 100 GB takes
minutes, so each weight file counts with its size, its first and last MiB, and 256 pages evenly spread
between: in both formats the head holds every tensor's name, shape and place. That tells apart every
pair of models one meets by accident (another model, another quantisation, a truncated download, a fine
tune of some layers or of one kind of matrix); it is no defence against an attacker who edits a few bytes.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

from diptych.runtime.gguf_split import all_parts
from diptych.runtime.settings import NoModel

_MIB = 1 << 20
_PAGE = 4096
_PAGES = 256
_WEIGHT_SUFFIX = ".safetensors"
_CONFIG_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "added_tokens.json",
)


def model_digest(path: Path, mmproj: Path | None = None) -> str:
    """Return the sha256 hex of a GGUF file with all its parts, or of a Hugging Face folder with its weights
    and texts; with the encoder of its images where that is in a file `mmproj` of its own.

    Names do not count, so a renamed file or a folder copied elsewhere is the same model. Raises
    NoModel when the path, the folder's config.json or its weights are missing.
    """
    digest = hashlib.sha256(b"diptych.model.2")
    if path.is_dir():
        weights = sorted(_weight_digest(file) for file in path.glob(f"*{_WEIGHT_SUFFIX}"))
        if not weights or not (path / "config.json").is_file():
            raise NoModel(f"{path} holds no config.json with {_WEIGHT_SUFFIX} files beside it")
        for name in _CONFIG_FILES:
            file = path / name
            if file.is_file():
                digest.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    else:
        files = all_parts(path) if mmproj is None else (*all_parts(path), mmproj)
        weights = [_weight_digest(file) for file in files]
    for weight in weights:
        digest.update(weight)
    return digest.hexdigest()


def _weight_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return _sampled_digest(file, path.stat().st_size)


def _sampled_digest(file: BinaryIO, size: int) -> bytes:
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    digest.update(file.read(_MIB))
    if size > _MIB:
        tail = max(_MIB, size - _MIB)
        for number in range(_PAGES):
            file.seek(_MIB + (tail - _MIB) * number // _PAGES)
            digest.update(file.read(_PAGE))
        file.seek(tail)
        digest.update(file.read(_MIB))
    return digest.digest()
