"""Programs of a system on a cluster, as the command sees them: what each actor reports, and their end.

A report that fails means that the actor, or its node, is gone: Ray starts it again, and it is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diptych.cli.child import ChildFailed
from diptych.cli.process_events import Ended, Event, Loading, Serving
from diptych.cli.ray_cluster.actor import GATEWAY, ProgramStart, Report
from diptych.cli.ray_cluster.cluster import RayCluster
from diptych.cli.ray_cluster.placement import Placement
from diptych.cli.supervisor import Running, Supervisor

_ASK_AGAIN_S = 0.5
_STOP_S = 5.0  # for an actor's answer, beyond the grace period of its program


class RayPrograms:
    """The actors of a system. `beside` has what runs next to the command itself; `changed` is called whenever
    a program comes or goes.
    """

    def __init__(
        self,
        cluster: RayCluster,
        beside: Supervisor,
        observe: Callable[[Event], None],
        changed: Callable[[], None],
        *,
        grace_s: float,
    ) -> None:
        self._cluster = cluster
        self._beside = beside
        self._observe = observe
        self._changed = changed
        self._grace_s = grace_s
        self._actors: dict[str, Any] = {}
        self._reports: dict[str, Report] = {}
        self._since: dict[str, float] = {}
        self._reported = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []

    async def start(
        self, placement: Placement, starts: Mapping[str, ProgramStart], ready_timeout_s: float
    ) -> None:
        """Start all programs and wait until they serve. Raises ChildFailed for the first that cannot."""
        self._actors[GATEWAY] = self._cluster.start_alone(starts[GATEWAY], stays=placement.gateway_stays)
        for group in placement.groups:
            self._actors |= self._cluster.start_group(group, starts)
        for name in self._actors:
            self._lose(name)
        self._watches = [
            asyncio.create_task(self._watch(name), name=f"watch {name}") for name in self._actors
        ]
        deadline = time.monotonic() + ready_timeout_s
        while waiting := [name for name in self._actors if not self._serves(name)]:
            for name, report in self._reports.items():
                if report.failure:
                    raise ChildFailed(name, report.failure, report.last_lines)
            for watch in self._watches:
                if watch.done():
                    watch.result()  # raises what ended it
            if time.monotonic() > deadline:
                silent = [name for name in waiting if name not in self._reports]
                why = "found no room in the cluster" if silent else "was not ready"
                raise ChildFailed((silent or waiting)[0], f"{why} after {ready_timeout_s:.0f} s")
            self._reported.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reported.wait(), timeout=1.0)

    def running(self) -> list[Running]:
        """Return the processes here and those of the actors; one whose actor is lost has no process."""
        known = [
            report.running
            for name in self._actors
            if (report := self._reports.get(name)) is not None and report.running is not None
        ]
        lost = [
            Running(name, name.rpartition("-")[0] or name, None, None, 0)
            for name in self._actors
            if name not in self._reports
        ]
        return [*self._beside.running(), *known, *lost]

    def gateway(self) -> Report:
        """Return the report of the gateway, which serves."""
        return self._reports[GATEWAY]

    def addresses(self) -> list[tuple[Running, str]]:
        """Return each program that serves, with the address under which others reach it."""
        return [
            (report.running, report.host)
            for report in self._reports.values()
            if report.running is not None and report.running.announced is not None
        ]

    def kill(self) -> None:
        """End every program at once, without grace. `stop` is still to be awaited."""
        for actor in self._actors.values():
            self._cluster.kill(actor)

    async def stop(self, roles: Sequence[str] = ()) -> None:
        """End every program, those of `roles` first, one role after the other; then what runs here."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        try:
            for role in roles:
                await self._end([name for name in self._actors if self._role(name) == role])
            await self._end(list(self._actors))
            self._cluster.remove_groups()
        finally:
            await self._beside.stop(roles)

    def _role(self, name: str) -> str:
        report = self._reports.get(name)
        return "" if report is None or report.running is None else report.running.role

    async def _end(self, names: Sequence[str]) -> None:
        """End actors: by their own `stop` where they answer, in any case for good."""
        actors = {name: self._actors[name] for name in names}
        asked = [actor.stop.remote() for name, actor in actors.items() if name in self._reports]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s + _STOP_S):
                await asyncio.gather(*asked, return_exceptions=True)
        for name, actor in actors.items():
            self._cluster.kill(actor)
            del self._actors[name]

    async def _watch(self, name: str) -> None:
        from ray.exceptions import RayError

        seen = -1
        while True:
            try:
                report: Report = await self._actors[name].report.remote(seen)
            except RayError as error:
                if name in self._reports:
                    self._observe(Ended(name, f"lost its actor ({type(error).__name__})", 0.0))
                    self._lose(name)
                    self._changed()
                seen = -1
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            seen = report.number
            self._take(name, report)

    def _take(self, name: str, report: Report) -> None:
        served = self._serves(name)
        self._reports[name] = report
        if self._serves(name) != served:
            if served:
                self._observe(Ended(name, "ended; its actor starts it", 0.0))
                self._since[name] = time.monotonic()
            else:
                self._observe(Serving(name, time.monotonic() - self._since[name]))
            self._changed()
        self._reported.set()

    def _serves(self, name: str) -> bool:
        report = self._reports.get(name)
        return report is not None and report.running is not None and report.running.announced is not None

    def _lose(self, name: str) -> None:
        self._reports.pop(name, None)
        self._since[name] = time.monotonic()
        self._observe(Loading(name))
