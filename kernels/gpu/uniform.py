"""Random number of a sampled token, on the device: BLAKE2b (RFC 7693) of seed and counter.

The number is that of `diptych.engine.sampling.random.uniform`: one compression of one block, of whose sixteen
message words two are not zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

# RFC 7693, section 2.6; the first and the last two are changed by the parameters: 8 bytes of digest, no key,
# fan-out 1, depth 1, and the personal string "diptych draw".
_IV0 = tl.constexpr(0x6A09E667F3BCC908)
_IV1 = tl.constexpr(0xBB67AE8584CAA73B)
_IV2 = tl.constexpr(0x3C6EF372FE94F82B)
_IV3 = tl.constexpr(0xA54FF53A5F1D36F1)
_IV4 = tl.constexpr(0x510E527FADE682D1)
_IV5 = tl.constexpr(0x9B05688C2B3E6C1F)
_IV6 = tl.constexpr(0x1F83D9ABFB41BD6B)
_IV7 = tl.constexpr(0x5BE0CD19137E2179)
_PARAMETERS = tl.constexpr(0x01010008)
_PERSON_LOW = tl.constexpr(int.from_bytes(b"diptych ", "little"))
_PERSON_HIGH = tl.constexpr(int.from_bytes(b"draw\0\0\0\0", "little"))
_MESSAGE_BYTES = tl.constexpr(16)
_ALL_ONES = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_ROUNDS = tl.constexpr(12)

_SIGMA = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
    (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
    (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
    (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
    (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
    (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
    (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
    (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
    (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
)
# Where each round's permutation reads words 0 and 1, four bits a round.
_ZERO_AT = tl.constexpr(sum(order.index(0) << 4 * turn for turn, order in enumerate(_SIGMA)))
_ONE_AT = tl.constexpr(sum(order.index(1) << 4 * turn for turn, order in enumerate(_SIGMA)))


@triton.jit
def _rotated(x, BITS: tl.constexpr):
    """Rotate uint64 `x [...]` right by BITS."""
    return (x >> BITS) | (x << (64 - BITS))


@triton.jit
def _word(seed, counter, TURN: tl.constexpr, PLACE: tl.constexpr):
    """Return the message word that round TURN reads at PLACE."""
    word = seed ^ seed
    if ((_ZERO_AT >> (4 * (TURN % 10))) & 15) == PLACE:
        word = seed
    if ((_ONE_AT >> (4 * (TURN % 10))) & 15) == PLACE:
        word = counter
    return word


@triton.jit
def _mixed(a, b, c, d, seed, counter, TURN: tl.constexpr, PLACE: tl.constexpr):
    """Apply the mixing function G to four words."""
    a = a + b + _word(seed, counter, TURN, PLACE)
    d = _rotated(d ^ a, 32)
    c = c + d
    b = _rotated(b ^ c, 24)
    a = a + b + _word(seed, counter, TURN, PLACE + 1)
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 63)
    return a, b, c, d


@triton.jit
def uniform(seed, counter):
    """Return the number in [0, 1), float64, of `counter` under `seed` (uint64 both): 53 bits of the hash."""
    none = seed ^ seed
    chain0 = none + (_IV0 ^ _PARAMETERS)
    v0, v1, v2, v3 = chain0, none + _IV1, none + _IV2, none + _IV3
    v4, v5 = none + _IV4, none + _IV5
    v6, v7 = none + (_IV6 ^ _PERSON_LOW), none + (_IV7 ^ _PERSON_HIGH)
    v8, v9, v10, v11 = none + _IV0, none + _IV1, none + _IV2, none + _IV3
    v12, v13, v14, v15 = none + (_IV4 ^ _MESSAGE_BYTES), none + _IV5, none + (_IV6 ^ _ALL_ONES), none + _IV7
    for turn in tl.static_range(_ROUNDS):
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, seed, counter, turn, 0)
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, seed, counter, turn, 2)
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, seed, counter, turn, 4)
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, seed, counter, turn, 6)
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, seed, counter, turn, 8)
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, seed, counter, turn, 10)
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, seed, counter, turn, 12)
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, seed, counter, turn, 14)
    hashed = chain0 ^ v0 ^ v8
    return (hashed >> 11).to(tl.float64) * 1.1102230246251565e-16
