"""Actor of one program: it supervises the program on its node, as `diptych up` does on one machine.

A program that ends is started again by its actor, with the delays, probes and role changes of the
supervisor. An actor or a node that dies takes the program with it, and Ray starts the actor again, on another
node where the first is lost: its constructor starts the program. Nothing here needs Ray itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diptych.cli.child import ChildFailed, ChildSpec
from diptych.cli.preflight import BadOptions
from diptych.cli.process_events import Event, Loading, Wrote
from diptych.cli.restart_policy import RestartPolicy
from diptych.cli.stack import SharedSecrets, program_specs
from diptych.cli.stack_options import LOOPBACK, StackOptions
from diptych.cli.supervisor import Running, Supervisor
from diptych.cli.up import fetch_models

GATEWAY = "gateway"
_EVERYWHERE = ("0.0.0.0", "::")
_REPORT_S = 20.0


@dataclass(frozen=True)
class ProgramStart:
    """Values that start one program of a system; its node makes the specification, with its own paths."""

    name: str
    options: StackOptions
    shared: SharedSecrets
    one_machine: bool
    environment: Mapping[str, str] = field(repr=False)
    """Variables of the command that a program beside it would inherit: DIPTYCH_… and OTEL_…"""
    ready_timeout_s: float = 300.0
    grace_s: float = 10.0

    def host(self, ip: str) -> str:
        """Return the address under which others reach the program on a node with address `ip`."""
        if self.name != GATEWAY:
            return LOOPBACK if self.one_machine else ip
        if self.options.host not in _EVERYWHERE:
            return self.options.host
        return LOOPBACK if self.one_machine else ip

    def spec(self, ip: str) -> ChildSpec:
        """Return the specification of the program on a node with this address."""
        host = LOOPBACK if self.one_machine else ip
        specs = program_specs(self.options, self.shared, cores=1, worker_host=host)
        spec = next(one for one in specs if one.name == self.name)
        return replace(spec, env={**self.environment, **spec.env})


@dataclass(frozen=True)
class Report:
    """State of an actor's program. `number` grows with every change, `host` is where others reach it, and
    `failure` is why it does not start.
    """

    number: int
    host: str
    running: Running | None
    failure: str = ""
    last_lines: tuple[str, ...] = ()


class ProgramActor:
    """Supervisor of one program. What the program writes is the actor's own output, which Ray keeps.

    `ip` returns the address of the node on which the actor runs.
    """

    def __init__(self, start: ProgramStart, ip: str | None = None) -> None:
        self._start = start
        self._ip = node_address() if ip is None else ip
        self._number = 0
        self._failed: ChildFailed | None = None
        self._changed = asyncio.Condition()
        self._events: set[asyncio.Task[None]] = set()
        # The parent-death signal follows this thread, that of the loop, which lives as long as the actor.
        self._supervisor = Supervisor(
            self._observe, ready_timeout_s=start.ready_timeout_s, grace_s=start.grace_s
        )
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def __repr__(self) -> str:
        return self._start.name  # Ray shows it before each line of the actor

    async def report(self, seen: int) -> Report:
        """Return the state once it is another one than that with number `seen`, or after a while."""
        try:
            async with asyncio.timeout(_REPORT_S), self._changed:
                await self._changed.wait_for(lambda: self._number != seen)
        except TimeoutError:
            pass
        failed = self._failed
        return Report(
            self._number,
            self._start.host(self._ip),
            next(iter(self._supervisor.running()), None),
            "" if failed is None else failed.reason,
            () if failed is None else failed.last_lines,
        )

    async def stop(self) -> None:
        """End the program: SIGTERM, a grace period, SIGKILL."""
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        await self._supervisor.stop()

    async def _keep(self) -> None:
        """Start the program, again after a while where it says itself that it cannot: a node may be late."""
        failures = 0
        while True:
            try:
                await asyncio.to_thread(fetch_models, self._start.options)
                await self._supervisor.start([self._start.spec(self._ip)], serves_without=_always)
            except BadOptions as error:
                self._failed = ChildFailed(self._start.name, f"cannot start: {error}")
            except ChildFailed as failure:
                self._failed = failure
            else:
                self._failed = None
                return
            failures += 1
            self._note()
            await asyncio.sleep(RestartPolicy().delay_s(failures))

    def _observe(self, event: Event) -> None:
        if isinstance(event, Wrote):
            print(event.line, flush=True)
            return
        if not isinstance(event, Loading):
            print(event, flush=True)
        self._note()

    def _note(self) -> None:
        """Let `report` return, once the supervisor's own record of an event is complete."""

        async def notify() -> None:
            async with self._changed:
                self._number += 1
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._events.add(task)
        task.add_done_callback(self._events.discard)


async def _always(_: ChildSpec) -> bool:
    return True


def node_address() -> str:
    """Return the address of the node of the cluster on which this process runs."""
    import ray.util

    address: str = ray.util.get_node_ip_address()
    return address
