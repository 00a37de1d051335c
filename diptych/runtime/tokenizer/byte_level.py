"""GPT-2's spelling of bytes, in which byte-level vocabularies are written."""

from __future__ import annotations

from typing import Final


def _alphabet() -> dict[str, int]:
    """Return the byte of each character: printable ones as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF: Final = _alphabet()
_CHAR_OF: Final = {byte: char for char, byte in _BYTE_OF.items()}


def read_bytes(token: str) -> bytes:
    """Return the bytes that `token` spells; one outside the alphabet stands for itself, as in the library."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def spell_bytes(data: bytes) -> str:
    """Return the spelling of `data`."""
    return "".join([_CHAR_OF[byte] for byte in data])
