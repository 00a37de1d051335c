"""Key of a model's packed weights: all that decides their bytes.

That is the model's files as this host has them (device, inode, size and time of the last change, so that no
two models that merely look alike share one key), the precision, the shape, the instruction set, and the code
that reads and packs: the native library and the Python sources of readers and families.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.gguf_parts import all_parts
from kernels.cpu import library as native

_ENGINE = Path(__file__).resolve().parent.parent
_SOURCES = (_ENGINE / "weights", _ENGINE / "models", _ENGINE / "backends" / "native")
_KERNELS = Path(native.__file__).resolve().parent.parent


def packed_key(path: Path, shape: ModelShape, precision: str, instruction_set: str) -> str:
    """Return the key of the weights of `path` as hex. Raises FileNotFoundError.

    `shape` is the file's own: a lowered context changes no weight.
    """
    parts = [precision, instruction_set, repr(shape), torch.__version__, _code(), *_identities(path)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _identities(path: Path) -> Iterable[str]:
    files = sorted(path.iterdir()) if path.is_dir() else all_parts(path)
    for file in files:
        if file.is_file():
            found = file.stat()
            yield f"{file.name} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for file in _files((*_SOURCES, _KERNELS)):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    digest.update(native.library_path().read_bytes())
    return digest.hexdigest()


def _files(folders: Sequence[Path]) -> Iterable[Path]:
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))
