"""Shares of blocks that this rank sends to the ranks of other workers, a thread for each channel.

A channel is rank 0's link to one decode worker, so that one which reads nothing delays no other. Closing it
ends whatever its thread waits for.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

from diptych.runtime.host_port import parse_address
from diptych.worker_process.group.orders import Answered, OpenPushes, PushShare, RankFailed
from diptych.worker_process.group.share_arrivals import receive_into
from diptych.worker_process.group.share_memory import ShareMemory
from kvtransfer.transports.data_listener import REGISTRATION_S
from kvtransfer.transports.failpoints import damage_payload, damage_place
from kvtransfer.transports.held_blocks import read_pieces
from kvtransfer.transports.rank_data import (
    ACCEPTED,
    HEADER,
    PushTarget,
    share_digest,
    share_hash,
)


class PushChannel:
    """Connections to the ranks of one decode worker.

    Args:
        source: number of this rank among the holders of its worker's blocks.
        own: this rank's blocks.
        answer: takes the end of each order.
    """

    def __init__(
        self, source: int, order: OpenPushes, own: ShareMemory, answer: Callable[[Answered], None]
    ) -> None:
        """Connect, soon."""
        self._source, self._own, self._answer = source, own, answer
        self._targets: list[tuple[PushTarget, socket.socket]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._orders: queue.SimpleQueue[OpenPushes | PushShare | None] = queue.SimpleQueue()
        self._orders.put(order)
        threading.Thread(target=self._work, name=f"pushes-{order.channel}", daemon=True).start()

    def push(self, order: PushShare) -> None:
        """Send shares of a block after those before them."""
        self._orders.put(order)

    def close(self) -> None:
        """Send nothing more, also of what was begun."""
        with self._lock:
            self._closed = True
            for _, connection in self._targets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                result = self._carry_out(order)
            except Exception as error:  # of any kind, as of a GPU's copies: rank 0 waits for the answer
                self._answer(
                    Answered(order.request, RankFailed(f"no shares reach the decode worker: {error}"))
                )
            else:
                self._answer(Answered(order.request, result))
        for _, connection in self._targets:
            connection.close()

    def _carry_out(self, order: OpenPushes | PushShare) -> bytes | None:
        if isinstance(order, PushShare):
            return self._push(order)
        self._connect(order)
        return None

    def _connect(self, order: OpenPushes) -> None:
        for target in order.targets:
            connection = socket.create_connection(parse_address(target.endpoint), timeout=REGISTRATION_S)
            with self._lock:
                self._targets.append((target, connection))
            self._check_open()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(target.token)
            receive_into(connection, memoryview(bytearray(len(ACCEPTED))))
            connection.settimeout(None)

    def _push(self, order: PushShare) -> bytes:
        memory = self._own.memory(order.number, order.after)
        digests = []
        for target, connection in self._targets:
            self._check_open()
            payload = read_pieces(memory, order.block, target.pieces)
            digest = share_digest(order.ref, order.index, self._source, target.target, share_hash(payload))
            ref, index = damage_place(order.ref, order.index)
            connection.sendall(HEADER.pack(ref.slot, ref.generation, index, payload.nbytes, digest))
            connection.sendall(damage_payload(payload))
            digests.append(digest)
        return b"".join(digests)

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                raise EOFError("the channel was closed")
