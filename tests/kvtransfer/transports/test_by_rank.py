"""Blocks between ranks: cut by index, and placed only where their grant is open and their bytes are whole."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.group import share_arrivals
from diptych.worker_process.group.share_arrivals import ShareArrivals
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import tcp, tcp_by_rank
from kvtransfer.transports.base import KVHolder, ReceiverHooks, Run, TransportError, Welcome
from kvtransfer.transports.host_blocks import read_block, write_block
from kvtransfer.transports.rank_data import HEADER, ArrivedShare, RankEvent, SessionBroke, session_token
from kvtransfer.transports.tcp_by_rank import ByRankChannel
from kvtransfer.transports.tcp_receiver_by_rank import ByRankReceiver
from tests.kvtransfer.conftest import until
from tests.kvtransfer.thread_ranks import ThreadRank, spread_over_threads

LAYOUT = KVLayout(num_layers=4, num_kv_heads=3, head_dim=8, block_size=4, dtype=torch.bfloat16)
LATENT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=24, block_size=4, dtype=torch.float32, latent=True)
WRITER, REF = WriterId("w", 1), GrantRef(("r", 1), 3, 17)
BLOCKS = (5, 0, 3)
"""Of the decode pool, by index of the grant."""


def dealt(*ranks: tuple[int, int], stages: int = 1, here: int = 1) -> Holders:
    """Return the holders of a group whose ranks have these KV heads, in each of its stages."""
    layers = [range(at * 4 // stages, (at + 1) * 4 // stages) for at in range(stages)]
    shares = [KVShare(own, range(*heads)) for own in layers for heads in ranks]
    return (tuple(shares[:here]), *((share,) for share in shares[here:]))


ONE = dealt((0, 3))
TWO = dealt((0, 1), (1, 3))
THREE = dealt((0, 1), (1, 2), (2, 3))
FOUR = dealt((0, 1), (0, 2), (1, 3), (2, 3))
"""More ranks than KV heads: two have the same ones."""
STAGES = dealt((0, 1), (1, 3), stages=2)
STAGES_HERE = dealt((0, 1), (1, 3), stages=2, here=3)


class Group:
    """Memory of rank 0 and of ranks that are threads."""

    def __init__(self, memory: KVMemory, holders: Holders, ranks: Sequence[ThreadRank]) -> None:
        self.memory, self.holders, self.ranks = memory, holders, ranks

    def shares(self, block: int) -> Iterator[tuple[KVShare, torch.Tensor]]:
        """Yield each share of a block with what its holder has of it."""
        alone = self.memory.data[0].shape != self.memory.layout.block_shape
        for share in self.holders[0]:
            yield share, self.memory.data[block] if alone else share.of(self.memory.data[block])
        for (share,), rank in zip(self.holders[1:], self.ranks, strict=True):
            yield share, rank.memory.data[block]


@contextlib.contextmanager
def group(holders: Holders, layout: KVLayout, *, own: bool = False) -> Iterator[Group]:
    """Make a group; with `own`, rank 0's memory has room for its share alone."""
    memory = KVMemory(layout, 6)
    if own and len(holders) > 1:
        (held,) = holders[0]
        memory = KVMemory(held.narrow(layout), 6).as_share_of(layout, held.layers.start, held.heads.start)
    if len(holders) == 1:
        yield Group(memory, holders, ())
        return
    with spread_over_threads(memory, holders) as ranks:
        yield Group(memory, holders, ranks)


