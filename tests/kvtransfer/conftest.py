"""Both ends of the handoff without engines, with real gRPC and real transports between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.drivers.handshake import Fingerprint
from kvtransfer.drivers.peer import Peer
from kvtransfer.drivers.server import HandoffServer
from kvtransfer.drivers.types import GrantedBlocks, Ready
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.protocol.messages import Key, PendingTransfer
from kvtransfer.protocol.transfer_table import EscalationTimeouts
from kvtransfer.transports.host_blocks import host_view, read_block, write_block
from kvtransfer.transports.pool_memory import PoolMemory, allocate_pool
from tests.kvtransfer.thread_ranks import ThreadWriters, own_pool, spread_over_threads

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, block_size=4, dtype=torch.float32)
FINGERPRINT = Fingerprint(
    model_digest="m",
    dtype="fp32",
    kv_dtype="fp32",
    kv_layout=LAYOUT.name,
    block_size=LAYOUT.block_size,
    num_layers=LAYOUT.num_layers,
    num_kv_heads=LAYOUT.num_kv_heads,
    head_dim=LAYOUT.head_dim,
    hash_version=1,
)
INCARNATION = 7


BY_RANK: dict[str, tuple[Holders, Holders]] = {
    "2 ranks to 3": (
        ((KVShare(range(2), range(2)),), (KVShare(range(2), range(1, 3)),)),
        tuple((KVShare(range(2), range(head, head + 1)),) for head in range(3)),
    ),
    "1 rank to 2 stages": (
        ((KVShare(range(2), range(3)),),),
        ((KVShare(range(1), range(3)),), (KVShare(range(1, 2), range(3)),)),
    ),
    "3 ranks to 1": (
        tuple((KVShare(range(2), range(head, head + 1)),) for head in range(3)),
        ((KVShare(range(2), range(3)),),),
    ),
}
"""Prefill and decode workers whose ranks have memories of their own: each sends to each what both hold.

