"""Client of the prefill worker: one Peer a decode process, linked when it is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.runtime.internal_tls import InternalTls
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.client_link import INCOMPATIBLE
from kvtransfer.drivers.codec import Request, Response
from kvtransfer.drivers.handshake import Fingerprint
from kvtransfer.drivers.holder_codec import read_holder
from kvtransfer.drivers.links import PeerLink
from kvtransfer.drivers.peer import Copying, Peer
from kvtransfer.drivers.puller import Puller
from kvtransfer.drivers.reach import Reach
from kvtransfer.drivers.scratch import Scratch, Tiers
from kvtransfer.drivers.types import Heartbeat
from kvtransfer.protocol.errors import HandoffDenied, PeerReplaced
from kvtransfer.protocol.lease import STALL_S, Lease, LeaseTimes, TransferProgress, Verdict
from kvtransfer.protocol.messages import Key, WriterId
from kvtransfer.protocol.pull_rates import PullMode, PullRates
from kvtransfer.transports import in_process, registry
from kvtransfer.transports.base import CPU, PushChannel, TransportError, Welcome, WriterRanks, gpu_uuid

_log = logging.getLogger(__name__)
_PEER_LOST = work_pb2.FailureReason.FAILURE_REASON_PEER_LOST
_RELINK_PAUSE_S = 0.2
_UNMAP_AFTER_S = 1.0
_RELINK_FOR_S = 120.0


class RanksUnreachable(HandoffDenied):
    """Ranks of a decode worker that ranks of this one do not reach by a transport."""

    def __init__(self, transport: str, why: str) -> None:
        super().__init__(_PEER_LOST, why)
        self.transport = transport


@dataclass(frozen=True)
class _Denial:
    incarnation: int
    reason: int
    message: str


class HandoffClient:
    """Links of one prefill worker to decode processes. Callbacks run on the event loop.

    Args:
        scratch: makes the own blocks when the first copying peer needs them; without it only peers that share
            memory are accepted.
        tiers: makes the tiers below these blocks, when they are made.
        on_abort: `on_abort(key)` asks to stop computing this attempt, then to call `peer.stop`.
        on_peer_lost: `on_peer_lost(address, keys)` asks the same for all `keys`; the process may be gone.
        heartbeat: state of this worker's engine.
        cache_changed: `cache_changed(added, removed)` gets the keys that came into and left the prefix cache
            of the own blocks.
        on_pull_end: see `Puller`.
        pull_mode: rule by which cached prefixes are pulled.
        stall_s: seconds without an acknowledgement of sent blocks that end a link.
        device: device on which this worker computes.
        ranks: the other processes of this worker that compute, where it is a group.
        tls: certificates for links and data sockets; None: they are plain.
        chunk_tokens: most tokens of a prompt that this worker computes at once.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: int,
        fingerprint: Fingerprint,
        layout: KVLayout,
        transports: Sequence[str],
        scratch: Callable[[], tuple[KVMemory, BlockPool]] | None,
        tiers: Callable[[Scratch, BlockPool], Tiers | None] = lambda scratch, pool: None,
        on_abort: Callable[[Key], None],
        on_peer_lost: Callable[[str, list[Key]], None],
        heartbeat: Callable[[], Heartbeat] = Heartbeat,
        cache_changed: Callable[[list[bytes], list[bytes]], None] = lambda added, removed: None,
        on_pull_end: Callable[[str, int, float], None] = lambda outcome, blocks, seconds: None,
        pull_mode: PullMode = "auto",
        lease_times: LeaseTimes | None = None,
        stall_s: float = STALL_S,
        device: torch.device = CPU,
        ranks: WriterRanks | None = None,
        tls: InternalTls | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        self._tls = tls
        self._chunk_tokens = chunk_tokens
        self._device, self._ranks = device, ranks
        self._stall_s = stall_s
        self._writer_id = WriterId(worker_id, incarnation)
        self._fingerprint = fingerprint
        self._layout = layout
        usable = [t for t in transports if scratch is not None or t in registry.IN_PLACE]
        self._reach = Reach(usable, layout, device, ranks)
        self._make_scratch, self._make_tiers = scratch, tiers
        self._scratch: Scratch | None = None
        self._on_abort, self._on_peer_lost, self._heartbeat = on_abort, on_peer_lost, heartbeat
        self._cache_changed, self._on_pull_end = cache_changed, on_pull_end
        self.pull_rates = PullRates(pull_mode)
        """Rates by which pulls are made; the owner records what it computes."""
        self._lease_times = lease_times if lease_times is not None else LeaseTimes()
        self._peers: dict[str, Peer] = {}
        self._links: dict[Peer, tuple[PeerLink, Lease]] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._last_denials: dict[str, _Denial] = {}
        """Last failed try to link to each address: all calls that waited for it fail with it."""
        self._opening: set[PeerLink] = set()
        """Links whose transport is being opened: they get heartbeats and have no lease yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._tick_task: asyncio.Task[None] | None = None
        self._closed = False

    async def peer(self, address: str, expected_incarnation: int) -> Peer:
        """Return the linked Peer of the decode process at `address`.

        Raises HandoffDenied, also (PeerReplaced) if another process has the address.
        """
        peer = self._peers.get(address)
        if peer is not None and peer.linked and peer.incarnation == expected_incarnation:
            return peer
        tried = self._last_denials.get(address)
        async with self._connecting.setdefault(address, asyncio.Lock()):
            peer = self._peers.get(address)
            if peer is not None and peer.linked:
                if peer.incarnation == expected_incarnation:
                    return peer
                # A late request for the process that was here before. A second hello from here would end the
                # good link, and with it all that is on its way there.
                raise PeerReplaced
            last = self._last_denials.get(address)
            if last is not None and last is not tried and last.incarnation == expected_incarnation:
                # It failed during the wait for the lock, and each try may take seconds.
                raise HandoffDenied(last.reason, last.message)
            try:
                return await self._link(address, expected_incarnation)
            except PeerReplaced:
                raise
            except HandoffDenied as denied:
                failure = denied.failure
                self._last_denials[address] = _Denial(expected_incarnation, failure.reason, failure.message)
                raise

    async def close(self) -> None:
        """End all links. Commit or stop every grant first: a writer that just leaves is killed."""
        self._closed = True
        tasks = [*self._tasks] if self._tick_task is None else [*self._tasks, self._tick_task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in list(self._peers.values()):
            await peer.close()
        self._peers.clear()

    async def _link(self, address: str, expected_incarnation: int) -> Peer:
        """Return the linked Peer, by the first way on which ranks reach one another."""
        while True:
            try:
                return await self._link_once(address, expected_incarnation)
            except RanksUnreachable as error:
                instead = self._reach.fall_back((address, expected_incarnation), error.transport)
                if instead is None:
                    raise
                why = error.failure.message
                _log.warning("blocks for the decode worker at %s go %s: %s", address, instead, why)

    async def _link_once(self, address: str, expected_incarnation: int) -> Peer:
        if self._closed:
            raise HandoffDenied(_PEER_LOST, "this worker is closing")
        process = (address, expected_incarnation)
        link = await PeerLink.connect(
            address,
            self._writer_id,
            self._fingerprint,
            self._reach.transports_to(process),
            gpu_uuid(self._device),
            () if self._ranks is None else self._ranks.pids,
            self._tls,
            self._chunk_tokens,
            self._reach.holders_for(process),
            self._reach.holder_devices,
        )
        # Its lease of this process runs from the welcome on; to open a channel may take seconds of compiling.
        self._opening.add(link)
        try:
            if self._closed:
                raise HandoffDenied(_PEER_LOST, "this worker is closing")
            if self._tick_task is None:
                self._tick_task = asyncio.create_task(self._tick())
            if link.welcome.incarnation != expected_incarnation:
                raise PeerReplaced
            peer = await self._peer_for(address, expected_incarnation)
            await self._attach(peer, link)
        except BaseException:
            await link.wait_closed()
            raise
        finally:
            self._opening.discard(link)
        return peer

    async def _peer_for(self, address: str, incarnation: int) -> Peer:
        """Return the Peer of this process; close that of an earlier process at the same address."""
        peer = self._peers.get(address)
        if peer is not None and peer.incarnation != incarnation:
            del self._peers[address]
            await peer.close()
            peer = None
        if peer is None:
            peer = Peer(address, incarnation, on_abort=self._on_abort, on_lost=self._on_link_lost)
            self._peers[address] = peer
        return peer

    async def _attach(self, peer: Peer, link: PeerLink) -> None:
        hello = link.welcome
        whole = link.shares_drafter
        try:
            layout = self._layout if whole else self._layout.in_blocks_of(hello.block_bytes)
        except ValueError as error:
            raise HandoffDenied(INCOMPATIBLE, str(error)) from error
        welcome = Welcome(
            peer.address,
            hello.endpoint,
            hello.token,
            layout,
            hello.num_blocks,
            hello.pull_endpoint,
            hello.pull_token,
            self._tls,
            holders=tuple(map(read_holder, hello.holders)),
        )
        try:
            if hello.transport in registry.IN_PLACE:
                # The same process has the same pool: one mapping serves all its links.
                mapped = peer.memory
                if mapped is None or in_process.is_fenced(mapped):
                    mapped = await self._map_pool(welcome, hello.rank_tokens)
                memory = mapped
                copying = None
            else:
                await peer.wait_quiesced()
                memory, scratch = None, self._own_scratch()
                sent = scratch.memory if whole else scratch.memory.without_draft()
                channel = await registry.open_channel(hello.transport, welcome, sent)
                copying = Copying(scratch, sent, channel, self._puller(welcome, channel, sent))
        except TransportError as error:
            # Decode workers of earlier versions take ranks for one memory, and answer without holders.
            if welcome.holders or self._reach.apart:
                raise RanksUnreachable(hello.transport, str(error)) from error
            raise HandoffDenied(_PEER_LOST, str(error)) from error
        now = time.monotonic()
        lease = Lease(now, self._lease_times)
        progress = TransferProgress(now, self._lease_times.interval_s, self._stall_s)
        self._links[peer] = (link, lease)
        peer.link_up(
            link,
            memory,
            copying,
            on_message=lambda response: _record_message(lease, response),
            progress=progress,
        )
        if not whole:
            _log.warning("decode worker %s has another drafter: it drafts without one", hello.worker_id)
        by_rank = f" between {len(hello.holders)} ranks there and those here" if hello.holders else ""
        _log.info("linked to decode worker %s, transport %s%s", hello.worker_id, hello.transport, by_rank)

    async def _map_pool(self, welcome: Welcome, rank_tokens: Sequence[bytes]) -> KVMemory:
        """Map the decode worker's pool in all processes that compute. Raises TransportError."""
        memory = await registry.map_pool(welcome, self._device)
        if self._ranks is not None:
            await self._ranks.map_pool(memory, welcome, rank_tokens)
        return memory

    def flush_prefix_cache(self) -> int:
        """Remove the cached prefixes of scratch, not held blocks; return the number of keys that went."""
        return 0 if self._scratch is None else self._scratch.flush()

    def cached_keys(self) -> Collection[bytes]:
        """Return the keys of the prefix cache of the own blocks."""
        return [] if self._scratch is None else self._scratch.cached_keys()

    def _puller(self, welcome: Welcome, channel: PushChannel, memory: KVMemory) -> Puller | None:
        if not welcome.pull_endpoint or self._layout.windows is not None:
            return None  # what a decode worker has of a prefix is of use with its windowed blocks only
        return Puller(
            lambda table: registry.open_pulls(welcome, channel, memory, table),
            self.pull_rates,
            self._layout.block_size,
            self._on_pull_end,
        )

    def _own_scratch(self) -> Scratch:
        if self._scratch is None:
            if self._make_scratch is None:
                raise TransportError("this worker has no blocks of its own to copy from")
            try:
                memory, pool = self._make_scratch()
            except (MemoryError, RuntimeError) as error:  # of torch: another program took the memory
                raise TransportError(f"no memory for the blocks that copies start from: {error}") from error
            self._scratch = Scratch(memory, pool, self._cache_changed, self._chunk_tokens)
            self._scratch.tiers = self._make_tiers(self._scratch, pool)
        return self._scratch

    # -- life and death of links

    def _on_link_lost(self, peer: Peer, keys: list[Key]) -> None:
        self._links.pop(peer, None)
        if self._closed:
            return
        _log.warning("the link to the decode worker at %s broke", peer.address)
        if self._peers.get(peer.address) is peer:
            task = asyncio.create_task(self._relink(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._on_peer_lost(peer.address, keys)

    async def _relink(self, peer: Peer) -> None:
        """Link again if the process lives, to send Stopped for orphaned grants; soon unmap its memory.

        A decode worker that gets no message about blocks that this process might write kills it: one that was
        only stopped, or cut off for a while, has to get a new link from this process when it goes on.
        """
        lost_at = time.monotonic()
        while (gone_for := time.monotonic() - lost_at) < _RELINK_FOR_S:
            if self._peers.get(peer.address) is not peer:
                return  # another process has its address
            try:
                await self.peer(peer.address, peer.incarnation)
                return
            except PeerReplaced:
                break
            except HandoffDenied:
                pass  # not yet, or never again
            if gone_for > _UNMAP_AFTER_S and not peer.linked:
                peer.unmap()
            await asyncio.sleep(_RELINK_PAUSE_S)
        if self._peers.get(peer.address) is peer and not peer.linked:
            del self._peers[peer.address]
            await peer.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._lease_times.interval_s)
            try:
                self._tick_once(time.monotonic())
            except Exception:  # one bad tick must not end the heartbeats
                _log.exception("a tick of the handoff failed")

    def _tick_once(self, now: float) -> None:
        message = Request(heartbeat=self._heartbeat().to_proto())
        for opening in self._opening:
            opening.put(message)
        for peer, (link, lease) in list(self._links.items()):
            if lease.tick(now) is Verdict.EXPIRED:
                _log.warning("decode worker %s does not answer", link.welcome.worker_id)
                link.close()
            elif peer.stalled(now):
                _log.warning("decode worker %s does not acknowledge blocks", link.welcome.worker_id)
                link.close()
            else:
                link.put(message)


def _record_message(lease: Lease, response: Response) -> None:
    now = time.monotonic()
    if response.WhichOneof("message") == "heartbeat":
        beat = response.heartbeat
        lease.on_heartbeat(now, beat.progress, beat.busy, Heartbeat.late_s_of(beat))
    else:
        lease.on_message(now)
