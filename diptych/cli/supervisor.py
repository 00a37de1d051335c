"""Supervisor of processes: it starts them, keeps them running, and ends them all.

The life of a supervised process:

    start -> LOADING -ready-> SERVING -ended, or silent and killed-> WAITING -backoff-> LOADING …
                \\_ended or silent: one more failure; at the first start of a system that does not serve
                   without the process, or when it says that it cannot start, the start fails

A worker that ends with the status of a role (diptych/runtime/role_change.py) is started in that role at
once, by another name; where that does not become ready, in the role that it had. One that dies starts in
the role that it has.

`stop` ends them by role, the gateway first: SIGTERM, a grace period, SIGKILL. Should this process be
killed itself, the death pipe and the kernel's parent-death signal end all the others.
"""

import asyncio
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from diptych.cli.child import (
    Announcement,
    Child,
    ChildFailed,
    ChildSpec,
    Inherited,
    Slot,
    announced_by,
    describe,
    records_of,
)
from diptych.cli.process_events import ChangedRole, Ended, Event, Loading, Removed, Replaced, Serving, Wrote
from diptych.cli.restart_policy import LivenessProbe, RestartPolicy, wait_until_unresponsive
from diptych.runtime.discovery.records import Role
from diptych.runtime.discovery.worker_file import WorkerFile
from diptych.runtime.role_change import role_asked_by
from diptych.runtime.weight_store.holder import WeightHolder

_KEPT_LINES = 40
ServesWithout = Callable[[ChildSpec], Awaitable[bool]]
_LAST_LINES_S = 1.0  # a process's own child may hold its output open for ever


@dataclass
class _Kept:
    spec: ChildSpec
    child: Child | None = None
    announced: Announcement | None = None
    asked_role: Role | None = None  # by its exit status
    restarts: int = 0
    replaced: bool = False  # a successor is on its way, in the same role
    passing: bool = False  # it takes over from another, or is what another has taken over from
    again: asyncio.Event = field(default_factory=asyncio.Event)  # set when it serves, once more
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    keeper: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Running:
    """A supervised process, or a worker that one hosts, as it is now; `announced` is None while it is not
    serving.
    """

    name: str
    role: str
    pid: int | None
    announced: Announcement | None
    restarts: int
    model: str = ""
    process: str = ""
    """Name of the process, which may host several workers."""


