"""GGUF headers written byte by byte: what is read, stepped over and refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from diptych.engine.weights import BadModelFile
from diptych.engine.weights.gguf_header import GgufHeader, read_header


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def string_array(key: str, *values: str) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, columns: int, offset: int, kind: int = 0) -> bytes:
    return text(name) + struct.pack("<IQIQ", 1, columns, kind, offset)


def header(tmp_path: Path, fields: list[bytes], tensors: list[bytes], data: bytes) -> GgufHeader:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields + tensors)
    path = tmp_path / "model.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return read_header(path)


def test_metadata_arrays_are_skipped(tmp_path: Path) -> None:
    floats = text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3)
    fields = [
        string_array("tokens", "a", "bcd", ""),
        floats,
        number("after", 7),
        text("s") + b"\x08\0\0\0" + text("é"),
    ]
    found = header(tmp_path, fields, [tensor("t", 8, 32)], bytes(range(64)))
    assert found.metadata == {"after": 7, "s": "é"}
    assert found.tensors["t"].shape == (8,)
    assert bytes(found.tensors["t"].data) == bytes(range(32, 64))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor("a", 8, 0), tensor("b", 8, 0)], "overlaps"),
        ([tensor("a", 16, 0), tensor("b", 8, 32)], "overlaps"),
        ([tensor("a", 8, 64)], "beyond the end"),
        ([tensor("a", 1 << 62, 0)], "beyond the end"),
        ([tensor("a", 8, 4)], "bad shape or place"),
        ([tensor("a", 0, 0)], "bad shape or place"),
        ([tensor("a", 33, 0, kind=8)], "bad shape or place"),
        ([tensor("a", 8, 0), tensor("a", 8, 32)], "bad shape or place"),
        ([tensor("a", 8, 0, kind=9999)], "unknown type"),
        ([text("a") + struct.pack("<I", 5)], "dimensions"),
    ],
)
def test_tensors_with_false_sizes_are_refused(tmp_path: Path, tensors: list[bytes], message: str) -> None:
    with pytest.raises(BadModelFile, match=rf"^model\.gguf: .*{message}"):
        header(tmp_path, [], tensors, bytes(64))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (text("k") + struct.pack("<I", 13), "type 13"),
        (text("k") + struct.pack("<IIQ", 9, 9, 1), "array of type 9"),
        (text("k") + struct.pack("<IIQ", 9, 8, 1 << 60), "counts"),
        (text("k") + struct.pack("<IIQ", 9, 4, 1 << 20), "beyond the file"),
        (struct.pack("<Q", (1 << 64) - 1), "beyond the file"),
        (struct.pack("<Q", 1) + b"\xff", "UTF-8"),
        (number("general.alignment", 0), "power of two"),
        (number("general.alignment", 48), "power of two"),
    ],
)
def test_fields_with_false_lengths_are_refused(tmp_path: Path, field: bytes, message: str) -> None:
    with pytest.raises(BadModelFile, match=rf"^model\.gguf: .*{message}"):
        header(tmp_path, [field], [], bytes(64))


def test_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(32))
    with pytest.raises(BadModelFile, match=r"model\.gguf: GGUF version 1"):
        read_header(path)
