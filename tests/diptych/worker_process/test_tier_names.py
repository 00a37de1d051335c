"""Names under which tiers keep blocks: the same for every degree, another for what computes other bits."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from diptych.engine.kv.tiers.entry import DamagedEntry
from diptych.engine.kv.tiers.stack import TierStack
from diptych.runtime.kv_tier_specs import parse_tiers
from diptych.worker_process.tier_stack import make_stack
from kvtransfer.drivers.handshake import Fingerprint
from tests.kvtransfer.conftest import FINGERPRINT

KEY, PARENT, PAYLOAD = b"k" * 16, b"p" * 16, bytes(range(256))
GROUP = replace(FINGERPRINT, tensor_parallel=2, sum_parts=2)
EVERY = [field.name for field in fields(Fingerprint) if field.name != "tensor_parallel"]


def stack(folder: Path, fingerprint: Fingerprint) -> TierStack:
    made = make_stack(parse_tiers(f"disk:{folder}:1m"), fingerprint, len(PAYLOAD))
    assert made is not None
    return made


def stored(folder: Path, fingerprint: Fingerprint = GROUP) -> None:
    """Store the block, as a worker with this fingerprint does."""
    one = stack(folder, fingerprint)
    one.put(KEY, PARENT, PAYLOAD, one.epoch)


def found(folder: Path, fingerprint: Fingerprint) -> bool:
    """Return whether a worker with this fingerprint gets the block."""
    one = stack(folder, fingerprint)
    block = one.get(KEY, PARENT)
    assert block is None or bytes(block.payload) == PAYLOAD
    return block is not None


def other(name: str) -> Fingerprint:
    """Return the group's fingerprint with another value of a field."""
    value = getattr(GROUP, name)
    return replace(GROUP, **{name: value + "x" if isinstance(value, str) else value + 1})


@pytest.mark.parametrize("degree", [1, 2, 6])
def test_workers_of_any_degree_find_a_groups_blocks(tmp_path: Path, degree: int) -> None:
    stored(tmp_path)
    assert found(tmp_path, replace(GROUP, tensor_parallel=degree))


@pytest.mark.parametrize("name", EVERY)
def test_workers_that_differ_in_anything_else_do_not(tmp_path: Path, name: str) -> None:
    """Parts, how experts are dealt, a draft model's segment, the layout and all that handshakes compare."""
    stored(tmp_path)
    assert not found(tmp_path, other(name))


@pytest.mark.parametrize("name", ["sum_parts", "expert_parallel", "expert_all_to_all"])
def test_workers_whose_parts_no_name_tells_do(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: keys of blocks say nothing of parts, so that a name without them lets others in."""
    same = property(lambda self: replace(self, tensor_parallel=1, **{name: getattr(FINGERPRINT, name)}))
    monkeypatch.setattr(Fingerprint, "of_whole_blocks", same)
    stored(tmp_path)
    assert found(tmp_path, other(name))


def test_file_of_other_parts_under_the_right_name_is_damaged(tmp_path: Path) -> None:
    """The header says it, too: who moves a file into another folder gets a miss."""
    stored(tmp_path)
    (file,) = tmp_path.rglob("*.kv")
    others = stack(tmp_path, FINGERPRINT)
    moved = next(path for path in tmp_path.iterdir() if path.is_dir() and path != file.parent) / file.name
    moved.write_bytes(file.read_bytes())
    with pytest.raises(DamagedEntry, match="header"):
        others._format.payload_of(moved.read_bytes(), KEY, PARENT)
    assert not found(tmp_path, FINGERPRINT)
    assert not moved.exists()


def test_files_of_the_release_before_are_found(tmp_path: Path) -> None:
    """One process stored under its whole fingerprint, of degree 1: that name is the same today."""
    before = hashlib.blake2b(repr(FINGERPRINT).encode(), digest_size=16).hexdigest()
    stored(tmp_path, FINGERPRINT)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [before]
