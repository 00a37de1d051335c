"""CUDA IPC between GPUs of one host: one kernel copies a chunk's blocks into the mapped decode pool.

The writer computes in blocks of its own and maps the pool, which its GPU reaches over NVLink or PCIe. When a
chunk is computed, one launch copies its blocks of all layers to their destinations, beside the computation of
the next chunk; a flag of the grant is set behind it. Once both have happened, `pushed` goes out with the
digests. The decode worker then reads the flag, takes the digests of the bytes in its pool, and compares.

No process stands between the writer and the pool, so that the fence is that of shared memory: its death.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Locality, ReceiverHooks, Run, TransportError, Welcome
from kvtransfer.transports.blocking import BlockingThread, finished
from kvtransfer.transports.fd_passing import PoolFdSocket, register
from kvtransfer.transports.mapped_channel import MappedChannel
from kvtransfer.transports.mapped_pool import MappedPool
from kvtransfer.transports.memory_mapping import ExportedPool, Flags, MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.pull_mapped import MappedPullChannel

NAME = "cuda_ipc"
_NO_GRANT = GrantRef(("", 0), 0, 0)
_log = logging.getLogger(__name__)


class CudaIpcReceiver:
    """End of the decode worker: maps its pool into admitted writers, and checks what they announce."""

    name = NAME
    in_place = False

    def __init__(self, pool: PoolMemory, mapping: MemoryMapping, hooks: ReceiverHooks) -> None:
        self._pool, self._mapping, self._hooks = pool, mapping, hooks
        # A grant has at least one block, so that its slot is below their number.
        self._flags = Flags.create(pool.memory.num_blocks)
        self._socket = PoolFdSocket(self._export, hooks.dead)
        self._thread = BlockingThread("verify-pushed")
        self._checks: set[asyncio.Task[object]] = set()

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return why a writer there cannot map this pool, None if it can."""
        return self._mapping.unreachable_reason(writer, in_place=False)

    async def start(self) -> None:
        """Listen, and read the pool once for the checks. Raises OSError."""
        await self._socket.start()
        self._keep(self._thread.run(self._mapping.digests, self._pool.memory, [0], _NO_GRANT, 0))

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket behind an @."""
        return self._socket.endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let the process `pid` register as `writer`; return the token."""
        return self._socket.admit(writer, pid)

    def registered(self, writer: WriterId) -> bool:
        """Return True if this writer maps the pool, as far as this process knows."""
        return self._socket.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Kill the process; `dead` follows."""
        self._socket.fence(writer)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Check announced blocks in the pool; `arrived` or `corrupt` follows, unless the grant ends."""
        blocks = self._hooks.destinations(writer, ref, range(first, first + count))
        if blocks is None:
            return
        if not self._flags.written(ref, first + count):
            _log.error("prefill worker %s announced blocks before they were written", writer.worker_id)
            self._hooks.corrupt(writer, ref)
            return
        self._keep(self._check(writer, ref, first, blocks))

    def link_lost(self, writer: WriterId) -> None:
        """Do nothing: a broken stream proves nothing, the process may still write."""

    async def close(self) -> None:
        """Stop listening and forget the writers."""
        await self._socket.close()
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        self._thread.stop()
        self._flags.close()

    def _keep(self, check: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(check)
        self._checks.add(task)
        task.add_done_callback(self._checked)

    def _checked(self, task: asyncio.Task[object]) -> None:
        self._checks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the pool cannot be read for checks: %s", error)

    async def _check(self, writer: WriterId, ref: GrantRef, first: int, blocks: Sequence[int]) -> None:
        """Digest blocks in the pool.

        Digests of blocks that got another owner meanwhile are of no open grant.
        """
        memory = self._pool.memory
        try:
            digests = await self._thread.run(self._mapping.digests, memory, blocks, ref, first)
        except Exception:  # of any kind: blocks that could not be checked are not used
            _log.exception("blocks of prefill worker %s cannot be checked", writer.worker_id)
            self._hooks.corrupt(writer, ref)
            return
        self._hooks.arrived(writer, ref, first, digests)

    def _export(self, writer: WriterId) -> ExportedPool:
        exported = self._mapping.export(self._pool)
        return ExportedPool(exported.handle, [self._flags.fd, *exported.fds])


class CudaIpcChannel(MappedChannel):
    """End of the prefill worker: the mapped pool, and a thread that waits for copies into it."""

    def __init__(self, target: MappedPool, mapping: MemoryMapping) -> None:
        super().__init__()
        self._target, self._mapping = target, mapping
        self._thread = BlockingThread("push")

    @classmethod
    async def open(cls, welcome: Welcome, mapping: MemoryMapping) -> CudaIpcChannel:
        """Register with a decode worker and map its pool. Raises TransportError."""
        mapped: list[MappedPool] = []

        def map_pool(pool: ExportedPool) -> MappedPool:
            mapped.append(MappedPool(pool, welcome.layout, welcome.num_blocks, mapping))
            return mapped[0]

        try:
            # Waited for also if this task is cancelled: what is mapped meanwhile is given back here.
            target = await finished(asyncio.ensure_future(register(welcome, map_pool)))
        except BaseException:
            for unconfirmed in mapped:
                unconfirmed.close()
            raise
        channel = cls(target, mapping)
        try:
            # Reads the pool once: a GPU's kernel is compiled by that, and known to reach the memory.
            await channel._thread.run(mapping.digests, channel._target.memory, [0], _NO_GRANT, 0)
        except BaseException as error:
            channel.close()
            if isinstance(error, Exception):  # of any kind: Triton has errors of its own
                raise TransportError(f"the decode worker's pool cannot be reached: {error}") from error
            raise
        return channel

    def open_pulls(self, scratch: KVMemory) -> MappedPullChannel:
        """Return a channel that reads the mapped pool into `scratch`."""
        return MappedPullChannel(self._target.memory, scratch, self._mapping)

    async def _copied(self, run: Run) -> list[bytes]:
        return await self._thread.run(self._copy, run)

    def _unmap(self) -> None:
        self._thread.stop()
        self._target.close()

    def _copy(self, run: Run) -> list[bytes]:
        upto = run.first + len(run.block_ids)
        try:
            finish = self._mapping.start_copy(
                run, self._target.memory, self._target.flags.word(run.ref, upto)
            )
            return finish()
        except Exception as error:  # of any kind, as in `open`
            raise TransportError(f"blocks were not pushed: {error}") from error
