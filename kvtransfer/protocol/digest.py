"""The digest of one pushed block: xxh3-128 over the grant, the block's place in it, and the bytes.

The name of the grant comes first, so that a block of another request, of an earlier generation, or from
another place in the same table is caught like a flipped bit. It guards against faults, not against forgers.
"""

from __future__ import annotations

import struct

import xxhash

from kvtransfer.protocol.messages import GrantRef

DIGEST_BYTES = 16
_PLACE = struct.Struct("<IQIII")


def block_digest(ref: GrantRef, index: int, payload: bytes | bytearray | memoryview) -> bytes:
    """16 bytes that bind `payload` to block `index` of the grant's table."""
    request_id, attempt = ref.key
    name = request_id.encode()
    hasher = xxhash.xxh3_128(_PLACE.pack(ref.slot, ref.generation, attempt, index, len(name)))
    hasher.update(name)
    hasher.update(payload)
    return hasher.digest()
