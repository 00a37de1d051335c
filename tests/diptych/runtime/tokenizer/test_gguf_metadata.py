"""The GGUF metadata reader against the general one, and against files that lie."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.runtime.tokenizer.gguf_metadata import (
    MAX_ARRAY_DEPTH,
    MAX_METADATA_ENTRIES,
    MalformedGguf,
    read_metadata,
)
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_gguf


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _file(path: Path, *entries: bytes, version: int = 3, count: int | None = None) -> Path:
    number = len(entries) if count is None else count
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, number) + b"".join(entries))
    return path


def _entry(key: bytes, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _array(kind: int, length: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + data


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level(), "gpt-2", add_bos_token=True)
    ours = read_metadata(path)
    theirs = gguf.GGUFReader(path).fields
    assert ours
    for key, value in ours.items():
        assert value == theirs[key].contents(), key
    assert set(theirs) - set(ours) == {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}


def test_every_scalar_type(tmp_path: Path) -> None:
    cases = {
        0: ("<B", 255), 1: ("<b", -128), 2: ("<H", 65535), 3: ("<h", -32768), 4: ("<I", 2**32 - 1),
        5: ("<i", -(2**31)), 6: ("<f", 0.5), 10: ("<Q", 2**64 - 1), 11: ("<q", -(2**63)), 12: ("<d", 1e300),
    }  # fmt: skip
    entries = [_entry(b"k%d" % kind, kind, struct.pack(form, value)) for kind, (form, value) in cases.items()]
    found = read_metadata(_file(tmp_path / "m.gguf", *entries, _entry(b"flag", 7, b"\x01")))
    assert found == {f"k{kind}": value for kind, (_, value) in cases.items()} | {"flag": True}
    assert found["flag"] is True


def test_nested_arrays_to_the_limit_and_one_over(tmp_path: Path) -> None:
    def nested(depth: int) -> bytes:
        inner = _array(4, 1, struct.pack("<I", 7))
        for _ in range(depth - 1):
            inner = _array(9, 1, inner)
        return _entry(b"k", 9, inner)

    assert read_metadata(_file(tmp_path / "at", nested(MAX_ARRAY_DEPTH)))
    with pytest.raises(MalformedGguf, match="nested"):
        read_metadata(_file(tmp_path / "over", nested(MAX_ARRAY_DEPTH + 1)))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([struct.pack("<Q", 2**63)], "key of"),
        ([_string(b"k" * 70_000)], "key of"),
        ([_entry(b"k", 8, struct.pack("<Q", 2**62))], "ends inside"),
        ([_entry(b"k", 8, _string(b"\xff"))], "UTF-8"),
        ([_entry(b"k", 99, b"")], "value type"),
        ([_entry(b"k", 9, _array(99, 1, b"\0"))], "value type"),
        ([_entry(b"k", 9, _array(4, 2**60, b""))], "elements"),
        ([_entry(b"k", 9, _array(4, 2**20, b""))], "ends inside"),
        ([_entry(b"k", 9, _array(8, 2**20, b""))], "ends inside"),
        ([_entry(b"k", 9, _array(8, 1, struct.pack("<Q", 2**40)))], "ends inside"),
        ([_entry(b"k", 9, _array(8, 1, _string(b"\xff")))], "UTF-8"),
        ([_entry(b"k", 7, b"\1"), _entry(b"k", 7, b"\1")], "twice"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, entries: list[bytes], message: str) -> None:
    with pytest.raises(MalformedGguf, match=message):
        read_metadata(_file(tmp_path / "m.gguf", *entries, b"\0" * 4, count=len(entries)))


def test_header_is_checked(tmp_path: Path) -> None:
    with pytest.raises(MalformedGguf, match="version"):
        read_metadata(_file(tmp_path / "m", version=1))
    with pytest.raises(MalformedGguf, match="entries"):
        read_metadata(_file(tmp_path / "m", count=MAX_METADATA_ENTRIES + 1))
    with pytest.raises(MalformedGguf, match="ends inside"):
        read_metadata(_file(tmp_path / "m", count=MAX_METADATA_ENTRIES))
    (tmp_path / "m").write_bytes(b"GGML" + b"\0" * 40)
    with pytest.raises(MalformedGguf, match="magic"):
        read_metadata(tmp_path / "m")
    (tmp_path / "m").write_bytes(b"GGUF")
    with pytest.raises(MalformedGguf, match="short"):
        read_metadata(tmp_path / "m")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_never_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    whole = _file(
        tmp_path / "whole",
        _entry(b"a", 8, _string("héllo".encode())),
        _entry(b"b", 9, _array(8, 2, _string(b"x") + _string(b"yz"))),
        _entry(b"c", 9, _array(5, 2, struct.pack("<ii", 1, -1))),
    ).read_bytes()
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    with contextlib.suppress(MalformedGguf):
        read_metadata(path)
