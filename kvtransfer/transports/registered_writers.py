"""Writers that map the pool: who is admitted, which of its processes registered, and when it is dead.

A writer may be several processes, the ranks of a group: each registers with a token of its own, each can
write, and only the death of all of them proves that the writer stopped.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import TransportError

TOKEN_BYTES = 32
_log = logging.getLogger(__name__)


class MappingProcess(Protocol):
    """Process that may write until it is dead (`WriterProcess`)."""

    @property
    def pid(self) -> int:
        """Return the process id."""
        ...

    def kill(self) -> None:
        """Kill it; `watch` reports its death. Raises ValueError, OSError."""
        ...

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call `on_death` once it is dead."""
        ...

    def close(self) -> None:
        """Forget it; its death is not reported."""
        ...


@dataclass(frozen=True, slots=True)
class _Admission:
    writer: WriterId
    pid: int


class RegisteredWriters:
    """The writers of one pool."""

    def __init__(self, dead: Callable[[WriterId], None]) -> None:
        """Call `dead` when the last process of a writer has died."""
        self._dead = dead
        self._admitted: dict[bytes, _Admission] = {}
        self._writers: dict[WriterId, dict[int, MappingProcess]] = {}
        """Processes of each writer that map the pool, by pid."""
        self._expected: dict[WriterId, frozenset[int]] = {}

    def admit(self, writer: WriterId, pids: Sequence[int]) -> list[bytes]:
        """Let the processes `pids` register as `writer`, all of them; return the token of each."""
        self._withdraw(writer)
        self._expected[writer] = frozenset(pids)
        tokens = [secrets.token_bytes(TOKEN_BYTES) for _ in pids]
        self._admitted.update((t, _Admission(writer, pid)) for t, pid in zip(tokens, pids, strict=True))
        return tokens

    def take(self, token: bytes, pid: int) -> WriterId:
        """Return the writer that the process `pid` registers as; the token is used up.

        Raises TransportError.
        """
        for known, admission in self._admitted.items():
            if hmac.compare_digest(known, token):
                del self._admitted[known]
                if admission.pid != pid:
                    raise TransportError("another process than the one of the hello")
                return admission.writer
        raise TransportError("an unknown token")

    def keep(self, writer: WriterId, process: MappingProcess) -> None:
        """Register a process of `writer`, which maps the pool from here on."""
        processes = self._writers.setdefault(writer, {})
        earlier = processes.pop(process.pid, None)
        if earlier is not None:
            earlier.close()  # the same process again: the hello's pid was checked both times
        processes[process.pid] = process
        process.watch(lambda: self._process_died(writer, process))

    def _process_died(self, writer: WriterId, process: MappingProcess) -> None:
        processes = self._writers[writer]
        del processes[process.pid]
        if not processes:
            del self._writers[writer]
            self._withdraw(writer)
            self._dead(writer)

    def _withdraw(self, writer: WriterId) -> None:
        """Let no process register any more as `writer`, as it was admitted before."""
        self._expected.pop(writer, None)
        for token in [t for t, admission in self._admitted.items() if admission.writer == writer]:
            del self._admitted[token]

    def registered(self, writer: WriterId) -> bool:
        """Return True if all processes of this writer map the pool, as far as this process knows."""
        expected = self._expected.get(writer)
        return expected is not None and expected <= self._writers.get(writer, {}).keys()

    def fence(self, writer: WriterId) -> None:
        """Kill the writer's processes; `dead` follows. Tokens that are not used yet end with them."""
        self._withdraw(writer)
        for process in list(self._writers.get(writer, {}).values()):
            try:
                process.kill()
            except (ValueError, OSError) as error:
                name = writer.worker_id
                _log.error("cannot fence prefill worker %s (pid %d): %s", name, process.pid, error)

    def close(self) -> None:
        """Forget the writers."""
        for processes in self._writers.values():
            for process in processes.values():
                process.close()
        self._writers.clear()
