"""The simulated machines: real programs on hosts that start, die and are restarted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from decode_worker.config import DecodeSettings
from decode_worker.worker import DecodeWorker
from diptych.engine.batch import SequenceStep
from diptych.runtime.role_change import role_asked_by
from diptych.runtime.settings import resolve_model
from diptych.runtime.telemetry import Telemetry
from gateway.access.access import DEFAULT_TENANT, Access
from gateway.call import Calls
from gateway.config import GatewaySettings
from gateway.model.served_model import ServedModel
from gateway.program import Gateway
from gateway.served_models.loading import LoadedModel
from prefill_worker.config import PrefillSettings
from prefill_worker.encoder.config import EncodeSettings
from prefill_worker.encoder.worker import EncodeWorker
from prefill_worker.worker import PrefillWorker
from tests.simulation import model
from tests.simulation.in_place import SharedPools
from tests.simulation.kv_cells import CELL_FINGERPRINT, CELL_LAYOUT, CellRunner
from tests.simulation.network import Network
from tests.simulation.ranks import SimulatedGroup
from tests.simulation.row_regions import RegionSockets
from tests.simulation.scenario import GroupShape, Scenario
from tests.simulation.share_checks import ShareChecks
from tests.simulation.share_group import GroupModel, GroupRunner, ShareGroup
from tests.simulation.sockets import Sockets
from tests.simulation.store import Store
from tests.simulation.tiers import Folder
from tests.simulation.virtual_loop import Host, VirtualLoop, current_host
from tests.simulation.virtual_threads import VirtualThreads
from tests.simulation.watched_pool import (
    WatchedPool,
    check_granted_write,
    check_own_write,
    check_pool,
    is_granted,
)

RESTART_S = 0.4
EARLY_SHARE = 0.3
"""Share of steps that write to memory long before the loop is notified; the others write at their end."""


@cache
def served_model() -> ServedModel:
    """Return the bundled model's tokenizer and card; its weights are not used."""
    return ServedModel.load(resolve_model("bundled"))


@cache
def _settings() -> tuple[GatewaySettings, PrefillSettings, DecodeSettings, EncodeSettings]:
    common: dict[str, Any] = {"secret": "ab" * 32, "model": str(resolve_model("bundled"))}
    worker = {
        **common,
        "block_size": model.BLOCK_SIZE,
        "worker_shutdown_timeout": 0.3,
        "role_changes": "cpu",
    }
    return (
        GatewaySettings(**common, admin_port=0, shutdown_timeout=1.0),
        PrefillSettings(**worker),
        DecodeSettings(**worker),
        EncodeSettings(**worker),
    )


@dataclass
class Machine:
    """The program on one host, and its pools."""

    host: Host
    role: str
    program: Any = None
    stop: asyncio.Event | None = None
    calls: Calls | None = None
    pool: WatchedPool | None = None
    ranks: SimulatedGroup | ShareGroup | None = None
    runner: model.SimulatedRunner | None = None
    scratch: list[WatchedPool] = field(default_factory=list)

    @property
    def receiver(self) -> Any:
        """The KV receiver of a decode worker."""
        return self.program._handoff._receiver

    def owns(self, sequence: SequenceStep) -> bool:
        """Return whether a step writes to the memory of this decode worker, which is alive."""
        alive = self.pool is not None and not self.host.dead and self.program is not None
        return alive and self.program._loop._pipeline._memory is sequence.memory


ENDED = "it ended"


async def _wake() -> None:
    """Wake the loop of a process, as a signal does."""


