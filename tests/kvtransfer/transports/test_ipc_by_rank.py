"""Memories that ranks map of one another: cut by index, checked where they lie, and given up on proof alone.

Memories are files of this host here. IPC handles, streams and the converting kernel are a GPU's, not tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import Holders
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import KVHolder, ReceiverHooks, Run, TransportError, Welcome, host_id
from kvtransfer.transports.fd_passing import register
from kvtransfer.transports.ipc_by_rank import IpcByRankChannel
from kvtransfer.transports.ipc_receiver_by_rank import IpcByRankReceiver
from kvtransfer.transports.memory_mapping import Flags, HostMapping
from kvtransfer.transports.share_mapping import read_source_token, source_token
from tests.kvtransfer.conftest import until
from tests.kvtransfer.thread_ranks import own_pool, spread_over_threads
from tests.kvtransfer.transports.test_by_rank import (
    BLOCKS,
    FOUR,
    LATENT,
    LAYOUT,
    ONE,
    REF,
    STAGES,
    THREE,
    TWO,
    WRITER,
    Group,
    cut,
    dealt,
    filled,
)


class Pair:
    """Both ends, with one open grant of three blocks; all ranks are threads of this process."""

    def __init__(
        self, source: Holders, target: Holders, layout: KVLayout, ranks: contextlib.ExitStack
    ) -> None:
        self.pools = [own_pool(layout, 6, holders[0][0]) for holders in (source, target)]
        groups = []
        for pool, holders in zip(self.pools, (source, target), strict=True):
            others = ()
            if len(holders) > 1:
                others = ranks.enter_context(spread_over_threads(pool.memory, holders))
            groups.append(Group(pool.memory, holders, others))
        self.source, self.target = groups
        self.arrived: dict[int, bytes] = {}
        self.dead: list[WriterId] = []
        self.corrupt = 0
        hooks = ReceiverHooks(
            dead=self.dead.append,
            resolve=lambda writer, slot, generation: REF,
            destinations=lambda writer, ref, places: BLOCKS[places.start : places.stop],
            arrived=lambda writer, ref, first, digests: self.arrived.update(enumerate(digests, first)),
            corrupt=self._count_corrupt,
        )
        self.mapping = HostMapping(host_id())
        self.receiver = IpcByRankReceiver(self.pools[1], self.mapping, hooks)
        self.channel: IpcByRankChannel

    def _count_corrupt(self, writer: WriterId, ref: GrantRef) -> None:
        self.corrupt += 1

    def admit(self, pids: Sequence[int] | None = None) -> Welcome:
        pids = [os.getpid()] * len(self.source.holders) if pids is None else pids
        found = self.receiver.admit_holders(WRITER, self.source.holders, pids)
        return Welcome("127.0.0.1:1", "", b"", self.source.memory.layout, 6, holders=tuple(found))

    async def connect(self) -> None:
        await self.receiver.start()
        welcome = self.admit()
        assert not self.receiver.registered(WRITER)
        self.channel = await IpcByRankChannel.open(welcome, self.source.memory, self.mapping)
        assert self.receiver.registered(WRITER), "before any rank hears that it is"

    async def send(self) -> list[bytes] | None:
        run = Run(REF, 0, self.source.memory, (1, 2, 4), BLOCKS)
        return await self.channel.send(run, lambda ref: True)

    async def close(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        await self.receiver.close()
        for pool in self.pools:
            os.close(pool.file())


Make = Callable[..., Any]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Make two groups: `make(source, target, layout)`."""
    with contextlib.ExitStack() as ranks:
        made: list[Pair] = []

        def make(source: Holders, target: Holders, layout: KVLayout = LAYOUT) -> Pair:
            made.append(Pair(source, target, layout, ranks))
            return made[-1]

        yield make
        for pair in made:
            await pair.close()
        made.clear()
    gc.collect()  # other tests count mappings and files
    await until(lambda: not any(thread.name == "kv-unmap" for thread in threading.enumerate()))