class Pair:
    """Both ends, with one open grant of three blocks."""

    def __init__(self, source: Group, target: Group) -> None:
        self.source, self.target = source, target
        self.open = True
        self.arrived: dict[int, bytes] = {}
        self.corrupt = self.dead = self.resolved = 0
        hooks = ReceiverHooks(
            dead=lambda writer: self._count("dead"),
            resolve=self._resolve,
            destinations=lambda writer, ref, places: (
                BLOCKS[places.start : places.stop] if places.stop <= len(BLOCKS) else None
            ),
            arrived=lambda writer, ref, first, digests: self.arrived.update({first: digests[0]}),
            corrupt=lambda writer, ref: self._count("corrupt"),
        )
        whole = tcp.tcp_receiver("127.0.0.1", target.memory, hooks)
        self.receiver = ByRankReceiver(whole, "127.0.0.1", target.memory, hooks)
        self.channel: ByRankChannel

    def _count(self, what: str) -> None:
        setattr(self, what, getattr(self, what) + 1)

    def _resolve(self, writer: WriterId, slot: int, generation: int) -> GrantRef | None:
        self.resolved += 1
        return REF if self.open and writer == WRITER and (slot, generation) == REF[1:] else None

    async def connect(self, claimed: Holders | None = None) -> None:
        await self.receiver.start()
        found = self.receiver.admit_holders(WRITER, claimed or self.source.holders)
        layout = self.source.memory.layout
        welcome = Welcome("127.0.0.1:1", "", b"", layout, 6, holders=tuple(found))
        self.channel = await ByRankChannel.open(welcome, self.source.memory)

    async def send(self, blocks: Sequence[int] = (1, 2, 4), first: int = 0) -> list[bytes] | None:
        return await self.channel.send(Run(REF, first, self.source.memory, blocks), lambda ref: True)


Connect = Callable[..., Any]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect two groups: `await connect(source, target, layout)`."""
    with contextlib.ExitStack() as groups:
        made: list[Pair] = []

        async def connect(
            source: Holders, target: Holders, layout: KVLayout = LAYOUT, *, own: bool = False
        ) -> Pair:
            made_groups = [group(holders, layout, own=own) for holders in (source, target)]
            pair = Pair(*map(groups.enter_context, made_groups))
            made.append(pair)
            await pair.connect()
            return pair

        yield connect
        for pair in made:
            pair.channel.close()
            await pair.receiver.close()


def filled(source: Group, seed: int = 0) -> dict[int, torch.Tensor]:
    """Give blocks 1, 2 and 4 of a group random numbers; return the whole blocks."""
    layout, generator = source.memory.layout, torch.Generator().manual_seed(seed)
    whole = {}
    for block in (1, 2, 4):
        whole[block] = torch.randn(layout.block_shape, generator=generator).to(layout.dtype)
        for share, held in source.shares(block):
            held.copy_(share.of(whole[block]))
    return whole


def bits(numbers: torch.Tensor) -> bytes:
    return numbers.contiguous().view(torch.uint8).numpy().tobytes()


def cut(pair: Pair, blocks: Sequence[torch.Tensor], shift: int = 0) -> bool:
    """Return whether every holder has its heads of the blocks, `shift` heads further."""
    same = []
    for block, whole in zip(BLOCKS, blocks, strict=True):
        for share, held in pair.target.shares(block):
            same.append(bits(held) == bits(share.of(whole.roll(shift, dims=-2))))
    return all(same)


async def all_arrived(pair: Pair) -> None:
    await until(lambda: pair.channel.acknowledged == pair.channel.sent)
    for rank in pair.target.ranks:  # what was ordered of them is done
        await until(lambda rank=rank: rank.own._carried_out == rank.rank._writes)


@pytest.mark.parametrize(
    ("source", "target", "layout"),
    [
        (ONE, TWO, LAYOUT),
        (TWO, ONE, LAYOUT),
        (TWO, FOUR, LAYOUT),
        (FOUR, TWO, LAYOUT),
        (THREE, ONE, LAYOUT),
        (TWO, THREE, LAYOUT),
        (STAGES, TWO, LAYOUT),
        (ONE, STAGES_HERE, LAYOUT),
        (dealt((0, 1), (0, 1)), dealt((0, 1), (0, 1), stages=2), LATENT),
    ],
    ids=["1-2", "2-1", "2-4", "4-2", "3-1", "2-3", "2x2-2", "1-2x2", "latent"],
)
async def test_the_pool_has_the_prefills_keys_and_values_cut_by_index(
    connect: Connect, source: Holders, target: Holders, layout: KVLayout
) -> None:
    pair = await connect(source, target, layout)
    whole = filled(pair.source)
    digests = await pair.send()
    await until(lambda: len(pair.arrived) == 3)
    await all_arrived(pair)
    assert [pair.arrived[index] for index in range(3)] == digests
    assert cut(pair, list(whole.values()))
    if layout.num_kv_heads > 1:
        assert not cut(pair, list(whole.values()), shift=1), "the control: heads off by one"
    assert pair.corrupt == pair.dead == 0


@pytest.mark.parametrize(
    ("source", "target"),
    [(ONE, TWO), (TWO, ONE), (TWO, FOUR), (FOUR, TWO), (THREE, ONE), (STAGES, TWO), (TWO, STAGES)],
    ids=["1-2", "2-1", "2-4", "4-2", "3-1", "2x2-2", "2-2x2"],
)
async def test_a_rank_0_with_its_share_alone_has_the_same_bytes(
    connect: Connect, source: Holders, target: Holders
) -> None:
    """Whole blocks, too, are gathered, copied and scattered by index, as on GPUs."""
    pair = await connect(source, target, own=True)
    whole = filled(pair.source)
    digests = await pair.send()
    await until(lambda: len(pair.arrived) == 3)
    await all_arrived(pair)
    assert [pair.arrived[index] for index in range(3)] == digests
    assert cut(pair, list(whole.values()))
    assert not cut(pair, list(whole.values()), shift=1), "the control: heads off by one"
    for side, blocks in ((pair.source, (1, 2, 4)), (pair.target, BLOCKS)):
        side.memory.copy_block(blocks[0], blocks[1])
        found = bytes(await asyncio.to_thread(read_block, side.memory, blocks[1]))
        assert found == bits(whole[1])
        write_block(side.memory, blocks[1], memoryview(bytearray(bits(whole[2]))))
        found = bytes(await asyncio.to_thread(read_block, side.memory, blocks[1]))
        assert found == bits(whole[2])


async def test_what_a_rank_claims_wrongly_is_no_block(connect: Connect) -> None:
    """The control of the cut: two ranks that send each other's heads."""
    pair = await connect(TWO, ONE)
    whole = filled(pair.source)
    (first,), (second,) = TWO
    pair.channel._routes = {(0, 0): (second,), (1, 0): (first,)}
    pair.channel._own = [tcp_by_rank._OwnRoute(0, (second,), pair.channel._control)]
    with contextlib.suppress(TransportError):
        await pair.send([1])
    await until(lambda: pair.dead == 1)
    assert not pair.arrived
    assert not cut(pair, list(whole.values()))


