"""Process that the supervisor started: its pipes, its ready line, its end.

A process is described by a ChildSpec and lives as a Child. It is watched through a pidfd, which names
this very process for ever: a signal can never reach another one that was given the same number.
Everything it writes to stdout or stderr arrives here by line.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diptych.runtime.process import read_ready_line
from diptych.runtime.settings import CANNOT_START

Announcement = Mapping[str, int | str]
"""Values that a process announces once it serves: grpc_port, http_port, worker_id (gateway: admin_port;
Valkey: port).
"""


def announced_by(announced: Announcement, role: str) -> Announcement:
    """Return what the worker of `role` announced in the line of the process that hosts it."""
    prefix = f"{role}."
    return {name.removeprefix(prefix): value for name, value in announced.items() if name.startswith(prefix)}


def ids_of(announced: Announcement) -> list[str]:
    """Return the worker ids of a process: one, or that of each worker that it hosts."""
    return _each(announced, "worker_id")


def records_of(announced: Announcement) -> list[str]:
    """Return the directory records of the workers of a process, as text."""
    return _each(announced, "record")


def _each(announced: Announcement, member: str) -> list[str]:
    """Return a member as a process's own, or of each worker that it hosts, behind its role."""
    return [str(value) for name, value in announced.items() if name.rpartition(".")[2] == member]


Probe = Callable[[], Awaitable[Announcement]]
Health = Callable[[Announcement], Awaitable[bool]]

_CHUNK_BYTES = 1 << 16
_USAGE_STATUS = 2  # of argument parsers
_MAX_DEATHS = 8  # the last ones: more than any request is given
_ID_BYTES = 4  # of several systems that share a directory each has a `decode-0`
_LINE_BYTES = 1 << 16  # a longer line is cut, so that a process that writes no newline costs no memory

_QUIET_OPENMP = {"OMP_WAIT_POLICY": "passive"}
"""Torch's threads sleep where they wait. Those of two workers on the same cores, each spinning until the
others had their turn, took up to 39 seconds to load a model instead of five.
"""


@dataclass(frozen=True)
class Slot:
    """A place in the arguments: a file descriptor of the child, or a name in `values`.

    The descriptors are "ready_fd", and what `Inherited` has: "death_fd", "cores_fd", "workers_fd".
    "worker_id" begins with the process's name and is another one at each start, as are "prefill_id" and
    "decode_id" of the workers that it hosts; "replaces" are the ids of those that died there. "weight_holder"
    is the name under which the supervisor keeps packed weights.
    """

    name: str


@dataclass(frozen=True)
class Inherited:
    """Descriptors that every child shares with the supervisor: the read end of the pipe whose end of file
    tells it that the supervisor died, the file on whose bytes workers lend each other cores, and the one that
    lists the workers for gateways. And the name of the socket that has packed weights, empty for none.
    """

    death_fd: int
    cores_fd: int
    workers_fd: int
    weight_holder: str = ""


class ChildFailed(Exception):
    """A process ended, or stayed silent for too long, before it was ready."""

    def __init__(self, name: str, reason: str, last_lines: tuple[str, ...] = ()) -> None:
        super().__init__(f"{name} {reason}")
        self.name, self.reason, self.last_lines = name, reason, last_lines

    @property
    def is_final(self) -> bool:
        """True if the process itself gave a reason that another start cannot mend: bad flags, a bad model."""
        usage = self.reason.endswith(f"({describe(_USAGE_STATUS)})")
        return usage or any(CANNOT_START in line for line in self.last_lines)


