"""Transport within a process: a prefill worker computes straight into the pool of a decode worker beside it.

Both are hosted by one process (diptych/host), so that nothing is passed or mapped: the writer gets a memory
over the same bytes. A process cannot be its own proof of death, and so the proof that a writer has stopped is
another one here (writer_gate.py): its gate is closed, the step that was in it has ended, and the event behind
that step's work has come. Where it does not come in time, the process ends itself, which proves it, too.

    writer  → token of the welcome, by a call
    decode  → a memory over the pool's bytes, whose steps pass the writer's gate
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Locality, ReceiverHooks, TransportError, Welcome
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.registered_writers import RegisteredWriters
from kvtransfer.transports.writer_gate import WriterGate, end_process

NAME = "in_process"
SCHEME = "in-process:"
"""Begin of the endpoints of this transport."""

_RECEIVERS: weakref.WeakValueDictionary[str, InProcessReceiver] = weakref.WeakValueDictionary()
"""Receivers of this process by endpoint: its own namespace, as abstract sockets are the machine's."""
_GATES: weakref.WeakKeyDictionary[KVMemory, WriterGate] = weakref.WeakKeyDictionary()
"""Gate of each memory that was given to a writer."""


class InProcessReceiver:
    """End of the decode worker: gives its pool to writers of this process."""

    name = NAME
    in_place = True

    def __init__(
        self, pool: PoolMemory, host_id: str, hooks: ReceiverHooks, on_stuck: Callable[[], None] = end_process
    ) -> None:
        """Give `pool` to writers; `on_stuck` ends a process with a writer that does not stop."""
        self._pool, self._host_id, self._on_stuck = pool, host_id, on_stuck
        self._dead = hooks.dead
        self._writers = RegisteredWriters(self._writer_stopped)
        self._gates: dict[WriterId, WriterGate] = {}
        self._endpoint = f"{SCHEME}{secrets.token_hex(16)}"

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return None for a writer of this process."""
        here = writer.host_id == self._host_id and writer.pid == os.getpid()
        return None if here else "in another process"

    async def start(self) -> None:
        """Be found by writers of this process."""
        _RECEIVERS[self._endpoint] = self

    @property
    def endpoint(self) -> str:
        """Name of this receiver within the process."""
        return self._endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let a writer of this process register; return the token."""
        return self._writers.admit(writer, [pid])[0]

    def registered(self, writer: WriterId) -> bool:
        """Return True if this writer has the pool, and its fence is not proven."""
        return self._writers.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Close the writer's gate; `dead` follows once its last step has written."""
        self._writers.fence(writer)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Do nothing: the blocks were computed in place."""

    def link_lost(self, writer: WriterId) -> None:
        """Do nothing: a lost link proves nothing, a step may still write."""

    async def close(self) -> None:
        """Be found no more, and forget the writers."""
        _RECEIVERS.pop(self._endpoint, None)
        self._writers.close()

    def register(self, token: bytes, layout: KVLayout) -> KVMemory:
        """Return a memory over the pool for the writer that has this token, with no draft model's segment if
        `layout` has none. Raises TransportError.
        """
        writer = self._writers.take(token, os.getpid())
        # One gate for all memories that a writer was given: a step may still run in an earlier one.
        gate = self._gates.get(writer)
        if gate is None:
            gate = self._gates[writer] = WriterGate(self._on_stuck)
        if gate.closed:  # kept again, it would forget the time by which its last step has to end
            raise TransportError("this writer was fenced")
        pool = self._pool.memory
        memory = copy.copy(pool if layout.draft is not None else pool.without_draft())
        _GATES[memory] = gate
        self._writers.keep(writer, gate)
        return memory

    def _writer_stopped(self, writer: WriterId) -> None:
        self._gates.pop(writer, None)
        self._dead(writer)


async def open_in_process(welcome: Welcome) -> KVMemory:
    """Register with a decode worker of this process, and return its pool. Raises TransportError."""
    receiver = _RECEIVERS.get(welcome.endpoint)
    if receiver is None:
        raise TransportError("the decode worker is not in this process")
    return receiver.register(welcome.token, welcome.layout)


def is_fenced(memory: KVMemory) -> bool:
    """Return whether no step may write to `memory` any more: its writer was fenced."""
    gate = _GATES.get(memory)
    return gate is not None and gate.closed


@contextlib.contextmanager
def writing(memories: Iterable[KVMemory]) -> Iterator[None]:
    """Let a step write to `memories` until the context ends, on the thread that computes it.

    Memories of other transports need no leave. Raises WriterFenced for one whose writer was fenced; nothing
    is written then.
    """
    gates = {gate for memory in memories if (gate := _GATES.get(memory)) is not None}
    with contextlib.ExitStack() as stack:
        for gate in gates:
            stack.enter_context(gate.step())
        yield