class Cluster:
    """The machines, the network and the stores of one run."""

    def __init__(
        self, scenario: Scenario, note: Callable[..., None], report_violation: Callable[[str], None]
    ) -> None:
        self.scenario = scenario
        self.note = note
        self.report_violation = report_violation
        self.loop = VirtualLoop(self._after_event, self.failed)
        self.loop.run_on_thread = self._compute
        self.network = Network(self.loop, scenario.network, note)
        self.network.failed = self.failed
        self.sockets = Sockets(self.network)
        self.threads = VirtualThreads(self.loop, scenario.network, self.failed)
        self.loop.streams = self.sockets
        self.shared_pools = SharedPools(self.loop, self.kill)
        self.row_regions = RegionSockets(scenario.network)
        self.store = Store(self.loop)
        self.folder = Folder()
        self.machines: dict[str, Machine] = {}
        # By name, else by its first letter.
        self.roles = {"g": "gateway", "p": "prefill", "d": "decode", "e": "encode"}
        self.hosts: list[Host] = []
        self.restarting = 0
        self.deaths_by_poison = 0
        self.shares = ShareChecks(self)
        self._random = random.Random(f"cluster {scenario.network}")
        self._memory_of: dict[int, Machine] = {}

    # ---- life and death ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every program of the scenario."""
        for name in self.scenario.processes:
            self.boot(name)

    def boot(self, name: str) -> None:
        """Start the program of that name on a new host."""
        host = Host(name, len(self.hosts) + 1, self._random.uniform(0, 1000))
        if self.scenario.network % 3:  # else it keeps its id, as where an operator chose that
            host.worker_id = f"{name}-{host.incarnation}"
        self.hosts.append(host)
        role = self.roles.get(name) or self.roles[name[0]]
        self.machines[name] = machine = Machine(host, role)
        run = {
            "gateway": self._gateway,
            "prefill": self._prefill,
            "decode": self._decode,
            "encode": self._encode,
        }[role]
        self.loop.start(host, lambda: self._life(machine, run))

    async def _life(self, machine: Machine, run: Callable[[Machine], Any]) -> None:
        try:
            status = await run(machine)
        except Exception as error:
            self.report_violation(f"{machine.host} ended with {error!r}")
            raise
        if (becomes := role_asked_by(status)) is not None:  # the supervisor starts it so from now on
            self.note(machine.host.name, "becomes", becomes)
            self.roles[machine.host.name] = becomes
        elif status:
            self.report_violation(f"{machine.host} ended with status {status}")
        self.loop.call_soon(self.kill, machine.host, ENDED)

    def kill(self, host: Host, why: str) -> None:
        """Kill a host as SIGKILL does: no callback of it runs again. Its supervisor starts another one, but
        for a rank: rank 0 goes with it.
        """
        if host.dead:
            return
        host.dead = True
        host.held.clear()
        self.note(host.name, "dies", why)
        self.network.servers = {a: s for a, s in self.network.servers.items() if s.host is not host}
        for callback in host.on_death:
            callback()
        if "/" in host.name:
            return
        if (partner := self.partner(host)) is not None:
            self.drain(partner) if why == ENDED else self.kill(partner.host, f"with {host.name}: {why}")
        self.restarting += 1
        self.outside(RESTART_S * self._random.uniform(0.3, 2.0), self._restart, host.name)

    def leave_rank(self, status: int = 0) -> None:
        """End the rank whose thread runs, as its program does; its rank 0 sees it."""
        host = current_host.get()
        if host is not None:
            self.kill(host, f"it left with status {status}")
        self.threads.stay()

    def partner(self, host: Host) -> Machine | None:
        """Return the other worker of a process that hosts two, if it is alive."""
        role, number = host.name[0], host.name[1:]
        other = {"p": "d", "d": "p"}.get(role)
        if not self.scenario.hosted or other is None or "/" in host.name:
            return None
        return self.alive(other + number)

    def drain(self, machine: Machine) -> None:
        """Send SIGTERM."""
        if machine.stop is not None:
            machine.stop.set()
            self.loop.start(machine.host, _wake)

    def _restart(self, name: str) -> None:
        self.restarting -= 1
        self.note(name, "starts again")
        self.boot(name)

    def chance(self) -> float:
        """Return a number of [0, 1), by the scenario's seed."""
        return self._random.random()

    def outside(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        token = current_host.set(None)
        self.loop.call_later(delay, callback, *args)
        current_host.reset(token)

    def _replaced_by(self, host: Host) -> str:
        """Return the dead workers that a supervisor names to their replacement."""
        ids = [h.worker_id for h in self.hosts if h.dead and h.name == host.name]
        return ",".join(one for one in ids if one != host.worker_id)

    def port_of(self, host: Host) -> int:
        """Return the port of a host; half of the restarted programs get that of the one before."""
        names = self.scenario.processes
        moved = host.incarnation if host.incarnation > len(names) and host.incarnation % 2 else 0
        return 1000 + names.index(host.name) + 100 * moved

    def process(self, name: str) -> Host | None:
        """Return the process of that name, a worker's rank 0 or another rank (`p0/1`), if it is alive."""
        worker, _, rank = name.partition("/")
        machine = self.alive(worker)
        if machine is None or not rank:
            return None if machine is None else machine.host
        hosts = [] if machine.ranks is None else machine.ranks.hosts
        return next((host for host in hosts if host.name == name and not host.dead), None)

    def alive(self, name: str) -> Machine | None:
        machine = self.machines.get(name)
        return machine if machine is not None and not machine.host.dead else None

    # ---- programs ------------------------------------------------------------------------------------

    async def _gateway(self, machine: Machine) -> int:
        settings = _settings()[0].model_copy(
            update={
                "worker_id": machine.host.name,
                "max_inflight": self.scenario.max_inflight,
                "max_queued_tokens": self.scenario.max_queued_tokens,
                "worker_wait_timeout": 4.0,
                "local_prefill": self.scenario.local_prefill,
            }
        )
        gateway = Gateway(settings, [LoadedModel(served_model(), model.DIGEST)])
        if self.scenario.network % 2:  # predicts short outputs: more requests are admitted than memory holds
            gateway.models.first.gate.queue.kv.learn(DEFAULT_TENANT, 1)
        machine.stop = asyncio.Event()
        await gateway.start()
        machine.calls = Calls(gateway.telemetry, gateway.metrics, self.loop.time, Access(None))
        machine.program = gateway
        await machine.stop.wait()
        await gateway.drain()
        await gateway.close()
        return 0

    async def _prefill(self, machine: Machine) -> int:
        settings = _settings()[1].model_copy(
            update={
                "worker_id": machine.host.worker_id,
                "replaces": self._replaced_by(machine.host),
                "max_loras": self.scenario.max_loras,
                "prefill_chunk": self.scenario.chunk,
                "max_batch_requests": 6,
                "scratch_blocks": max(d.blocks for d in self.scenario.decodes) + 4,
            }
        )
        telemetry = Telemetry.start("prefill", machine.host.name)
        engine = self._engine(machine, **model.image_parts(self.scenario.own_encoders, self.scenario.grouped))
        machine.program = PrefillWorker(settings, engine, telemetry)  # type: ignore[arg-type]
        machine.stop = asyncio.Event()
        return await machine.program.run(machine.stop)  # type: ignore[no-any-return]

    async def _decode(self, machine: Machine) -> int:
        shape = self.scenario.decodes[int(machine.host.name[1:]) % len(self.scenario.decodes)]
        settings = _settings()[2].model_copy(
            update={
                "worker_id": machine.host.worker_id,
                "replaces": self._replaced_by(machine.host),
                "max_loras": self.scenario.max_loras,
                "kv_blocks": shape.blocks,
                "max_batch": shape.max_batch,
                "transport": shape.transport,
                "max_local_prefill_tokens": self.scenario.local_bounds[0],
                "max_fallback_prefill_tokens": self.scenario.local_bounds[1],
                "local_prefill_chunk": max(self.scenario.chunk // 2, 1),
                "speculative_tokens": 3 * (self.scenario.network % 5 < 2 and not self.scenario.recurrent),
            }
        )
        telemetry = Telemetry.start("decode", machine.host.name)
        engine = self._engine(machine)
        machine.program = DecodeWorker(settings, engine, telemetry)  # type: ignore[arg-type]
        machine.stop = asyncio.Event()
        return await machine.program.run(machine.stop)  # type: ignore[no-any-return]

    async def _encode(self, machine: Machine) -> int:
        settings = _settings()[3].model_copy(
            update={
                "worker_id": machine.host.worker_id,
                "replaces": self._replaced_by(machine.host),
                "image_cache_mib": self.scenario.network % 2,
            }
        )
        telemetry = Telemetry.start("encode", machine.host.name)
        machine.program = EncodeWorker(settings, model.encode_engine(), telemetry)
        machine.stop = asyncio.Event()
        return await machine.program.run(machine.stop)  # type: ignore[no-any-return]

    def _engine(self, machine: Machine, **parts: Any) -> model.SimulatedEngine:
        """Return the engine of a worker, with these `parts` beside those of all."""

        def poisoned() -> None:
            # A worker that drains does not count, here as in the gateway: it was leaving.
            self.deaths_by_poison += not (machine.stop is not None and machine.stop.is_set())
            self.kill(machine.host, "poison")

        if self.scenario.groups:
            return self._dealt_engine(machine, poisoned, **parts)
        count = self.scenario.ranks.get(machine.role, 1)
        if count > 1:
            machine.ranks = SimulatedGroup(self, machine, count)
        machine.runner = model.SimulatedRunner(
            partial(self.check_write, machine), poisoned, mixes_chunks=self.scenario.mixed_steps, ranks=count
        )
        laid: dict[str, Any] = {}
        if self.scenario.window:
            laid = {"layout": model.WINDOW_LAYOUT, "fingerprint": model.WINDOW_FINGERPRINT}
        if self.scenario.recurrent:
            laid = {"layout": model.STATE_LAYOUT, "fingerprint": model.STATE_FINGERPRINT}
        return model.SimulatedEngine(machine.runner, group=machine.ranks, **laid, **parts)

    def _dealt_engine(
        self, machine: Machine, poisoned: Callable[[], None], **parts: Any
    ) -> model.SimulatedEngine:
        """Return the engine of a worker of the model that is dealt to ranks."""
        shape = self.scenario.groups.get(machine.role, GroupShape(1))
        runner = CellRunner if shape.size == 1 else GroupRunner
        machine.runner = runner(
            partial(self.check_write, machine), poisoned, mixes_chunks=self.scenario.mixed_steps
        )
        if isinstance(machine.runner, GroupRunner):
            machine.ranks = machine.runner.group = ShareGroup(self, machine, shape)
            parts["model"] = GroupModel(group=machine.ranks)
        return model.SimulatedEngine(
            machine.runner,
            group=machine.ranks,
            layout=CELL_LAYOUT,
            fingerprint=CELL_FINGERPRINT,
            **parts,
        )

    # ---- pools ---------------------------------------------------------------------------------------

    def decode_pool(self, num_blocks: int) -> WatchedPool:
        """Stand in for a decode worker's `BlockPool`."""
        machine = self.here()
        machine.pool = WatchedPool(num_blocks)
        return machine.pool

    def scratch_pool(self, num_blocks: int) -> WatchedPool:
        """Stand in for a prefill worker's `BlockPool`."""
        pool = WatchedPool(num_blocks)
        self.here().scratch.append(pool)
        return pool

    def here(self) -> Machine:
        """Return the machine whose callback runs."""
        host = current_host.get()
        return next(m for m in self.machines.values() if m.host is host)

    # ---- the engine's thread -------------------------------------------------------------------------

    def _compute(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Run a step for its duration; it writes at its beginning or at its very end."""
        host, loop = current_host.get(), self.loop
        machine = next((m for m in self.machines.values() if m.host is host), None)
        if machine is not None and isinstance(machine.ranks, ShareGroup):
            duration = self._step_s(host, len(args[0]) if args else 1)
            return machine.ranks.run(executor is not None, partial(func, *args), duration)  # type: ignore[no-any-return]
        done = loop.create_future()
        if executor is None:  # asyncio.to_thread
            loop.call_later(0.001, lambda: done.cancelled() or done.set_result(func(*args)))
            return done
        duration = self._step_s(host, len(args[0]) if args else 1)
        if machine is not None and machine.ranks is not None and machine.runner is not None:
            self._compute_in_ranks(machine.ranks, machine.runner, duration, done, lambda: func(*args))
            return done
        early = self._random.random() < EARLY_SHARE
        computed = [func(*args)] if early else []

        def finish() -> None:
            result = computed[0] if computed else func(*args)
            if not done.cancelled() and (host is None or not host.dead):
                done.set_result(result)

        loop.call_later(duration, finish)
        return done

    def _step_s(self, host: Host | None, rows: int) -> float:
        """Return the duration of a step."""
        slowness = 1.0 if host is None else host.slowness
        return self.scenario.step_s * slowness * (0.7 + 0.1 * rows) * self._random.uniform(0.8, 1.3)

    def _compute_in_ranks(
        self,
        group: SimulatedGroup,
        runner: model.SimulatedRunner,
        duration: float,
        done: asyncio.Future[Any],
        compute: Callable[[], Any],
    ) -> None:
        """Run a step of a group: what each rank writes is known now, and written when it gets to it."""
        result = compute()
        writes = runner.take_writes() or [lambda: None] * group.size
        group.write(writes, duration, lambda: done.cancelled() or done.set_result(result))

    # ---- checks --------------------------------------------------------------------------------------

    def failed(self, context: dict[str, Any]) -> None:
        """Report an unexpected exception."""
        error = context.get("exception")
        self.report_violation(f"{context['message']}: {error!r}")

    def _after_event(self, host: Host | None) -> None:
        machine = self.machines.get(host.name) if host is not None else None
        if machine is None or machine.host is not host or machine.program is None:
            return
        try:
            if machine.pool is not None and machine.pool.changed:
                check_pool(machine.pool, machine.receiver)
            for pool in machine.scratch:
                if pool.changed:
                    check_pool(pool, None)
        except Exception as error:
            self.report_violation(f"{host}: {error}")

    def check_write(self, machine: Machine, sequence: SequenceStep) -> None:
        try:
            if machine.pool is not None:
                if machine.host.dead:
                    return  # a rank that outlives its rank 0 writes to blocks that nobody reads any more
                if is_granted(machine.receiver, machine.host, sequence):
                    return  # a prompt that this worker computes itself
                check_own_write(machine.pool, sequence)
                return
            for other in self.machines.values():
                if other.owns(sequence):
                    check_granted_write(other.receiver, machine.host, sequence)
        except Exception as error:
            self.report_violation(f"{machine.host}: {error}")

    def leftovers(self) -> list[str]:
        """Return the resources that are still held although no request is live."""
        found = []
        for name, machine in self.machines.items():
            program = machine.program
            if (
                machine.host.dead
                or machine.host.stopped
                or (machine.ranks is not None and machine.ranks.hangs)
                or program is None
                or (machine.role == "decode" and machine.pool is None)
            ):
                continue
            if machine.role == "gateway":
                queue = program.models.first.gate.queue
                counts = {
                    "live requests": len(program.live),
                    "running": queue.running,
                    "waiting": queue.waiting,
                    "waiting tokens": queue.waiting_tokens,
                }
            else:
                loop = program._loop
                counts = {"requests": loop.num_running + loop.num_waiting}
                for pool in [machine.pool] if machine.pool is not None else machine.scratch:
                    counts["held or quarantined blocks"] = pool.total - pool.available()
                if isinstance(machine.ranks, ShareGroup):
                    counts["kept shares"] = machine.ranks.kept_shares
                if self.scenario.groups and machine.pool is not None:
                    counts["sessions that lack a connection"] = self.shares.lame_sessions(machine)
                if machine.pool is not None:
                    counts["grants"] = program._handoff.stats().grants
            found += [f"{name}: {count} {what}" for what, count in counts.items() if count]
        return found

    def close(self) -> None:
        self.loop.close()
        self.threads.close()