@pytest.mark.parametrize(
    ("source", "target", "layout"),
    [
        (ONE, TWO, LAYOUT),
        (TWO, ONE, LAYOUT),
        (TWO, FOUR, LAYOUT),
        (FOUR, TWO, LAYOUT),
        (THREE, ONE, LAYOUT),
        (TWO, THREE, LAYOUT),
        (TWO, TWO, LAYOUT),
        (STAGES, TWO, LAYOUT),
        (TWO, STAGES, LAYOUT),
        (dealt((0, 1), (0, 1)), dealt((0, 1), (0, 1), stages=2), LATENT),
    ],
    ids=["1-2", "2-1", "2-4", "4-2", "3-1", "2-3", "2-2", "2x2-2", "2-2x2", "latent"],
)
async def test_each_rank_writes_its_heads_where_they_belong(
    make: Make, source: Holders, target: Holders, layout: KVLayout
) -> None:
    pair = make(source, target, layout)
    await pair.connect()
    whole = filled(pair.source)
    digests = await pair.send()
    assert cut(pair, list(whole.values())), "when `send` is over, all lies there"
    if layout.num_kv_heads > 1:
        assert not cut(pair, list(whole.values()), shift=1), "the control: heads off by one"
    pair.receiver.pushed(WRITER, REF, 0, 3)
    await until(lambda: len(pair.arrived) == 3)
    assert [pair.arrived[index] for index in range(3)] == digests
    assert pair.channel.sent == pair.channel.acknowledged == 3
    assert not pair.corrupt
    assert not pair.dead


@pytest.mark.parametrize("target", [0, 1])
async def test_digests_are_of_what_lies_in_each_ranks_memory(make: Make, target: int) -> None:
    pair = make(TWO, TWO)
    await pair.connect()
    filled(pair.source)
    digests = await pair.send()
    memory = pair.target.ranks[0].memory if target else pair.pools[1].memory
    memory.data[BLOCKS[1]].view(-1)[3] += 1
    pair.receiver.pushed(WRITER, REF, 0, 3)
    await until(lambda: len(pair.arrived) == 3)
    assert [pair.arrived[index] == digests[index] for index in range(3)] == [True, False, True]


async def test_blocks_that_a_rank_announces_and_did_not_write_are_corrupt(make: Make) -> None:
    pair = make(TWO, TWO)
    await pair.connect()
    filled(pair.source)
    pages = [Flags.create(6) for _ in range(2)]
    for mapped in pair.channel._own._mapped:
        mapped.pool.flags = pages.pop()
    await pair.send()
    pair.receiver.pushed(WRITER, REF, 0, 3)
    await until(lambda: pair.corrupt == 1)
    assert not pair.arrived


async def test_a_copy_that_fails_at_one_rank_ends_when_all_are_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make(TWO, THREE)
    await pair.connect()
    whole = filled(pair.source)
    written: list[object] = []

    class OutOfResources(Exception):
        """An error of Triton's, which is no RuntimeError."""

    class Failing(HostMapping):
        def start_share_copy(self, run: Any, flag: Any) -> Callable[[], list[bytes]]:
            copy = super().start_share_copy(run, flag)

            def finish() -> list[bytes]:
                if not written:
                    written.append(run)
                    raise OutOfResources("shared memory")
                return copy()

            return finish

    pair.channel._own._mapping = Failing(host_id())
    with pytest.raises(TransportError, match="not copied"):
        await pair.send()
    (share,) = THREE[2]
    for block, numbers in zip(BLOCKS, whole.values(), strict=True):
        assert torch.equal(pair.target.ranks[1].memory.data[block], share.of(numbers)), "another rank's was"


