"""A digest of a model's files by which ranks of two hosts find that they read the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from diptych.runtime.gguf_split import all_parts

_SAMPLE_BYTES = 1 << 20


def files_digest(path: Path) -> bytes:
    """Return a digest of the sizes, and of the first and last MiB, of a model's files. Raises OSError.

    Names of weight files do not count. A rank reads no more of the files than it holds, so that the digest of
    all (diptych/runtime/model_digest.py) would cost more than its start.
    """
    files = [*path.glob("*.safetensors"), path / "config.json"] if path.is_dir() else all_parts(path)
    return hashlib.sha256(b"".join(sorted(_sample(file) for file in files))).digest()


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_SAMPLE_BYTES)
        file.seek(max(size - _SAMPLE_BYTES, 0))
        return hashlib.sha256(size.to_bytes(8, "little") + first + file.read()).digest()