class Supervisor:
    """Owner of processes. To be used from the main thread: the parent-death signal follows the thread.

    `observe` is called for every event, on the event loop; `ready_timeout_s` bounds the time from a
    start to the ready line, `grace_s` that from SIGTERM to SIGKILL. A process that answers no probe of its
    spec's `health` for longer than `liveness` allows is killed.
    """

    def __init__(
        self,
        observe: Callable[[Event], None],
        *,
        policy: RestartPolicy | None = None,
        liveness: LivenessProbe | None = None,
        ready_timeout_s: float = 300.0,
        grace_s: float = 10.0,
    ) -> None:
        self._observe = observe
        self._policy = policy or RestartPolicy()
        self._liveness = liveness or LivenessProbe()
        self._ready_timeout_s = ready_timeout_s
        self._grace_s = grace_s
        self._kept: dict[str, _Kept] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        # Children inherit the read end alone: the write end closes with this process, however it ends.
        death_read, self._death_write = os.pipe()
        self.workers = WorkerFile()
        self._weights = _weight_holder()
        self._inherited = Inherited(
            death_read,
            os.memfd_create("diptych-cores", os.MFD_CLOEXEC),
            self.workers.fd,
            "" if self._weights is None else self._weights.name,
        )

    async def start(
        self, specs: Sequence[ChildSpec], *, serves_without: ServesWithout | None = None
    ) -> list[Announcement | None]:
        """Start processes at once and wait until all serve. Raises ChildFailed for the first that does not.

        After a failure the others are left as they are: the caller is to stop them all. Where
        `serves_without` returns True for a process that failed, that one is started again as after a death,
        and its announcement is None; but not if it said itself that it cannot start.
        """
        starts = [asyncio.ensure_future(self._first_start(spec, serves_without)) for spec in specs]
        try:
            return list(await asyncio.gather(*starts))
        finally:
            await _cancel(starts)

    def running(self) -> list[Running]:
        """Return all processes, in the order of their start; of one that hosts workers, those."""
        return [
            Running(
                one.name,
                one.role,
                kept.child.pid if kept.child is not None and kept.child.alive else None,
                announced_by(kept.announced, one.role)
                if one is not kept.spec and kept.announced is not None
                else kept.announced,
                kept.restarts,
                one.model,
                kept.spec.name,
            )
            for kept in self._kept.values()
            if not kept.passing
            for one in kept.spec.workers
        ]

    async def replace(
        self,
        name: str,
        values: Mapping[str, int | str],
        settled: Callable[[Announcement], Awaitable[None]],
    ) -> None:
        """Start a successor of a serving process beside it and, once `settled` returns, ends the old one.

        It gets the same arguments but for `values`, and the addresses that a restart keeps: for these both
        must be willing to share. Raises ChildFailed, or what `settled` raises; the old process then goes on.
        """
        old = self._kept.get(name)
        if old is None or old.announced is None:
            raise ChildFailed(name, "is not serving" if old is not None else "has changed its role meanwhile")
        spec = old.spec.restarted(old.announced)
        new = _Kept(spec.with_values(values), restarts=old.restarts + 1, passing=True)
        self._kept[f"{name} (successor)"] = new  # so that a stop finds it
        old.replaced = True
        born = time.monotonic()
        try:
            await settled(await self._launch(new))
        except BaseException:
            old.replaced = False
            await self._end([new])
            raise
        finally:
            del self._kept[f"{name} (successor)"]
        await _cancel([old.keeper] if old.keeper is not None else [])
        new.passing, old.passing = False, True
        new.spec = spec
        self._kept[name], self._kept[f"{name} (predecessor)"] = new, old
        new.keeper = asyncio.create_task(self._keep(new, born), name=f"keep {name}")
        self._observe(Replaced(name))
        try:
            await self._end([old])
        finally:
            del self._kept[f"{name} (predecessor)"]

    async def end_and_await(self, name: str) -> None:
        """End a process that cannot have a successor beside it, and returns when it serves again."""
        kept = self._kept[name]
        if kept.child is None or kept.announced is None:
            raise ChildFailed(name, "is not serving")
        kept.again.clear()
        kept.child.send(signal.SIGTERM)
        async with asyncio.timeout(self._ready_timeout_s):
            await kept.again.wait()

    def reconfigure(self, name: str, argv: Sequence[str | Slot]) -> None:
        """Let a process have other arguments from its next start on."""
        kept = self._kept[name]
        kept.spec = replace(kept.spec, argv=tuple(argv))

    async def remove(self, names: Collection[str]) -> None:
        """End processes for good."""
        removed = [kept for name in names if (kept := self._kept.pop(name, None)) is not None]
        await _cancel(kept.keeper for kept in removed if kept.keeper is not None)
        await self._end(removed)
        self._list_workers()
        for kept in removed:
            self._observe(Removed(kept.spec.name))

    async def stop(self, roles: Sequence[str] = ()) -> None:
        """End every process: those of `roles` first, one role after the other, then the rest together."""
        self._stopping = True
        await _cancel(kept.keeper for kept in self._kept.values() if kept.keeper is not None)
        for role in roles:
            await self._end([kept for kept in self._kept.values() if kept.spec.role == role])
        await self._end(list(self._kept.values()))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_LINES_S)
            await _cancel(self._tasks)
        for fd in (self._inherited.death_fd, self._inherited.cores_fd, self._death_write):
            os.close(fd)
        self.workers.close()
        if self._weights is not None:
            self._weights.close()

    def kill(self) -> None:
        """End every process at once, without grace. `stop` is still to be awaited."""
        for kept in self._kept.values():
            if kept.child is not None:
                kept.child.send(signal.SIGKILL)

    async def _first_start(
        self, spec: ChildSpec, serves_without: ServesWithout | None
    ) -> Announcement | None:
        kept = self._kept[spec.name] = _Kept(spec)
        born = time.monotonic()
        announced, reason = None, ""
        try:
            announced = await self._launch(kept)
        except ChildFailed as failure:
            if serves_without is None or failure.is_final or not await serves_without(spec):
                del self._kept[spec.name]
                raise
            reason = failure.reason
        kept.keeper = asyncio.create_task(self._keep(kept, born, reason), name=f"keep {spec.name}")
        return announced

    async def _keep(self, kept: _Kept, born: float, reason: str = "") -> None:
        """Wait for the end of a serving process and start it again, for ever. `reason`: it has ended."""
        failures = 0
        reason = reason or await self._end_of(kept)
        while True:
            if before := self._change_role(kept):
                failures, delay_s = 0, 0.0
            else:
                failures = self._policy.failures(failures, time.monotonic() - born)
                delay_s = self._policy.delay_s(failures)
                self._observe(Ended(kept.spec.name, reason, delay_s))
            await asyncio.sleep(delay_s)
            born = time.monotonic()
            kept.restarts += 1
            try:
                await self._launch(kept)
                reason = await self._end_of(kept)
            except ChildFailed as failure:
                reason = failure.reason
                if before:
                    self._rename(kept, before)

    def _change_role(self, kept: _Kept) -> ChildSpec | None:
        """Give a process that ended for that its other role; return what it was, None where it keeps it."""
        role, kept.asked_role, before = kept.asked_role, None, kept.spec
        if role is None or role not in before.roles or role == before.role or kept.replaced:
            return None
        after = before.in_role(role, self._kept.keys())
        self._rename(kept, after)
        self._observe(ChangedRole(before.name, after.name, role))
        return before

    def _rename(self, kept: _Kept, spec: ChildSpec) -> None:
        """Let a process be another one from its next start on; what died in its place stays known."""
        if self._kept.get(kept.spec.name) is kept:
            del self._kept[kept.spec.name]
        if spec.name in self._kept:  # taken meanwhile, by another one that changed
            spec = spec.in_role(spec.role, self._kept.keys())
        kept.spec = replace(spec, died=kept.spec.died)
        self._kept[spec.name] = kept

    async def _end_of(self, kept: _Kept) -> str:
        if kept.child is None or kept.announced is None:
            raise RuntimeError(f"{kept.spec.name} is not serving")
        watch = asyncio.create_task(self._kill_when_silent(kept.spec, kept.child, kept.announced))
        try:
            status = await kept.child.exited()
        finally:
            await _cancel([watch])
        kept.spec = kept.spec.after_death(kept.announced)
        kept.announced = None
        kept.asked_role = role_asked_by(status)
        self._list_workers()
        silent = not watch.cancelled() and watch.result()
        return "stopped answering and was killed" if silent else f"ended: {describe(status)}"

    async def _kill_when_silent(self, spec: ChildSpec, child: Child, announced: Announcement) -> bool:
        if spec.health is None:
            return False
        await wait_until_unresponsive(partial(spec.health, announced), self._liveness)
        child.send(signal.SIGKILL)
        return True

    async def _launch(self, kept: _Kept) -> Announcement:
        """Start a process, up to its ready line. Leaves no process behind when it raises."""
        born = time.monotonic()
        try:
            child = kept.child = Child.start(kept.spec, self._inherited)
        except OSError as error:
            raise ChildFailed(kept.spec.name, f"cannot be started: {error}") from error
        self._observe(Loading(kept.spec.name))
        lines = asyncio.create_task(child.lines(lambda line: self._wrote(kept, line)))
        self._tasks.add(lines)
        lines.add_done_callback(self._tasks.discard)
        try:
            kept.announced = await child.ready(self._ready_timeout_s)
        except ChildFailed as failure:
            child.send(signal.SIGKILL)
            await child.exited()
            await asyncio.wait({lines}, timeout=_LAST_LINES_S)  # they explain the failure
            raise ChildFailed(failure.name, failure.reason, tuple(kept.last_lines)) from None
        self._list_workers()
        kept.again.set()
        self._observe(Serving(kept.spec.name, time.monotonic() - born))
        return kept.announced

    def _list_workers(self) -> None:
        """Write the workers that serve, successors included, to the file that gateways read."""
        announced = [kept.announced for kept in self._kept.values() if kept.announced is not None]
        self.workers.write([record for one in announced for record in records_of(one)])

    def _wrote(self, kept: _Kept, line: str) -> None:
        kept.last_lines.append(line)
        self._observe(Wrote(kept.spec.name, line))

    async def _end(self, kept: Sequence[_Kept]) -> None:
        living: list[Child] = []
        for one in kept:
            if one.child is not None and one.child.alive:
                living.append(one.child)
                # What does not serve yet has nothing to finish, and may be deaf while it loads a model.
                one.child.send(signal.SIGTERM if one.announced is not None else signal.SIGKILL)
        if not living:
            return
        ends = [asyncio.ensure_future(child.exited()) for child in living]
        _, late = await asyncio.wait(ends, timeout=self._grace_s)
        for child in living:
            child.send(signal.SIGKILL)
        if late:
            await asyncio.wait(late)


def _weight_holder() -> WeightHolder | None:
    """Return the holder of packed weights, which keeps them while no worker is up; None where none can be."""
    try:
        return WeightHolder(f"diptych-weights-{secrets.token_hex(16)}")
    except OSError:  # no abstract sockets here: workers find each other, or have their own
        return None


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    pending = list(tasks)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
