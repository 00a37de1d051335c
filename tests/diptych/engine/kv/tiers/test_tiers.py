"""Tiers: what comes back is what was stored or nothing, within the quota, whatever becomes of the files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from diptych.engine.kv.tiers import stack as stack_module
from diptych.engine.kv.tiers.disk import DiskTier
from diptych.engine.kv.tiers.entry import HEADER_BYTES, DamagedEntry, EntryFormat
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.stack import TierStack

BLOCK = 96
FORM = EntryFormat(b"f" * 16, BLOCK)
ENTRY = FORM.entry_bytes
CHAIN = [number.to_bytes(16, "big") for number in range(1, 9)]


def payload(key: bytes) -> bytes:
    return key * (BLOCK // 16)


def parent(key: bytes) -> bytes:
    place = CHAIN.index(key)
    return CHAIN[place - 1] if place else b""


def made(folder: Path, ram: int = 3, disk: int = 6) -> TierStack:
    return TierStack([RamTier(ram * ENTRY), DiskTier(folder, disk * ENTRY, FORM.fingerprint)], FORM)


def put(stack: TierStack, key: bytes) -> None:
    stack.put(key, parent(key), payload(key), stack.epoch)


def files(folder: Path) -> list[Path]:
    return sorted((folder / FORM.fingerprint.hex()).glob("*.kv"))


class Tiers(RuleBasedStateMachine):
    """Two workers with tiers over one folder, and what happens to it."""

    folder: Path

    @initialize()
    def begin(self) -> None:
        for file in files(self.folder) if self.folder.exists() else ():
            file.unlink()
        self.stacks = [made(self.folder), made(self.folder)]

    @rule(worker=st.integers(0, 1), key=st.sampled_from(CHAIN))
    def stores(self, worker: int, key: bytes) -> None:
        put(self.stacks[worker], key)

    @rule(worker=st.integers(0, 1), key=st.sampled_from(CHAIN))
    def reads(self, worker: int, key: bytes) -> None:
        found = self.stacks[worker].get(key, parent(key))
        assert found is None or bytes(found.payload) == payload(key)

    @rule(worker=st.integers(0, 1), key=st.sampled_from(CHAIN))
    def forgets(self, worker: int, key: bytes) -> None:
        stack = self.stacks[worker]
        stack.end_epoch()
        stack.forget([key])
        assert key not in stack

    @rule(worker=st.integers(0, 1))
    def dies_and_starts_again(self, worker: int) -> None:
        self.stacks[worker] = made(self.folder)

    @rule(worker=st.integers(0, 1))
    def looks_again(self, worker: int) -> None:
        self.stacks[worker].tiers[1].refresh()  # type: ignore[attr-defined]

    @rule(number=st.integers(0, 10), kind=st.sampled_from(["flip", "cut", "empty", "vanish", "swap"]))
    def file_is_damaged(self, number: int, kind: str) -> None:
        there = files(self.folder)
        if not there:
            return
        file, other = there[number % len(there)], there[(number + 1) % len(there)]
        content = bytearray(file.read_bytes())
        match kind:
            case "flip" if content:
                content[number * 37 % len(content)] ^= 1
                file.write_bytes(content)
            case "cut" | "empty":
                file.write_bytes(content[: len(content) // 2 if kind == "cut" else 0])
            case "vanish":
                file.unlink()
            case "swap":
                file.write_bytes(other.read_bytes())

    @invariant()
    def keeps_within_its_quota(self) -> None:
        for stack in getattr(self, "stacks", ()):
            ram, disk = stack.tiers
            assert ram.used <= 3 * ENTRY
            assert disk.used <= 6 * ENTRY


@pytest.fixture
def machine(tmp_path: Path) -> type[Tiers]:
    return type("TiersHere", (Tiers,), {"folder": tmp_path / "kv"})


def test_nothing_but_what_was_stored_comes_back(machine: type[Tiers]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def test_control_without_the_digest_a_damaged_block_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged_on_disk() -> bytes | None:
        put(made(tmp_path), CHAIN[0])
        (file,) = files(tmp_path)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        found = made(tmp_path).get(CHAIN[0], b"")
        return None if found is None else bytes(found.payload)

    assert damaged_on_disk() is None
    monkeypatch.setattr("diptych.engine.kv.tiers.entry._digest", lambda head, payload: bytes(16))
    assert damaged_on_disk() not in (None, payload(CHAIN[0]))


def test_entry_is_believed_only_under_its_own_key_parent_and_kind() -> None:
    entry = FORM.pack(CHAIN[1], CHAIN[0], payload(CHAIN[1]))
    assert bytes(FORM.payload_of(entry, CHAIN[1], CHAIN[0])) == payload(CHAIN[1])
    for key, before, form in (
        (CHAIN[2], CHAIN[0], FORM),
        (CHAIN[1], b"", FORM),
        (CHAIN[1], CHAIN[0], EntryFormat(b"g" * 16, BLOCK)),
        (CHAIN[1], CHAIN[0], EntryFormat(b"f" * 16, BLOCK + 1)),
    ):
        with pytest.raises(DamagedEntry):
            form.payload_of(entry, key, before)
    with pytest.raises(ValueError, match="another size"):
        FORM.pack(CHAIN[1], CHAIN[0], b"short")


def test_one_flipped_bit_anywhere_is_found() -> None:
    entry = FORM.pack(CHAIN[0], b"", payload(CHAIN[0]))
    for place in range(len(entry)):
        damaged = bytearray(entry)
        damaged[place] ^= 0x10
        with pytest.raises(DamagedEntry):
            FORM.payload_of(bytes(damaged), CHAIN[0], b"")
    assert len(entry) == HEADER_BYTES + BLOCK


def test_end_of_the_least_recently_used_chain_leaves_first(tmp_path: Path) -> None:
    now = [100.0]
    tier = RamTier(5 * ENTRY, lambda: now[0])
    stack = TierStack([tier], FORM)
    dropped: list[bytes] = []
    stack.on_dropped = dropped.extend
    others = [bytes([9, number] * 8) for number in range(4)]
    for key in CHAIN[:3]:
        put(stack, key)
    now[0] += 10
    for place, key in enumerate(others[:2]):
        stack.put(key, others[place - 1] if place else b"", payload(key), stack.epoch)
    now[0] += 10
    stack.get(CHAIN[1], CHAIN[0])  # counts for the one before it, not for the one after
    now[0] += 10
    stack.put(others[2], others[1], payload(others[2]), stack.epoch)
    assert dropped == [CHAIN[2]]
    stack.put(others[3], others[2], payload(others[3]), stack.epoch)
    assert dropped == [CHAIN[2], CHAIN[1]], "the others were used with the new one"


def test_key_is_reported_once_it_lies_in_no_tier(tmp_path: Path) -> None:
    stack = made(tmp_path, ram=1, disk=3)
    dropped: list[bytes] = []
    stack.on_dropped = dropped.extend
    for key in CHAIN[:3]:
        put(stack, key)
    assert dropped == []
    put(stack, CHAIN[3])
    assert len(dropped) == 1
    assert dropped[0] not in stack


def test_what_the_disk_has_moves_up_and_outlives_the_process(tmp_path: Path) -> None:
    first = made(tmp_path)
    for key in CHAIN[:5]:
        put(first, key)
    first.close()
    again = made(tmp_path)
    assert again.leading(CHAIN) == 5
    tiers = [again.get(key, parent(key)) for key in (CHAIN[0], CHAIN[0])]
    assert [one.tier if one else None for one in tiers] == ["disk", "ram"]


def test_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    first = made(tmp_path, ram=1, disk=3)
    alone = [CHAIN[0], CHAIN[2], CHAIN[4]]  # of three chains
    for age, key in enumerate(alone):
        first.put(key, b"", payload(key), first.epoch)
        path = next(file for file in files(tmp_path) if file.name.startswith(key.hex()))
        os.utime(path, (1000 + age, 1000 + age))
    first.tiers[1].get(alone[0])
    again = made(tmp_path, ram=1, disk=3)
    again.put(CHAIN[6], b"", payload(CHAIN[6]), again.epoch)
    assert sorted(key for key, _ in again.tiers[1].items()) == [alone[0], alone[2], CHAIN[6]]


def test_forgetting_takes_what_continues_a_key_and_nothing_else(tmp_path: Path) -> None:
    stack = made(tmp_path, ram=8, disk=8)
    for key in CHAIN[:5]:
        put(stack, key)
    stack.end_epoch()
    stack.forget([CHAIN[2]])
    assert sorted(stack.keys()) == CHAIN[:2]
    assert len(files(tmp_path)) == 2
    stack.clear()
    assert stack.keys() == []
    assert files(tmp_path) == []


def test_what_was_read_before_a_forgetting_is_not_stored_after_it(tmp_path: Path) -> None:
    stack = made(tmp_path)
    before = stack.epoch
    stack.end_epoch()
    stack.put(CHAIN[0], b"", payload(CHAIN[0]), before)
    assert stack.keys() == []


def test_full_disk_costs_a_line_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stack = made(tmp_path)

    def full(*_: object, **__: object) -> Iterator[None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diptych.engine.kv.tiers.disk.os.open", full)
    for key in CHAIN[:3]:
        put(stack, key)
    assert len([one for one in caplog.records if "takes no block" in one.message]) == 1
    assert stack.get(CHAIN[0], b"") is not None, "memory has it"
    assert files(tmp_path) == []
    assert stack_module._LOG_EVERY_S > 0


def test_file_system_that_is_full_keeps_what_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user cannot mount a small file system")
    try:
        stack = made(folder, ram=8, disk=8)
        for key in CHAIN:
            put(stack, key)
        ram, disk = stack.tiers
        assert 0 < len(disk.items()) < len(CHAIN)
        assert len(ram.items()) == len(CHAIN)
        assert {file.stat().st_size for file in files(folder)} == {ENTRY}, "nothing half written is left"
        again = made(folder)
        for key in CHAIN:
            found = again.get(key, parent(key))
            assert found is None or bytes(found.payload) == payload(key)
        assert again.damaged == 0
    finally:
        subprocess.run(["umount", folder], check=True)


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    stack = made(tmp_path / "kv")
    put(stack, CHAIN[0])
    (file,) = files(tmp_path / "kv")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0


def test_strange_and_unfinished_files_are_left_alone(tmp_path: Path) -> None:
    stack = made(tmp_path)
    folder = tmp_path / FORM.fingerprint.hex()
    for name in ("notes.txt", "zz-.kv", "aa.kv", "1-2.part"):
        (folder / name).write_bytes(b"x")
    os.utime(folder / "1-2.part", (0, 0))
    again = made(tmp_path)
    assert again.keys() == stack.keys() == []
    assert not (folder / "1-2.part").exists(), "its writer is long gone"
    assert (folder / "notes.txt").exists()


def test_rescan_tells_what_others_stored_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.engine.kv.tiers.disk.RESCAN_S", 0.0)
    monkeypatch.setattr("diptych.engine.kv.tiers.disk._RESCAN_SHARE", 1e9)
    one, other = made(tmp_path), made(tmp_path)
    found: list[bytes] = []
    dropped: list[bytes] = []
    other.on_found, other.on_dropped = found.extend, dropped.extend
    for key in CHAIN[:3]:
        put(one, key)
    other.rescan()
    assert sorted(found) == CHAIN[:3]
    assert other.get(CHAIN[0], b"") is not None
    one.end_epoch()
    one.forget(CHAIN[:1])
    other.rescan()
    assert sorted(dropped) == CHAIN[1:3], "the first is in its memory"


def test_unchanged_folder_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.engine.kv.tiers.disk.RESCAN_S", 0.0)
    monkeypatch.setattr("diptych.engine.kv.tiers.disk._RESCAN_SHARE", 1e9)
    put(made(tmp_path), CHAIN[0])
    folder = tmp_path / FORM.fingerprint.hex()
    os.utime(folder, (1000, 1000))
    tier = DiskTier(tmp_path, 6 * ENTRY, FORM.fingerprint)
    reads: list[None] = []
    refresh = tier.refresh
    monkeypatch.setattr(tier, "refresh", lambda: (reads.append(None), refresh()))
    assert tier.rescan() == (set(), set())
    assert not reads
    put(made(tmp_path), CHAIN[1])
    assert tier.rescan().came == {CHAIN[1]}
    assert len(reads) == 1


def test_worker_that_only_reads_a_tier_stores_nothing_there(tmp_path: Path) -> None:
    put(made(tmp_path), CHAIN[0])
    ram, disk = RamTier(3 * ENTRY), DiskTier(tmp_path, 6 * ENTRY, FORM.fingerprint)
    reader = TierStack([ram, disk], FORM, {"disk"})
    put(reader, CHAIN[1])
    assert reader.get(CHAIN[0], b"") is not None
    assert [key for key, _ in disk.items()] == [CHAIN[0]]
    assert sorted(key for key, _ in ram.items()) == CHAIN[:2]
    assert not TierStack([disk], FORM, {"disk"}).stores
    reader.end_epoch()
    reader.forget([CHAIN[0]])
    assert files(tmp_path) == [], "what must be forgotten is removed by everybody"
