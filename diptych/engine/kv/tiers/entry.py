"""Stored form of one KV block: a header that says what it is, and the block's bytes under a digest.

    magic (8) | fingerprint (16) | key (16) | parent's key (16, zero at a root) | payload bytes (u64) |
    xxh3-128 of all before it and of the payload (16) | payload

The fingerprint stands for everything that two workers must share to exchange blocks: model, types, layout,
block size. An entry is believed only if all of that and the digest are right; it may come from a file that
was cut short, written by another version, or damaged. The digest guards against faults, not against forgers:
who can write into a tier can change the answers.
"""

from __future__ import annotations

import struct

import xxhash

KEY_BYTES = 16
FINGERPRINT_BYTES = 16
_MAGIC = b"diptykv\x01"
_HEAD = struct.Struct(f"<8s{FINGERPRINT_BYTES}s{KEY_BYTES}s{KEY_BYTES}sQ")
_DIGEST_BYTES = 16
HEADER_BYTES = _HEAD.size + _DIGEST_BYTES
_NO_PARENT = bytes(KEY_BYTES)


class DamagedEntry(ValueError):
    """Entry that is not what it should be: cut short, of another model, with other bytes than were stored."""


class EntryFormat:
    """Packs and checks the entries of one kind of blocks."""

    def __init__(self, fingerprint: bytes, block_bytes: int) -> None:
        """Take the 16 bytes that name this kind of blocks, and the bytes of one."""
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint is {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry."""
        return HEADER_BYTES + self.block_bytes

    def pack(self, key: bytes, parent: bytes, payload: bytes | memoryview) -> bytes:
        """Return the entry of a block. Raises ValueError for a key or a payload of another size."""
        if len(key) != KEY_BYTES or len(parent) not in (0, KEY_BYTES) or len(payload) != self.block_bytes:
            raise ValueError("a key of another length, or a block of another size")
        head = self._head(key, parent)
        return b"".join((head, _digest(head, payload), payload))

    def seal(self, entry: memoryview, key: bytes, parent: bytes) -> None:
        """Write the header before a block's bytes, which lie in `entry`. Raises ValueError as `pack`."""
        if len(key) != KEY_BYTES or len(parent) not in (0, KEY_BYTES) or len(entry) != self.entry_bytes:
            raise ValueError("a key of another length, or a block of another size")
        head = self._head(key, parent)
        entry[:HEADER_BYTES] = head + _digest(head, entry[HEADER_BYTES:])

    def payload_of(self, entry: bytes | memoryview, key: bytes, parent: bytes) -> memoryview:
        """Return the block's bytes. Raises DamagedEntry unless it is this key's, whole and unchanged."""
        head = self._head(key, parent)
        if len(entry) != self.entry_bytes:
            raise DamagedEntry(f"{len(entry)} bytes, {self.entry_bytes} were expected")
        view = memoryview(entry)
        if view[: _HEAD.size] != head:
            raise DamagedEntry("the header is another one")
        payload = view[HEADER_BYTES:]
        if view[_HEAD.size : HEADER_BYTES] != _digest(head, payload):
            raise DamagedEntry("the digest is another one")
        return payload

    def _head(self, key: bytes, parent: bytes) -> bytes:
        return _HEAD.pack(_MAGIC, self.fingerprint, key, parent or _NO_PARENT, self.block_bytes)


def _digest(head: bytes, payload: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128(head)
    hasher.update(payload)
    return hasher.digest()