@pytest.mark.parametrize(("source", "target"), [(TWO, ONE), (ONE, TWO), (TWO, THREE)])
async def test_a_damaged_share_is_reported_and_not_placed(
    connect: Connect, source: Holders, target: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of one share flips on its way: the block never arrives."""
    pair = await connect(source, target)
    filled(pair.source)
    rng, where = random.Random(1), []

    def damage(payload: memoryview) -> memoryview:
        where.append(len(where))
        if len(where) > 1:
            return payload
        damaged = bytearray(payload)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return memoryview(damaged)

    for module in ("kvtransfer.transports.tcp_by_rank", "diptych.worker_process.group.share_pushes"):
        monkeypatch.setattr(f"{module}.damage_payload", damage)
    await pair.send([1])
    await all_arrived(pair)
    assert pair.corrupt == 1
    assert not pair.arrived


async def test_shares_of_a_grant_that_ended_are_dropped(connect: Connect) -> None:
    """Also while a rank elsewhere keeps them, which it then does no more."""
    pair = await connect(TWO, THREE)
    filled(pair.source)
    pair.open = False
    await pair.send()
    await all_arrived(pair)
    assert pair.resolved == pair.channel.sent == 9
    assert not pair.arrived
    for block in BLOCKS:
        assert not any(held.any() for _, held in pair.target.shares(block))
    for rank in pair.target.ranks:
        await until(lambda rank=rank: not rank.own.arrivals._staged)


async def test_a_fenced_writer_places_nothing_from_that_moment_on(connect: Connect) -> None:
    """What ranks elsewhere have received by then is dropped."""
    pair = await connect(TWO, THREE)
    filled(pair.source)
    sending = asyncio.create_task(pair.send([1, 2, 4]))
    await asyncio.sleep(0)
    pair.receiver.fence(WRITER)
    assert pair.dead == 1
    resolved = pair.resolved
    with contextlib.suppress(TransportError):
        await sending
    await until(lambda: pair.channel.broken)
    await asyncio.sleep(0.05)
    assert pair.resolved == resolved, "no share was looked at"
    assert not pair.receiver.registered(WRITER)
    with pytest.raises(TransportError):
        await pair.send()


@pytest.mark.parametrize("where", ["sender", "receiver"])
async def test_a_lost_rank_is_the_end_of_the_writer(connect: Connect, where: str) -> None:
    """One of several connections ends: its writer is dead, and both ends see it."""
    pair = await connect(TWO, THREE)
    filled(pair.source)
    if where == "sender":
        (channel,) = pair.source.ranks[0].service._channels.values()
        channel._targets[0][1].shutdown(socket.SHUT_RDWR)
    else:
        pair.target.ranks[1].own.arrivals.end_session(1)
    with contextlib.suppress(TransportError):
        await pair.send()
    await until(lambda: pair.dead == 1 and pair.channel.broken)


async def test_a_rank_that_takes_nothing_keeps_no_sender_for_ever(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is bounded; a sender that waits leaves its blocks when the channel is closed."""
    monkeypatch.setattr(share_arrivals, "KEPT_BYTES", 5000)
    held = dealt((0, 1), (1, 3))
    pair = await connect(held, held)
    filled(pair.source)
    arrivals = pair.target.ranks[0].own.arrivals
    told: list[RankEvent] = []
    arrivals._tell = told.append  # rank 0 hears nothing, and so answers nothing
    sending = asyncio.create_task(pair.send([1, 2, 4] * 20_000))
    await until(lambda: len(told) == 4)
    await asyncio.sleep(0.3)
    assert len(told) == 4, "of 1,024 bytes each"
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_only_tokens_of_the_secret_are_let_in() -> None:
    told: list[RankEvent] = []
    arrivals = ShareArrivals("127.0.0.1", b"secret", 64, told.append)
    host, _, port = arrivals.endpoint.rpartition(":")

    def show(token: bytes, more: bytes = b"") -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(token)
            if not token:
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1)
            if answer:
                connection.sendall(more)
            return answer

    assert await asyncio.to_thread(show, session_token(b"another", 1, 0)) == b""
    assert await asyncio.to_thread(show, b"") == b""
    assert not told
    share = HEADER.pack(3, 17, 0, 4, bytes(16)) + b"data"
    assert await asyncio.to_thread(show, session_token(b"secret", 1, 0), share) == b"+"
    too_long = HEADER.pack(3, 17, 0, 65, bytes(16))
    assert await asyncio.to_thread(show, session_token(b"secret", 2, 0), too_long) == b"+"
    await until(lambda: len(told) == 3)
    kept = next(event for event in told if isinstance(event, ArrivedShare))
    assert arrivals.take(kept.staged) == b"data"
    assert sorted(event.session for event in told if isinstance(event, SessionBroke)) == [1, 2]


