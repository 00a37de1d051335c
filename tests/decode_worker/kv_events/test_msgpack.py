"""Encoder of MessagePack against a reader of others."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from decode_worker.kv_events.msgpack import Value, pack

msgspec = pytest.importorskip("msgspec", reason="the extra `dev` has it")

lengths = [0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    st.lists,
    max_leaves=20,
)


@given(values)
def test_what_is_packed_is_read_back(value: Value) -> None:
    assert msgspec.msgpack.decode(pack(value)) == value


@pytest.mark.parametrize("length", lengths)
def test_every_form_of_a_length_is_the_readers_own(length: int) -> None:
    for value in ("a" * length, b"a" * length, [1] * length):
        assert pack(value) == msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    "number", [0, 127, 128, 255, 256, 65535, 65536, (1 << 32) - 1, 1 << 32, (1 << 64) - 1]
)
def test_every_form_of_a_number_is_the_readers_own(number: int) -> None:
    assert pack(number) == msgspec.msgpack.encode(number)


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_number_that_is_no_u64_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        pack(number)