@dataclass(frozen=True)
class ChildSpec:
    """Specification of a process.

    `argv` is filled in at each start. `keep` names the announced values that a restart uses again, such as
    a public port. `roles` are the specifications of a worker in each role that it may have, and `model` is
    the path of its model. `hosts` are the specifications of the workers that the process hosts, where it
    hosts several. `died` are the ids of those that died in its place. A process that cannot announce
    itself is asked by `probe` until that returns. `health` asks one that serves whether it still does;
    without it its silence is not noticed.
    """

    name: str
    role: str
    argv: tuple[str | Slot, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, int | str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    died: tuple[str, ...] = ()
    roles: Mapping[str, "ChildSpec"] = field(default_factory=dict)
    hosts: tuple["ChildSpec", ...] = ()
    model: str = ""
    stdin: bytes | None = None
    probe: Probe | None = None
    health: Health | None = None

    @property
    def workers(self) -> tuple["ChildSpec", ...]:
        """The specifications of the workers in this process: its own, or those that it hosts."""
        return self.hosts or (self,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the process and of the workers that it hosts."""
        return (self.name, *(one.name for one in self.hosts))

    def with_values(self, values: Mapping[str, int | str]) -> "ChildSpec":
        """Return the specification with some of its values replaced."""
        return replace(self, values={**self.values, **values})

    def in_role(self, role: str, taken: Collection[str]) -> "ChildSpec":
        """Return the specification of the same worker in another role, by the first name not in `taken`."""
        own = self.roles[role]
        return replace(self, role=role, argv=own.argv, health=own.health).renamed(taken)

    def renamed(self, taken: Collection[str]) -> "ChildSpec":
        """Return the specification by the first name of its role that is not in `taken`."""
        names = (f"{self.role}-{number}" for number in itertools.count())
        hosts = tuple(one.renamed(taken) for one in self.hosts)
        return replace(self, name=next(one for one in names if one not in taken), hosts=hosts)

    def restarted(self, announced: Announcement) -> "ChildSpec":
        """Return the specification of the same process once more, at the addresses it had."""
        return replace(self, values={**self.values, **{key: announced[key] for key in self.keep}})

    def after_death(self, announced: Announcement) -> "ChildSpec":
        """Return `restarted` for a process that is known to be dead; its successor confirms that to the
        gateways.
        """
        died = (*self.died, *ids_of(announced))
        return replace(self.restarted(announced), died=died[-_MAX_DEATHS:])


class Child:
    """A running process. Made by `Child.start`, on the event loop's thread."""

    def __init__(self, spec: ChildSpec, process: subprocess.Popen[bytes], ready_fd: int) -> None:
        self.spec = spec
        self.pid = process.pid
        self._process = process
        self._ready_fd = ready_fd
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    @classmethod
    def start(cls, spec: ChildSpec, inherited: Inherited) -> "Child":
        """Start the process. Raises OSError when the program cannot be run."""
        ready_read, ready_write = os.pipe()
        try:
            fds = {
                "death_fd": inherited.death_fd,
                "cores_fd": inherited.cores_fd,
                "workers_fd": inherited.workers_fd,
                "ready_fd": ready_write,
            }
            token = secrets.token_hex(_ID_BYTES)
            names = {
                **spec.values,
                **fds,
                "weight_holder": inherited.weight_holder,
                "worker_id": f"{spec.name}-{token}",
                **{f"{one.role}_id": f"{one.name}-{token}" for one in spec.hosts},
                "replaces": ",".join(spec.died),
            }
            process = subprocess.Popen(
                [part if isinstance(part, str) else str(names[part.name]) for part in spec.argv],
                stdin=subprocess.DEVNULL if spec.stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**_QUIET_OPENMP, **os.environ, **spec.env},
                pass_fds=tuple(fds.values()),
                # Its own group: Ctrl-C at a terminal must reach the supervisor alone, which then ends
                # the others in order; a second signal would make them exit without draining.
                process_group=0,
            )
        except OSError:
            os.close(ready_read)
            raise
        finally:
            os.close(ready_write)
        if spec.stdin is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: seen at once as an exit
                process.stdin.write(spec.stdin)
                process.stdin.close()
        return cls(spec, process, ready_read)

    async def ready(self, timeout_s: float) -> Announcement:
        """Wait for the announcement of the process. Raises ChildFailed when it ends or stays silent."""
        ask = self.spec.probe() if self.spec.probe is not None else self._ready_line()
        asking: asyncio.Future[Announcement | None] = asyncio.ensure_future(ask)
        either: list[asyncio.Future[Any]] = [asking, self._exit]
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and (announced := asking.result()) is not None:
                return announced
            if not self._exit.done():
                # The ready line's pipe closes a moment before the exit is seen.
                await asyncio.wait({self._exit}, timeout=1 if asking.done() else 0)
            if self._exit.done():
                raise ChildFailed(
                    self.spec.name, f"ended before it was ready ({describe(self._exit.result())})"
                )
            raise ChildFailed(self.spec.name, f"was not ready after {timeout_s:.0f} s")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ready_line(self) -> Announcement | None:
        ready_fd, self._ready_fd = self._ready_fd, -1
        line = await read_ready_line(ready_fd)
        if not line.endswith(b"\n"):
            return None
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ChildFailed(self.spec.name, f"announced itself with no JSON: {error}") from None
        if not isinstance(said, dict):
            raise ChildFailed(self.spec.name, "announced itself with something else than a JSON object")
        return said

    async def lines(self, sink: Callable[[str], None]) -> None:
        """Hand every line that the process writes to `sink`, until it closes its output."""
        reader = asyncio.StreamReader()
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        pending = b""
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                *whole, pending = (pending + chunk).split(b"\n")
                if len(pending) > _LINE_BYTES:
                    whole, pending = [*whole, pending], b""
                for line in whole:
                    sink(line.decode(errors="replace").rstrip())
            if pending:
                sink(pending.decode(errors="replace").rstrip())
        finally:
            transport.close()

    async def exited(self) -> int:
        """Wait for the end of the process: its status, or minus the signal that ended it."""
        return await asyncio.shield(self._exit)

    @property
    def alive(self) -> bool:
        return not self._exit.done()

    def send(self, signum: signal.Signals) -> None:
        """Signal the process if it still lives."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it ended and is about to be reaped
                signal.pidfd_send_signal(self._pidfd, signum)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = self._process.wait()  # a readable pidfd means that it ended: this does not block
        os.close(self._pidfd)
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
        self._exit.set_result(status)


def describe(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