async def test_a_sender_that_registers_late_is_turned_away_and_none_is_kept_that_ended() -> None:
    arrivals = ShareArrivals("127.0.0.1", b"secret", 64, lambda event: None)
    host, _, port = arrivals.endpoint.rpartition(":")

    def show(session: int) -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(session_token(b"secret", session, 0))
            return connection.recv(1)

    assert await asyncio.to_thread(show, 1) == b"+"
    await until(lambda: not arrivals._sessions)
    arrivals.end_session(2)
    assert await asyncio.to_thread(show, 2) == b""
    assert not arrivals._sessions


async def test_a_connection_that_is_not_accepted_ends_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has too many open files for a moment."""
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files")] * 2)

    def refuse(listener: socket.socket) -> tuple[socket.socket, Any]:
        if (failure := next(failures, None)) is not None:
            raise failure
        return accept(listener)

    monkeypatch.setattr(share_arrivals, "ACCEPT_AGAIN_S", 0.001)
    monkeypatch.setattr(socket.socket, "accept", refuse)
    arrivals = ShareArrivals("127.0.0.1", b"secret", 64, lambda event: None)
    host, _, port = arrivals.endpoint.rpartition(":")

    def show() -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(session_token(b"secret", 1, 0))
            return connection.recv(1)

    assert await asyncio.to_thread(show) == b"+"


async def test_whole_blocks_are_taken_where_both_workers_have_one_memory(connect: Connect) -> None:
    with group(ONE, LAYOUT) as alone:
        pair = Pair(alone, alone)
        await pair.receiver.start()
        assert not pair.receiver.admit_holders(WRITER, ONE)
        other: Sequence[KVHolder] = pair.receiver.admit_holders(WRITER, dealt((0, 1), (1, 2)))
        assert not other, "heads are missing"
        await pair.receiver.close()
