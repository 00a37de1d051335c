"""Mapping and unmapping of a pool: by admitted writers only, for as long as it is used."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest

from kvtransfer.drivers.peer import Peer
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import ReceiverHooks, TransportError, Welcome, host_id
from kvtransfer.transports.memory_mapping import HostMapping
from kvtransfer.transports.pool_memory import allocate_pool, map_pool
from kvtransfer.transports.shared_memory import SharedMemoryReceiver, open_shared_memory
from tests.kvtransfer.conftest import LAYOUT, until

PORT = HostMapping(host_id())


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:diptych-kv")


@pytest.fixture
async def receiver():
    dead: list[WriterId] = []
    hooks = ReceiverHooks(dead.append, lambda *a: None, lambda *a: None, lambda *a: None, lambda *a: None)
    pool = allocate_pool(LAYOUT, 4)
    receiver = SharedMemoryReceiver("shared_memory", pool, PORT, hooks)
    await receiver.start()
    receiver.pool = pool
    yield receiver
    await receiver.close()


def welcome(receiver: SharedMemoryReceiver, token: bytes) -> Welcome:
    return Welcome("127.0.0.1:1", receiver.endpoint, token, LAYOUT, 4)


async def test_mapped_pool_shares_its_bytes(receiver):
    token = receiver.admit(WriterId("w", 1), os.getpid())
    theirs = await open_shared_memory(welcome(receiver, token), PORT)
    assert receiver.registered(WriterId("w", 1))
    theirs.data[2] = 5.0
    assert float(receiver.pool.memory.data[2].mean()) == 5.0
    assert float(receiver.pool.memory.data[1].mean()) == 0.0


async def test_pool_is_unmapped_with_its_last_user(make_pair):
    before = mappings()
    pair = await make_pair("shared_memory")
    granted = await pair.grant("r", 10)
    first, again = await pair.peer(), await pair.peer()
    assert first is again
    assert mappings() == before + 2, "the pool itself and one mapping of it, however often it is used"
    await pair.prefill.client.close()
    assert mappings() == before + 2, "a grant that may still be written keeps its memory"
    granted.memory.data[granted.block_table[0]] = 1.0
    del granted
    await until(lambda: mappings() == before + 1)


@pytest.mark.parametrize("case", ["unknown token", "another process", "used token"])
async def test_registration_without_admission_is_refused(receiver, case):
    pid = os.getppid() if case == "another process" else os.getpid()
    token = receiver.admit(WriterId("w", 1), pid)
    kept = [await open_shared_memory(welcome(receiver, token), PORT)] if case == "used token" else []
    before = mappings()
    with pytest.raises(TransportError):
        await open_shared_memory(welcome(receiver, bytes(32) if case == "unknown token" else token), PORT)
    assert mappings() == before
    assert len(kept) == (case == "used token")


def test_map_pool_requires_a_sealed_size():
    pool = allocate_pool(LAYOUT, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 0)
    with pytest.raises(ValueError, match="smaller"):
        map_pool(pool.fd, LAYOUT, 3)
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 2 * LAYOUT.bytes_per_block)
    with pytest.raises(ValueError, match="sealed"):
        map_pool(unsealed, LAYOUT, 2)
    os.close(unsealed)


def test_host_id_is_stable():
    assert host_id() == host_id()
    assert len(host_id()) == 32


@pytest.mark.parametrize("last", ["the peer", "a request"])
async def test_pool_is_unmapped_in_a_thread_whoever_used_it_last(last: str) -> None:
    """The pages of a dead decode worker are freed then.

    On the event loop this process would be fenced itself.
    """
    before = mappings()
    pool = allocate_pool(LAYOUT, 4)
    peer = Peer("127.0.0.1:1", 1, on_abort=lambda *_: None, on_lost=lambda *_: None)
    peer.memory = map_pool(pool.file(), LAYOUT, 4)
    mapping = peer.memory._bytes.obj
    gone: list[str] = []
    weakref.finalize(mapping, lambda: gone.append(threading.current_thread().name))
    del mapping
    blocks = [peer.memory.data] if last == "a request" else []
    peer.unmap()
    assert peer.memory is None
    assert mappings() == before + 2 or not blocks
    blocks.clear()
    await until(lambda: gone == ["kv-unmap"])
    await until(lambda: mappings() == before + 1)
