"""Offers of a prefill worker to each decode process: transports, and who holds which shares of its blocks.

Ranks may not reach those of another group. So memories that they do not map to compute in are copied to, what
they do not map at all goes by sockets, and what these do not reach goes whole, from rank 0 to rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.parallel.kv_routes import Holders
from kvtransfer.transports import cuda_ipc, shared_memory, tcp
from kvtransfer.transports.base import WriterRanks, gpu_uuid
from kvtransfer.transports.tcp_by_rank import can_go_by_rank, one_holder

Process = tuple[str, int]
"""Address and incarnation of a decode process."""
_INSTEAD = {shared_memory.ON_GPU: "in copies", cuda_ipc.NAME: "by tcp", tcp.NAME: "whole"}
"""Transports between ranks with memories of their own, and how blocks go where some rank is not reached."""


class Reach:
    """Transports of one prefill worker, less those by which ranks of a decode process were not reached.

    `device` is the one on which it computes; `ranks` are its other processes that do, where it is a group.
    """

    def __init__(
        self, transports: Sequence[str], layout: KVLayout, device: torch.device, ranks: WriterRanks | None
    ) -> None:
        self._transports, self._layout = transports, layout
        self._device, self._ranks = device, ranks
        self._unreached: dict[str, set[Process]] = {name: set() for name in _INSTEAD}
        """Decode processes some of whose ranks were not reached from some of this worker's, by transport."""

    @property
    def apart(self) -> bool:
        """True if ranks of this worker have memories of their own."""
        return self._apart_holders is not None

    @property
    def _apart_holders(self) -> Holders | None:
        return None if self._ranks is None else self._ranks.holders

    @property
    def holder_devices(self) -> Sequence[str]:
        """UUID of the GPU of each process that holds shares of blocks, empty for host memory."""
        if self._ranks is None or not self.apart:
            return [gpu_uuid(self._device)]
        return self._ranks.devices

    def holders_for(self, process: Process) -> Holders:
        """Return the processes that send shares of blocks to a decode process; empty: blocks go whole."""
        if process in self._unreached[tcp.NAME] or not can_go_by_rank(self._layout):
            return ()
        own = self._apart_holders
        return own if own is not None else one_holder(self._layout)

    def transports_to(self, process: Process) -> list[str]:
        """Return the transports to offer to a decode process.

        Whole blocks of ranks with memories of their own go by tcp alone: no memory has them all.
        """
        if self.apart and not self.holders_for(process):
            return [t for t in self._transports if t == tcp.NAME]
        return [t for t in self._transports if t == tcp.NAME or process not in self._unreached.get(t, ())]

    def fall_back(self, process: Process, transport: str) -> str | None:
        """Take note that ranks of a decode process are not reached by a transport.

        Returns how blocks go there from now on, in words; None if no other way is left.
        """
        unreached = self._unreached[transport]
        known = process in unreached
        unreached.add(process)
        return None if known or not self.transports_to(process) else _INSTEAD[transport]
