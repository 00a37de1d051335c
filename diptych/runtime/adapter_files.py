"""The files of a LoRA adapter as they lie on disk: the digest of their content and the rank, without weights.

An adapter is a folder as `peft` saves it (adapter_config.json and adapter_model.safetensors), or a GGUF file
as llama.cpp's convert_lora_to_gguf.py writes it. Unlike a model's, all bytes count: adapters are small, and
two fine tunes of one kind differ in every tensor and in nothing else.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diptych.runtime.settings import StartupError

DIGEST_BYTES: Final = 32
CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PICKLED: Final = ("adapter_model.bin", "adapter_model.pt")
_VERSION: Final = b"diptych.adapter.1"


class BadAdapter(StartupError, ValueError):
    """Files that are no adapter that can be served; the message has the path and the reason."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's files, and what their configuration says."""

    path: Path
    digest: bytes
    """SHA-256 over all bytes of its config and tensors: names and places do not count."""
    rank: int | None
    """The largest of its modules; None where only the tensors say it (GGUF)."""


def read_adapter(path: Path) -> AdapterFiles:
    """Read the files of the adapter at `path`; every byte is hashed. Raises BadAdapter."""
    try:
        if path.is_dir():
            config = _config(path / CONFIG)
            return AdapterFiles(path, _digest(path / CONFIG, _weights(path)), _rank(path / CONFIG, config))
        if path.suffix == ".gguf":
            return AdapterFiles(path, _digest(path), None)
    except OSError as error:
        raise BadAdapter(f"cannot read the adapter at {path}: {error.strerror}") from None
    if path.exists():
        raise BadAdapter(f"{path} is no adapter: neither a folder with {CONFIG} nor a GGUF file")
    raise BadAdapter(f"no adapter at {path}: it must be a folder with {CONFIG}, or a GGUF file")


def _weights(folder: Path) -> Path:
    weights = folder / WEIGHTS
    if weights.is_file():
        return weights
    if any((folder / name).is_file() for name in _PICKLED):
        raise BadAdapter(f"{folder} has its tensors in a pickle, which can run code: save them as {WEIGHTS}")
    raise BadAdapter(f"{folder} has no {WEIGHTS}")


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise BadAdapter(f"{file.parent} has no {CONFIG}, so that it is no adapter")
    try:
        config = json.loads(file.read_bytes())
    except ValueError:
        raise BadAdapter(f"{file} is not JSON") from None
    if not isinstance(config, dict):
        raise BadAdapter(f"{file} is no JSON object")
    return config


def _rank(file: Path, config: dict[str, Any]) -> int:
    """Return the largest rank; peft's `rank_pattern` has those of single modules."""
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    found = [rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool) and rank > 0]
    if len(found) != len(ranks):
        raise BadAdapter(f"{file}: r and the values of rank_pattern must be integers above 0")
    return max(found)


def _digest(*files: Path) -> bytes:
    """Return the SHA-256 over the contents, each with its length before it."""
    digest = hashlib.sha256(_VERSION)
    for file in files:
        with file.open("rb") as content:
            digest.update(file.stat().st_size.to_bytes(8, "little"))
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    return digest.digest()