In the first pair both prefill ranks have the head in the middle.
"""
MAPPED = {f"{name}, mapped": holders for name, holders in BY_RANK.items()}
"""The same, where ranks map the memories that they write; blocks go over tcp in the others."""
IN_PLACE: dict[str, tuple[Holders, Holders]] = {
    name: (held, held)
    for name, held in {
        "2 ranks in place": (
            (KVShare(range(2), range(1)),),
            (KVShare(range(2), range(1, 3)),),
        ),
        "2 stages in place": (
            (KVShare(range(1), range(3)),),
            (KVShare(range(1, 2), range(3)),),
        ),
    }.items()
}
"""Groups of equal shares, whose prefill ranks compute in the memories of the decode ranks."""
EITHER = {f"2 ranks in place or {how}": IN_PLACE["2 ranks in place"] for how in ("copied", "by tcp")}
"""The same, which may copy as well."""
OWN = MAPPED | IN_PLACE | EITHER
"""Groups of which rank 0, too, has memory for its own share alone."""
APART = BY_RANK | MAPPED | IN_PLACE
RANKED = APART | EITHER


def transports_of(name: str) -> list[str]:
    """Return the transports that a pair of this name may use."""
    if name in EITHER:
        return ["cuda_shared", "tcp" if name.endswith("tcp") else "cuda_ipc"]
    if name in IN_PLACE:
        return ["cuda_shared"]
    return ["cuda_ipc" if name in MAPPED else "tcp" if name in BY_RANK else name]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition that another task or process will bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it waits for other processes and for the kernel too
            await asyncio.sleep(0.002)


@dataclass
class DecodeEnd:
    """Decode worker without an engine: the results of its handoffs are kept in lists."""

    pool: BlockPool
    memory: PoolMemory
    running: int = 0
    ready: list[Ready] = field(default_factory=list)
    failed: list[tuple[Key, int, str]] = field(default_factory=list)
    server: HandoffServer = field(init=False)
    grpc: grpc.aio.Server = field(init=False)
    address: str = ""

    async def listen(self, port: int = 0) -> None:
        """Serve on a new gRPC server."""
        self.grpc = make_server(internal=True)
        add_links(self.grpc, [self.server.service])
        self.address = f"127.0.0.1:{bind(self.grpc, '127.0.0.1', port, False)}"
        await self.grpc.start()

    def expect(self, request: str, num_tokens: int, keys: list[bytes] | None = None) -> Key:
        key = (request, 1)
        self.server.expect(PendingTransfer(key, num_tokens, keys or []))
        return key

    def settled(self) -> bool:
        """Return True if nothing is held, granted or quarantined."""
        self.pool.invariants()
        stats = self.server.stats()
        busy = stats.grants or stats.waiting_asks or stats.quarantined_blocks
        return not busy and self.pool.available() == self.pool.total


@dataclass
class PrefillEnd:
    """Prefill worker without an engine."""

    client: HandoffClient
    aborted: list[Key]
    lost: list[tuple[str, list[Key]]]
    scratch: BlockPool


@dataclass
class Pair:
    """Both ends, in one process."""

    decode: DecodeEnd
    prefill: PrefillEnd

    async def peer(self) -> Peer:
        return await self.prefill.client.peer(self.decode.address, INCARNATION)

    async def grant(self, request: str, num_tokens: int, keys: list[bytes] | None = None) -> GrantedBlocks:
        peer = await self.peer()
        key = self.decode.expect(request, num_tokens, keys)
        return await peer.ask(key, num_tokens, keys or [])


def sampled(token_id: int) -> tuple[work_pb2.SampledToken]:
    """Return the sampled tokens of a commit."""
    return (work_pb2.SampledToken(token_id=token_id),)


def fill(granted: GrantedBlocks, num_tokens: int, seed: int) -> None:
    """Write recognisable numbers, as the model would, into the blocks that are not computed yet."""
    first = granted.computed_tokens // LAYOUT.block_size
    for place in range(first, LAYOUT.blocks_for(num_tokens)):
        write_whole(granted.memory, granted.block_table[place], pattern(seed, place))
    read_whole(granted.memory, granted.block_table[0])  # behind the writes of all ranks: a step is over


def write_whole(memory: KVMemory, block: int, numbers: torch.Tensor) -> None:
    """Write a block, whichever ranks hold shares of it."""
    write_block(memory, block, host_view(numbers.flatten().view(torch.uint8)))


def read_whole(memory: KVMemory, block: int) -> torch.Tensor:
    """Return a block, whichever ranks hold shares of it."""
    return torch.frombuffer(read_block(memory, block), dtype=LAYOUT.dtype).view(LAYOUT.block_shape)


def pattern(seed: int, place: int) -> torch.Tensor:
    """Return the numbers that `fill` writes into block `place` of a sequence."""
    return torch.full(LAYOUT.block_shape, float(seed * 1000 + place))


@pytest.fixture(params=["shared_memory", "tcp", "gloo", "cuda_ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def make_pair() -> AsyncIterator[Callable[..., Any]]:
    """Build pairs: `await make_pair(transport, blocks=16, ...)`."""
    async with pairs() as make:
        yield make


@asynccontextmanager
async def pairs() -> AsyncIterator[Callable[..., Any]]:
    """Yield the value of the fixture, for tests that bring their own event loop."""
    closing: list[Callable[[], Any]] = []
    ranks = ExitStack()

    async def decode_end(
        transport: str,
        blocks: int = 16,
        lease_times: LeaseTimes | None = None,
        timeouts: EscalationTimeouts | None = None,
        **fingerprint: object,
    ) -> DecodeEnd:
        held = RANKED[transport][1] if transport in RANKED else ()
        (own,) = held[0] if transport in OWN else (None,)
        pool = allocate_pool(LAYOUT, blocks) if own is None else own_pool(LAYOUT, blocks, own)
        end = DecodeEnd(BlockPool(blocks), pool)
        if len(held) > 1:
            ranks.enter_context(spread_over_threads(end.memory.memory, held))
        end.server = HandoffServer(
            worker_id="decode",
            incarnation=INCARNATION,
            fingerprint=replace(FINGERPRINT, **fingerprint),
            memory=end.memory,
            pool=end.pool,
            transports=transports_of(transport),
            running=lambda: end.running,
            on_ready=end.ready.append,
            on_failed=lambda *failure: end.failed.append(failure),
            lease_times=lease_times,
            timeouts=timeouts,
        )
        await end.server.start()
        await end.listen()

        async def close() -> None:
            await end.server.close()
            await end.grpc.stop(None)

        closing.append(close)
        return end

    def prefill_end(transport: str, scratch_blocks: int, stall_s: float) -> PrefillEnd:
        aborted: list[Key] = []
        lost: list[tuple[str, list[Key]]] = []
        scratch = BlockPool(scratch_blocks)
        holders = RANKED[transport][0] if transport in RANKED else None
        writers = None if holders is None else ThreadWriters(holders)
        if writers is not None:
            ranks.callback(writers.close)

        def make_scratch() -> tuple[KVMemory, BlockPool]:
            memory = KVMemory(LAYOUT, scratch_blocks)
            if holders is not None and transport in OWN:
                memory = own_pool(LAYOUT, scratch_blocks, holders[0][0]).memory
            if holders is not None and len(holders) > 1:
                ranks.enter_context(spread_over_threads(memory, holders))
            return memory, scratch

        client = HandoffClient(
            worker_id="prefill",
            incarnation=11,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            transports=transports_of(transport),
            scratch=make_scratch,
            ranks=writers,
            on_abort=aborted.append,
            on_peer_lost=lambda address, keys: lost.append((address, keys)),
            stall_s=stall_s,
        )
        closing.append(client.close)
        return PrefillEnd(client, aborted, lost, scratch)

    async def make(
        transport: str, blocks: int = 16, scratch_blocks: int = 16, stall_s: float = 10.0, **options: object
    ) -> Pair:
        decode = await decode_end(transport, blocks, **options)
        return Pair(decode, prefill_end(transport, scratch_blocks, stall_s))

    try:
        yield make
    finally:
        for close in reversed(closing):
            await close()
        ranks.close()


@pytest.fixture
def times() -> work_pb2.PhaseTimes:
    return work_pb2.PhaseTimes(prefill_steps=3)
