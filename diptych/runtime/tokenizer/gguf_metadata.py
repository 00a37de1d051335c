"""The key-value section of a GGUF file, every size checked before it is believed.

Only the head of the file is touched: weights stay unread, so a 40 GB model costs what its vocabulary
costs. The general reader of the `gguf` package makes one numpy view per array element and takes 1.8 s
for a vocabulary of 49,000 tokens; this one takes about 40 ms.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

# Bounds on the operator's file: beyond them it is no model of today.
MAX_METADATA_ENTRIES: Final = 65_536
MAX_KEY_BYTES: Final = 65_535  # the format's own bound
MAX_ARRAY_LENGTH: Final = 16_777_216
MAX_ARRAY_DEPTH: Final = 4
MAX_DIMENSIONS: Final = 4

Scalar = int | float | bool | str
Value = Scalar | list["Value"]

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),  # bool
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class MalformedGguf(ValueError):
    """The file is not GGUF, or says something about itself that cannot be true."""


def read_metadata(path: Path) -> dict[str, Value]:
    """Return all metadata entries of the GGUF file at ``path``. Raises `MalformedGguf` or `OSError`."""
    return _read(path, arrays=True)


def read_scalars(path: Path) -> dict[str, Value]:
    """Return the entries of the GGUF file at ``path`` that are no arrays, in a quarter of the time.

    Raises `MalformedGguf` or `OSError`.
    """
    return _read(path, arrays=False)


def read_with_sizes(path: Path) -> tuple[dict[str, Value], dict[str, tuple[int, ...]]]:
    """Return all metadata entries, and the size of each tensor, rows first.

    Raises `MalformedGguf` or `OSError`.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    return _read(path, arrays=True, sizes=sizes), sizes


def _read(path: Path, *, arrays: bool, sizes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Value]:
    with path.open("rb") as file:
        if path.stat().st_size < len(MAGIC) + _U32.size + 2 * _U64.size:
            raise MalformedGguf(f"{path.name}: too short for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            try:
                cursor = _Cursor(view, arrays=arrays)
                found = cursor.metadata()
                if sizes is not None:
                    sizes.update(cursor.sizes())
                return found
            except MalformedGguf as error:
                raise MalformedGguf(f"{path.name}: {error}") from None


class _Cursor:
    """A position in the mapped file. Every advance is checked against the end of the file."""

    def __init__(self, view: mmap.mmap, *, arrays: bool) -> None:
        self._view = view
        self._arrays = arrays  # else they are stepped over
        self._end = len(view)
        self._at = 0
        self._tensors = 0

    def metadata(self) -> dict[str, Value]:
        if self._take(len(MAGIC)) != MAGIC:
            raise MalformedGguf("no GGUF magic")
        version = self._unsigned(_U32)
        if version not in VERSIONS:
            raise MalformedGguf(f"version {version}, this build reads {VERSIONS}")
        self._tensors = self._unsigned(_U64)
        entries = self._unsigned(_U64)
        if entries > MAX_METADATA_ENTRIES:
            raise MalformedGguf(f"{entries} metadata entries")
        found: dict[str, Value] = {}
        for _ in range(entries):
            key = self._key()
            if key in found:
                raise MalformedGguf(f"metadata key {key!r} twice")
            kind = self._unsigned(_U32)
            if kind == _ARRAY and not self._arrays:
                self._skip_array(depth=0)
            else:
                found[key] = self._value(kind, depth=0)
        return found

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the size of each tensor, which stand behind the metadata."""
        if self._tensors > MAX_METADATA_ENTRIES:
            raise MalformedGguf(f"{self._tensors} tensors")
        found: dict[str, tuple[int, ...]] = {}
        for _ in range(self._tensors):
            name, dimensions = self._key(), self._unsigned(_U32)
            if dimensions > MAX_DIMENSIONS:
                raise MalformedGguf(f"tensor {name!r} of {dimensions} dimensions")
            found[name] = tuple(self._unsigned(_U64) for _ in range(dimensions))[::-1]
            self._skip(_U32.size + _U64.size)  # its type and place
        return found

    def _take(self, size: int) -> bytes:
        begin = self._at
        self._skip(size)
        return self._view[begin : self._at]

    def _unsigned(self, kind: struct.Struct) -> int:
        value: int = kind.unpack(self._take(kind.size))[0]
        return value

    def _key(self) -> str:
        size = self._unsigned(_U64)
        if size > MAX_KEY_BYTES:
            raise MalformedGguf(f"a metadata key of {size} bytes")
        return _text(self._take(size))

    def _value(self, kind: int, depth: int) -> Value:
        if kind == _STRING:
            return _text(self._take(self._unsigned(_U64)))
        if kind == _ARRAY:
            return self._array(depth)
        scalar = _scalar(kind)
        value: Scalar = scalar.unpack(self._take(scalar.size))[0]
        return bool(value) if kind == _BOOL else value

    def _begin_array(self, depth: int) -> tuple[int, int]:
        """Return the type of an array's elements and their number."""
        if depth >= MAX_ARRAY_DEPTH:
            raise MalformedGguf("arrays nested too deep")
        kind = self._unsigned(_U32)
        length = self._unsigned(_U64)
        if length > MAX_ARRAY_LENGTH:
            raise MalformedGguf(f"an array of {length} elements")
        return kind, length

    def _skip_array(self, depth: int) -> None:
        kind, length = self._begin_array(depth)
        if kind == _ARRAY:
            for _ in range(length):
                self._skip_array(depth + 1)
        elif kind == _STRING:
            self._skip_strings(length)
        else:
            self._skip(length * _scalar(kind).size)

    def _skip(self, size: int) -> None:
        if size > self._end - self._at:
            raise MalformedGguf("ends inside its metadata")
        self._at += size

    def _skip_strings(self, length: int) -> None:
        view, size_of, header, at = self._view, _U64.unpack_from, _U64.size, self._at
        try:
            for _ in range(length):
                at += header + size_of(view, at)[0]
        except (struct.error, OverflowError):
            raise MalformedGguf("ends inside its metadata") from None
        self._skip(at - self._at)

    def _array(self, depth: int) -> list[Value]:
        kind, length = self._begin_array(depth)
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(length)]
        scalar = _scalar(kind)
        values = struct.unpack(f"<{length}{scalar.format[-1]}", self._take(length * scalar.size))
        return [bool(value) for value in values] if kind == _BOOL else list(values)

    def _strings(self, length: int) -> list[Value]:
        """Read strings, the hot loop: a vocabulary has 50,000 to 250,000, its merges as many again."""
        view, end, at = self._view, self._end, self._at
        size_of, header = _U64.unpack_from, _U64.size
        strings: list[Value] = []
        try:
            for _ in range(length):
                (size,) = size_of(view, at)
                at += header
                if size > end - at:
                    raise MalformedGguf("ends inside its metadata")
                strings.append(str(view[at : at + size], "utf-8"))
                at += size
        except struct.error:
            raise MalformedGguf("ends inside its metadata") from None
        except UnicodeDecodeError:
            raise MalformedGguf("a string is not UTF-8") from None
        self._at = at
        return strings


def _scalar(kind: int) -> struct.Struct:
    scalar = _SCALARS.get(kind)
    if scalar is None:
        raise MalformedGguf(f"unknown value type {kind}")
    return scalar


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedGguf("a string is not UTF-8") from None
