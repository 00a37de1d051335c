"""A rank with memories of its own, on this host or another, as rank 0 has it: its connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from diptych.worker_process.group.orders import (
    AwaitWrites,
    BlockOrder,
    CopyBlock,
    CopyShares,
    ListenForShares,
    OpenPushes,
    PlaceShare,
    Planned,
    PushShare,
    ReadShare,
    WriteShare,
)
from diptych.worker_process.group.queued_sender import QueuedSender
from diptych.worker_process.group.rendezvous import Joined
from diptych.worker_process.group.share_link import ShareLink
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.held_blocks import Pieces
from kvtransfer.transports.rank_data import PushTarget, share_hash
from kvtransfer.transports.share_mapping import CopyRun

_DIGEST_BYTES = 16


class DamagedShare(RuntimeError):
    """Bytes of a block that changed on their way."""


class RemoteRank:
    """Connections to one rank. Any thread may call; an error ends the process, as the group is over then.

    What the rank does next is sent by a thread, so that neither the event loop nor a step waits for a process
    that is stopped, or a network that stalls: within seconds the group is over (rendezvous.py).
    """

    def __init__(self, joined: Joined, fail: Callable[[BaseException], NoReturn]) -> None:
        self.host, self.pid = joined.host, joined.pid
        self.control: Connection[Any, Any] = joined.ends["control"]
        self.plans: Connection[Any, Any] = joined.ends["plans"]
        self._blocks: Connection[Any, Any] = joined.ends["blocks"]
        self.shares = ShareLink(joined.ends["shares"], f"shares-{joined.pid}", fail)
        self.fail = fail
        self._writes = 0
        self._plans_lock, self._blocks_lock = threading.Lock(), threading.Lock()
        self._planned = QueuedSender(self.plans, f"plans-{joined.pid}", fail)

    def send_plan(self, planned: Planned) -> None:
        """Send what the rank does next, soon and in the order of the calls."""
        with self._plans_lock:
            self._writes += isinstance(planned, BlockOrder)
            self._planned.send(planned)

    def write_share(self, number: int, block: int, payload: bytearray) -> None:
        """Have the rank write its share of a block, after the steps so far and before those that follow."""
        self.send_plan(WriteShare(number, block, share_hash(payload), payload))

    def place_share(self, number: int, block: int, staged: int, pieces: Pieces) -> None:
        """Have the rank write a share it keeps, after the steps so far and before those that follow."""
        self.send_plan(PlaceShare(number, block, staged, pieces))

    def copy_block(self, number: int, src: int, dst: int) -> None:
        """Have the rank copy its share of a block, after the steps so far and before those that follow."""
        self.send_plan(CopyBlock(number, src, dst))

    def read_share(self, number: int, block: int) -> bytearray:
        """Return the bytes of the rank's share of a block, which no step is writing."""
        try:
            with self._blocks_lock:
                self._blocks.send(ReadShare(number, block, self._writes))
                digest = self._blocks.recv_bytes(_DIGEST_BYTES)
                payload = bytearray(self._blocks.recv_bytes())
        except (OSError, EOFError) as error:
            self.fail(error)
        if share_hash(payload) != digest:
            self.fail(DamagedShare(f"block {block} of the rank on {self.host}"))
        return payload

    def await_writes(self, number: int) -> None:
        """Wait until the rank has carried out what it was to write and copy until now."""
        try:
            with self._blocks_lock:
                self._blocks.send(AwaitWrites(number, self._writes))
                self._blocks.recv_bytes(0)
        except (OSError, EOFError) as error:
            self.fail(error)

    def listen(self, number: int, secret: bytes) -> Future[str]:
        """Have the rank listen for shares of a memory's blocks; the result is its endpoint."""
        return self.shares.ask(lambda request: ListenForShares(request, number, secret))

    def open_pushes(self, channel: int, targets: Sequence[PushTarget]) -> Future[None]:
        """Have the rank connect to ranks of another worker."""
        return self.shares.ask(lambda request: OpenPushes(request, channel, targets))

    def push_share(self, number: int, channel: int, block: int, ref: GrantRef, index: int) -> Future[bytes]:
        """Have the rank send its shares of a block, which no step is writing; the result is their digests."""
        after = self._writes
        return self.shares.ask(lambda request: PushShare(request, channel, number, block, ref, index, after))

    def copy_shares(self, number: int, channel: int, run: CopyRun) -> Future[list[bytes]]:
        """Have the rank copy its shares of blocks, which no step is writing, to memories that it maps."""
        after = self._writes
        return self.shares.ask(lambda request: CopyShares(request, channel, number, run, after))