async def test_an_error_at_one_page_leaves_no_other_open(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make(ONE, TWO)
    await pair.connect()

    def fail(_: HostMapping, flags: Flags) -> None:
        raise OSError("the page cannot be released")

    own = pair.channel._own
    pages = [mapped.pool.flags for mapped in own._mapped]
    with monkeypatch.context() as patched:
        patched.setattr(HostMapping, "unregister_flags", fail)
        with pytest.raises(OSError, match="released"):
            own.close()
    assert [page.fd for page in pages] == [-1, -1]


async def test_holders_that_cannot_be_mapped_are_told_by_name(make: Make) -> None:
    pair = make(TWO, TWO)
    pids = [1, 2]
    assert pair.receiver.unreachable_holders(TWO, pids) is None
    assert pair.receiver.unreachable_holders(ONE, [1]) is None
    for holders, there in (((), [1]), (TWO, [1]), (dealt((0, 1), (1, 3), here=2), [1])):
        assert "ranks" in (pair.receiver.unreachable_holders(holders, there) or "")
    assert "head" in (pair.receiver.unreachable_holders(dealt((0, 1), (1, 2)), pids) or "")
    alone = make(ONE, ONE)
    assert alone.receiver.unreachable_holders((), [1]) is None
    assert alone.receiver.admit_holders(WRITER, ONE, [1]) == (), "as before: whole blocks"


# -- sources that are processes


SOURCE = """
import sys, time
from kvtransfer.transports.base import Welcome, host_id
from kvtransfer.transports.fd_passing import register_blocking
for line in sys.stdin:
    endpoint, token = line.split()
    try:
        register_blocking(Welcome("127.0.0.1:1", endpoint, bytes.fromhex(token), None, 6), lambda pool: None)
        print("mapped", flush=True)
    except Exception as error:
        print("refused", flush=True)
"""


class Sources:
    """The processes of a writer of two ranks, which register as they are asked to."""

    def __init__(self) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    async def register(self, source: int, holder: KVHolder, token: bytes | None = None) -> str:
        process = self.processes[source]
        assert process.stdin is not None
        assert process.stdout is not None
        shown = holder.tokens[source] if token is None else token
        process.stdin.write(f"{holder.endpoint} {shown.hex()}\n")
        process.stdin.flush()
        return (await asyncio.to_thread(process.stdout.readline)).strip()

    async def kill(self, source: int) -> None:
        self.processes[source].kill()
        await asyncio.to_thread(self.processes[source].wait)


@pytest.fixture
def sources() -> Any:
    made = Sources()
    yield made
    for process in made.processes:
        with process:
            process.kill()


async def test_a_writer_is_registered_with_its_last_pair_and_dead_with_its_last_process(
    make: Make, sources: Sources
) -> None:
    """TWO to THREE has the pairs 0-0, 1-1 and 1-2."""
    pair = make(TWO, THREE)
    await pair.receiver.start()
    holders = pair.admit(sources.pids).holders
    for source, holder in ((0, 0), (1, 1), (1, 2)):
        assert not pair.receiver.registered(WRITER)
        assert await sources.register(source, holders[holder]) == "mapped"
    assert pair.receiver.registered(WRITER)
    await sources.kill(0)
    await until(lambda: not pair.receiver.registered(WRITER))
    assert not pair.dead, "the other may still write to two ranks' memories"
    await sources.kill(1)
    await until(lambda: pair.dead == [WRITER])


async def test_a_fence_kills_every_process_that_maps_some_ranks_memory(make: Make, sources: Sources) -> None:
    pair = make(TWO, THREE)
    await pair.receiver.start()
    holders = pair.admit(sources.pids).holders
    assert await sources.register(1, holders[2]) == "mapped"
    assert await sources.register(0, holders[0]) == "mapped"
    pair.receiver.fence(WRITER)
    await until(lambda: pair.dead == [WRITER])
    assert [process.wait(10) for process in sources.processes] == [-9, -9]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a count of the pages of flags that were opened from now on and are open."""
    opened: list[Flags] = []

    class Counted(Flags):
        def __init__(self, fd: int, slots: int) -> None:
            super().__init__(fd, slots)
            opened.append(self)

    monkeypatch.setattr("kvtransfer.transports.share_offer.Flags", Counted)
    monkeypatch.setattr("kvtransfer.transports.mapped_pool.Flags", Counted)
    return lambda: sum(page.fd >= 0 for page in opened)


async def begin(holder: KVHolder, source: int) -> socket.socket:
    """Register as this process up to the handle, and say nothing more."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + holder.endpoint[1:])
    connection.send(holder.tokens[source])
    message, fds, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 1024, 4)
    assert message.startswith(b"map:")
    for fd in fds:
        os.close(fd)
    return connection


@pytest.mark.parametrize("holder", [0, 1])
async def test_a_registration_that_is_given_up_leaves_no_page(
    make: Make, pages: Callable[[], int], holder: int
) -> None:
    pair = make(TWO, TWO)
    await pair.receiver.start()
    holders = pair.admit().holders
    connection = await begin(holders[holder], holder)
    assert pages() == 1
    connection.close()
    await until(lambda: pages() == 0)


