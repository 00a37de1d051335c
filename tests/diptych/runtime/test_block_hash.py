import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.block_hash import block_keys, namespace_key

SECRET = bytes(range(32))
NAMESPACE = namespace_key(SECRET, tenant="t", salt="s", model_digest="m", kv_dtype="fp32")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_the_hash_is_pinned() -> None:
    """Gateways and workers of one HASH_VERSION must agree on these bytes, whatever is rewritten."""
    assert NAMESPACE.hex() == "9c14b87620c1ad026c443f918a062a6504c6e7de9517f13e3383fc69954a5a66"
    assert [key.hex() for key in block_keys(NAMESPACE, [1, 2, 3, 4, 5], 2)] == [
        "8cd078ad7f0f82ecac3eda8e09387919",
        "fd9d9b30b78d66bddddf899919edf4d5",
    ]


@given(tokens, st.integers(1, 5))
def test_full_blocks_only_each_of_16_bytes(ids: list[int], block_size: int) -> None:
    keys = block_keys(NAMESPACE, ids, block_size)
    assert len(keys) == len(ids) // block_size
    assert all(len(key) == 16 for key in keys)
    assert len(set(keys)) == len(keys)


@given(tokens, st.integers(1, 5), st.data())
def test_a_chain_continues_where_it_stopped(ids: list[int], block_size: int, data: st.DataObject) -> None:
    keys = block_keys(NAMESPACE, ids, block_size)
    done = data.draw(st.integers(0, len(keys)))
    parent = keys[done - 1] if done else b""
    rest = block_keys(NAMESPACE, ids[done * block_size :], block_size, parent=parent)
    assert keys[:done] + rest == keys


@given(st.lists(st.integers(0, 9), min_size=12, max_size=12), st.integers(0, 11))
def test_a_key_names_everything_before_its_block(ids: list[int], changed: int) -> None:
    before = block_keys(NAMESPACE, ids, 4)
    other = list(ids)
    other[changed] += 1
    after = block_keys(NAMESPACE, other, 4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < changed // 4 for i in range(3)]


def test_every_field_separates_namespaces() -> None:
    base = {"tenant": "ab", "salt": "c", "model_digest": "d", "kv_dtype": "e"}
    variants = [
        namespace_key(SECRET, **base),
        namespace_key(SECRET[:-1], **base),
        *(namespace_key(SECRET, **{**base, name: value + "x"}) for name, value in base.items()),
        namespace_key(SECRET, **{**base, "tenant": "a", "salt": "bc"}),
        namespace_key(SECRET, **{**base, "salt": "\ud800"}),
        namespace_key(SECRET, **base, adapter=b"f"),
        namespace_key(SECRET, **base, adapter=b"g"),
        namespace_key(SECRET, **{**base, "kv_dtype": "ef"}),
    ]
    assert len(set(variants)) == len(variants)


def test_what_cannot_be_a_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 0"):
        block_keys(NAMESPACE, [1] * 9, 0)
    with pytest.raises(ValueError, match="parent"):
        block_keys(NAMESPACE, [1] * 9, 4, parent=bytes(15))
    with pytest.raises(ValueError, match="32-bit"):
        block_keys(NAMESPACE, [2**32] * 4, 4)
    with pytest.raises(ValueError, match="32-bit"):
        block_keys(NAMESPACE, [-1] * 4, 4)
    with pytest.raises(ValueError, match="namespace"):
        block_keys(b"short", [1] * 4, 4)
    with pytest.raises(ValueError, match="secret"):
        namespace_key(b"", tenant="", salt="", model_digest="", kv_dtype="")
