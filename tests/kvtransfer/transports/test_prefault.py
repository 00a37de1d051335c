"""Prefault of a pool: all pages are taken, in every process, unless memory is short."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import threading
import weakref
from pathlib import Path

import pytest

from kvtransfer.transports import prefault as module
from kvtransfer.transports.prefault import available_memory, populate, total_memory

SIZE = 8 << 20


def file_and_mapping(size: int = SIZE) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("pages", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size, mmap.MAP_SHARED)


def taken(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def mapped_pages() -> list[int]:
    """Return the bytes of each mapping of the file that have a page in this process' tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = []
    for line in lines:
        if "memfd:pages" in line:
            rss = next(entry for entry in lines if entry.startswith("Rss:"))
            found.append(int(rss.split()[1]) << 10)
    return found


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 40)


def test_populate_takes_all_pages_and_keeps_their_bytes():
    fd, mapping = file_and_mapping()
    mapping[5 << 20] = 7
    assert taken(fd) < SIZE
    populate(mapping, fd).join(30)
    assert taken(fd) == SIZE
    assert mapped_pages() == [SIZE]
    assert mapping[5 << 20] == 7
    assert mapping.find(b"\1") < 0, "the rest is zero"
    os.close(fd)


def test_populate_fills_the_tables_of_a_second_mapping():
    fd, mapping = file_and_mapping()
    populate(mapping, fd).join(30)
    second = mmap.mmap(fd, SIZE, mmap.MAP_SHARED)
    assert sorted(mapped_pages()) == [0, SIZE]
    populate(second, fd).join(30)
    assert mapped_pages() == [SIZE, SIZE]
    os.close(fd)


def test_populate_of_a_small_pool_needs_no_thread():
    fd, mapping = file_and_mapping(1 << 20)
    assert populate(mapping, fd) is None
    assert taken(fd) == len(mapping)
    os.close(fd)


def test_populate_leaves_the_pool_when_memory_is_short(monkeypatch, caplog):
    monkeypatch.setattr(module, "available_memory", lambda: SIZE)
    fd, mapping = file_and_mapping()
    with caplog.at_level(logging.WARNING):
        assert populate(mapping, fd) is None
    assert taken(fd) == 0
    assert "8 MiB of memory are available, the KV pool needs 8 more" in caplog.text
    mapping[0] = 1
    assert taken(fd) > 0
    os.close(fd)


def test_populate_discounts_pages_of_another_process(monkeypatch):
    fd, mapping = file_and_mapping()
    populate(mapping, fd).join(30)
    monkeypatch.setattr(module, "available_memory", lambda: 0)
    second = mmap.mmap(fd, SIZE, mmap.MAP_SHARED)
    populate(second, fd).join(30)
    assert mapped_pages() == [SIZE, SIZE]
    os.close(fd)


def test_populate_without_kernel_support_changes_nothing(monkeypatch):
    monkeypatch.setattr(module, "_POPULATE_WRITE", 9999)
    fd, mapping = file_and_mapping()
    populate(mapping, fd).join(30)
    assert taken(fd) == 0
    mapping[SIZE - 1] = 3
    assert mapping[SIZE - 1] == 3
    os.close(fd)


def test_populate_does_not_keep_the_mapping_alive(monkeypatch):
    go_on, slices = threading.Event(), []
    real = module._populate_slice

    def slowly(pages: mmap.mmap, start: int, size: int) -> bool:
        slices.append(start)
        return real(pages, start, size)

    class Held(weakref.ref):
        def __call__(self):
            if slices:
                go_on.wait(30)
            return super().__call__()

    monkeypatch.setattr(module, "_populate_slice", slowly)
    monkeypatch.setattr(module.weakref, "ref", Held)
    fd, mapping = file_and_mapping()
    thread = populate(mapping, fd)
    os.close(fd)
    del mapping
    gc.collect()
    go_on.set()
    thread.join(30)
    assert len(slices) <= 1
    assert mapped_pages() == []


def test_available_memory_is_limited_by_the_container(monkeypatch, tmp_path):
    monkeypatch.undo()
    machine = available_memory()
    assert machine is not None
    assert 0 < machine <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "memory.max").write_text("300\n")
    (tmp_path / "memory.current").write_text("100\n")
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    assert available_memory() == 200
    assert total_memory() == 300
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 200
