"""Encoder of MessagePack, as far as KV events need it: no maps, no extension types.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

Value = None | bool | int | float | str | bytes | Sequence["Value"]
_UINTS = ((1 << 8, 0xCC, ">BB"), (1 << 16, 0xCD, ">BH"), (1 << 32, 0xCE, ">BI"), (1 << 64, 0xCF, ">BQ"))


def pack(value: Value) -> bytes:
    """Return the encoding of a value. Raises ValueError for integers below 0 or beyond 64 bits."""
    into = bytearray()
    _pack(value, into)
    return bytes(into)


def _pack(value: Value, into: bytearray) -> None:
    match value:
        case None:
            into.append(0xC0)
        case bool():
            into.append(0xC3 if value else 0xC2)
        case int():
            _pack_int(value, into)
        case float():
            into += struct.pack(">Bd", 0xCB, value)
        case str():
            data = value.encode()
            _pack_head(len(data), into, (0xA0, 32), (0xD9, 0xDA, 0xDB))
            into += data
        case bytes():
            _pack_head(len(value), into, None, (0xC4, 0xC5, 0xC6))
            into += value
        case _:
            _pack_head(len(value), into, (0x90, 16), (None, 0xDC, 0xDD))
            for one in value:
                _pack(one, into)


def _pack_int(value: int, into: bytearray) -> None:
    if 0 <= value < 128:
        into.append(value)
        return
    for limit, code, form in _UINTS:
        if 0 <= value < limit:
            into += struct.pack(form, code, value)
            return
    raise ValueError(f"{value} is no unsigned number of 64 bits")


def _pack_head(
    length: int, into: bytearray, short: tuple[int, int] | None, codes: tuple[int | None, int, int]
) -> None:
    """Append type and length: in one byte where `short` allows it, else with a length of 8, 16 or 32 bits."""
    if short is not None and length < short[1]:
        into.append(short[0] | length)
    elif codes[0] is not None and length < 1 << 8:
        into += struct.pack(">BB", codes[0], length)
    elif length < 1 << 16:
        into += struct.pack(">BH", codes[1], length)
    else:
        into += struct.pack(">BI", codes[2], length)
