"""The header of a GGUF file: metadata and where the tensors lie, every length and offset checked.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Arrays are
stepped over unless they have few numbers: the engine needs no others, and reading vocabularies of hundreds of
thousands of strings into objects takes longer than all else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.gguf_parts import all_parts

Scalar = int | float | bool | str

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 24
"""Bound on metadata, tensors or an array: far beyond any real file, and small enough to count through."""
_FEW_NUMBERS = 16
"""Numbers of an array that is read; longer ones have a number a layer or a token."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: `data` is `[..., bytes of a row]` of uint8, as gguf.quants takes it."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    kind: gguf.GGMLQuantizationType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a file."""

    metadata: dict[str, Scalar]
    arrays: dict[str, tuple[Scalar, ...] | None]
    """The metadata's arrays by key: of those of few numbers their values, of all others None."""
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads forward through the file and never past its end."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data.data
        self.position = 0

    def take(self, layout: str) -> int | float | bool:
        """Read a scalar of a struct format character."""
        size = struct.calcsize("<" + layout)
        self._require(size)
        value: int | float | bool = struct.unpack_from("<" + layout, self._data, self.position)[0]
        self.position += size
        return value

    def count(self) -> int:
        """Read an unsigned 64-bit number of things that must all be in the file."""
        value = int(self.take("Q"))
        if value > _MAX_ITEMS:
            raise BadModelFile(f"the GGUF header counts {value} items")
        return value

    def string(self) -> str:
        length = int(self.take("Q"))
        self._require(length)
        raw = bytes(self._data[self.position : self.position + length])
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise BadModelFile("a name in the GGUF header is not UTF-8") from error

    def skip(self, length: int) -> None:
        self._require(length)
        self.position += length

    def _require(self, length: int) -> None:
        if length > len(self._data) - self.position:
            raise BadModelFile("the GGUF header ends beyond the file")


def read_header(path: Path) -> GgufHeader:
    """Read the header of `path`, with the tensors of all parts where it is a part of a split file.

    The tensors' data stays in the files, mapped. Raises BadModelFile.
    """
    first, *others = (_read_part(part) for part in all_parts(path))
    tensors = dict(first.tensors)
    for number, part in enumerate(others, start=1):
        if part.metadata.get("split.no") != number or not tensors.keys().isdisjoint(part.tensors):
            raise BadModelFile(f"{all_parts(path)[number].name}: not the part that its name says")
        tensors |= part.tensors
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise BadModelFile(f"{path.name}: {len(tensors)} tensors in its parts, {count} in its header")
    return GgufHeader(first.metadata, first.arrays, tensors)


def _read_part(path: Path) -> GgufHeader:
    try:
        return _read(path)
    except FileNotFoundError:
        raise BadModelFile(f"{path.name}: this part of the split file is missing") from None
    except BadModelFile as error:
        raise BadModelFile(f"{path.name}: {error}") from error


def _read(path: Path) -> GgufHeader:
    if path.stat().st_size < 24:
        raise BadModelFile("not a GGUF file: it is too short")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    if bytes(data[:4]) != b"GGUF":
        raise BadModelFile("not a GGUF file")
    cursor = _Cursor(data)
    cursor.skip(4)
    version = cursor.take("I")
    if version not in (2, 3):
        raise BadModelFile(f"GGUF version {version}: only 2 and 3 are read")
    tensor_count, field_count = cursor.count(), cursor.count()
    metadata: dict[str, Scalar] = {}
    arrays: dict[str, tuple[Scalar, ...] | None] = {}
    for _ in range(field_count):
        key = cursor.string()
        kind = int(cursor.take("I"))
        if kind == _ARRAY:
            arrays[key] = _array(cursor)
        else:
            metadata[key] = _value(cursor, kind)
    places = [_place(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise BadModelFile("general.alignment is not a power of two")
    begin = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, arrays, _tensors(places, data[begin:], alignment))


def _value(cursor: _Cursor, kind: int) -> Scalar:
    """Read a value of the metadata that is no array."""
    if kind == _STRING:
        return cursor.string()
    if kind not in _SCALARS:
        raise BadModelFile(f"the GGUF header has a value of type {kind}")
    return cursor.take(_SCALARS[kind])


def _array(cursor: _Cursor) -> tuple[Scalar, ...] | None:
    """Read an array of few numbers; step over any other one and return None."""
    item, length = int(cursor.take("I")), cursor.count()
    if item in _SCALARS:
        if length <= _FEW_NUMBERS:
            return tuple(cursor.take(_SCALARS[item]) for _ in range(length))
        cursor.skip(length * struct.calcsize("<" + _SCALARS[item]))
    elif item == _STRING:
        for _ in range(length):
            cursor.skip(int(cursor.take("Q")))
    else:
        raise BadModelFile(f"the GGUF header has an array of type {item}")
    return None


_Place = tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]


def _place(cursor: _Cursor) -> _Place:
    name = cursor.string()
    dimensions = int(cursor.take("I"))
    if not 1 <= dimensions <= 4:
        raise BadModelFile(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(int(cursor.take("Q")) for _ in range(dimensions))
    number, offset = int(cursor.take("I")), int(cursor.take("Q"))
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError as error:
        raise BadModelFile(f"tensor {name} has the unknown type {number}") from error
    return name, shape[::-1], kind, offset


def _tensors(places: list[_Place], data: npt.NDArray[np.uint8], alignment: int) -> dict[str, GgufTensor]:
    """Tensors by name; each lies inside `data`, aligned, and none over another."""
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for name, shape, kind, offset in sorted(places, key=lambda place: place[3]):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block or offset % alignment or name in tensors:
            raise BadModelFile(f"tensor {name} has a bad shape or place")
        row = shape[-1] // block * size
        length = row
        for rows in shape[:-1]:
            length *= rows
        if offset < end:
            raise BadModelFile(f"tensor {name} overlaps another")
        end = offset + length
        if end > len(data):
            raise BadModelFile(f"tensor {name} reaches beyond the end of the file")
        tensors[name] = GgufTensor(name, shape, kind, data[offset:end].reshape(*shape[:-1], row))
    return tensors