async def register_here(holder: KVHolder, source: int) -> str:
    """Register as this process."""
    welcome = Welcome("127.0.0.1:1", holder.endpoint, holder.tokens[source], LAYOUT, 6)
    try:
        await register(welcome, lambda pool: None)
    except TransportError:
        return "refused"
    return "mapped"


async def test_a_registration_again_keeps_the_page_of_the_first(make: Make, pages: Callable[[], int]) -> None:
    pair = make(TWO, TWO)
    await pair.receiver.start()
    holder = pair.admit().holders[0]
    assert await register_here(holder, 0) == "mapped"
    (source,) = pair.receiver._writers.offer._flags
    page = pair.receiver._writers.offer._flags[source]
    assert await register_here(holder, 0) == "mapped"
    (await begin(holder, 0)).close()
    await until(lambda: not pair.receiver._writers.offer._registering)
    assert pair.receiver._writers.offer._flags == {source: page}
    assert pages() == 1


async def test_an_offer_that_ends_leaves_no_page(make: Make, pages: Callable[[], int]) -> None:
    pair = make(TWO, TWO)
    await pair.connect()
    assert pages() == 4, "one a pair at either end"
    pair.channel.close()
    await pair.receiver.close()
    for rank in (*pair.source.ranks, *pair.target.ranks):
        await asyncio.to_thread(rank.close)
    await until(lambda: pages() == 0)


async def test_an_export_after_the_end_of_its_registration_leaves_no_page(
    make: Make, pages: Callable[[], int]
) -> None:
    pair = make(TWO, TWO)
    offer = pair.receiver._writers.offer
    with pytest.raises(TransportError, match="given up"):
        offer._export(WriterId("0", 1))
    assert pages() == 0


async def test_a_writer_that_mapped_nothing_is_forgotten_with_its_link(make: Make) -> None:
    pair = make(TWO, TWO)
    await pair.receiver.start()
    first = pair.admit().holders
    pair.receiver.link_lost(WRITER)
    assert pair.receiver._writers._writers == {}
    second = pair.admit().holders
    assert await register_here(first[0], 0) == "refused", "it has the token of a link that is lost"
    assert not pair.receiver.registered(WRITER)
    assert [await register_here(second[at], at) for at in range(2)] == ["mapped", "mapped"]
    assert pair.receiver.registered(WRITER)
    pair.receiver.link_lost(WRITER)
    assert pair.receiver.registered(WRITER), "the control: its processes may write"


async def test_only_the_process_of_a_token_maps_a_memory_and_none_after_the_fence(
    make: Make, sources: Sources
) -> None:
    pair = make(TWO, THREE)
    await pair.receiver.start()
    holders = pair.admit(sources.pids).holders
    assert await sources.register(0, holders[1], holders[1].tokens[1]) == "refused", "of the other process"
    assert await sources.register(0, holders[0], bytes(44)) == "refused"
    assert await sources.register(1, holders[1]) == "mapped"
    pair.receiver.fence(WRITER)
    await until(lambda: pair.dead == [WRITER])
    for holder in holders:
        assert await sources.register(0, holder) == "refused"
    with pytest.raises(TransportError):
        await register(pair.admit([1, 2]), lambda pool: None)


def test_a_token_names_its_source_and_its_process() -> None:
    token = source_token(b"secret", 3, 1, 77)
    assert read_source_token(b"secret", token, 77) == WriterId("1", 3)
    assert read_source_token(b"secret", token, 78) is None
    assert read_source_token(b"other", token, 77) is None
    assert read_source_token(b"secret", token[:-1], 77) is None


def test_memory_of_a_share_keeps_its_place_in_blocks() -> None:
    (held,) = TWO[1]
    memory = own_pool(LAYOUT, 3, held).memory
    assert isinstance(memory, KVMemory)
    assert memory.origin == (0, 1)
    assert memory.layout == LAYOUT
    assert memory.data.shape[1:] == (4, 2, 2, 32)
    with pytest.raises(RuntimeError):
        memory.block_bytes(0)
