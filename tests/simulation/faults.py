"""The faults: the effect of each kind on the cluster."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from diptych.runtime.errors import RoleChangeRefused
from tests.simulation.cluster import Cluster, Machine
from tests.simulation.network import LinkConditions
from tests.simulation.scenario import Fault
from tests.simulation.silence import fall_silent
from tests.simulation.sockets import Damage
from tests.simulation.store import LATENCY_S

SLOWNESS = 12.0
DELAY_S = 0.15
STORE_SLOW_S = 0.2
_SILENCING = frozenset({"stop", "partition", "silence"})
_CUTTING = frozenset({"hang", "reset"})


class Faults:
    """The faults of a run; `done` are those that had an effect."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.done: list[Fault] = []

    @property
    def silences(self) -> int:
        """Faults after which a gateway may take a live worker for dead, until its link is back."""
        return sum(f.kind in _CUTTING or (f.kind in _SILENCING and f.lasts_s >= 1.0) for f in self.done)

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            self._cluster.loop.call_later(fault.at, self._apply, fault)

    def _apply(self, fault: Fault) -> None:
        self._cluster.note("fault", str(fault))
        applied = getattr(self, f"_{fault.kind}")(fault)
        if applied is not False:
            self.done.append(fault)

    # ---- processes

    def _kill(self, fault: Fault) -> bool:
        host = self._cluster.process(fault.target[0])
        if host is None:
            return False
        self._cluster.kill(host, "killed")
        return True

    def _stop(self, fault: Fault) -> bool:
        host, loop = self._cluster.process(fault.target[0]), self._cluster.loop
        if host is None or host.stopped:
            return False
        partner = self._cluster.partner(host)
        hosts = [host] if partner is None else [host, partner.host]
        for one in hosts:
            one.stopped = True

        def go_on() -> None:
            for one in hosts:
                if not one.dead:
                    self._cluster.note(one.name, "goes on")
                    loop.resume(one, network_first=fault.at * 1000 % 2 < 1)

        loop.call_later(fault.lasts_s, go_on)
        return True

    def _hang(self, fault: Fault) -> bool:
        """Stop a process for good; a peer that waits for its end has to fence it."""
        host = self._cluster.process(fault.target[0])
        if host is None or host.stopped:
            return False
        host.stopped = True
        return True

    def _slow(self, fault: Fault) -> bool:
        machine = self._cluster.alive(fault.target[0])
        if machine is None:
            return False
        host = machine.host
        host.slowness = SLOWNESS
        self._cluster.loop.call_later(fault.lasts_s, setattr, host, "slowness", 1.0)
        return True

    def _drain(self, fault: Fault) -> bool:
        """Send SIGTERM."""
        machine = self._cluster.alive(fault.target[0])
        if machine is None or machine.stop is None or machine.host.stopped:
            return False
        for one in (machine, self._cluster.partner(machine.host)):
            if one is not None:
                self._cluster.drain(one)
        return True

    def _role(self, fault: Fault) -> bool:
        """Let a gateway order a worker to change its role, as an operator does."""
        machine = self._cluster.alive(fault.target[0])
        gateway = self._cluster.alive("g0")
        if machine is None or gateway is None or gateway.program is None or gateway.host.stopped:
            return False
        self._cluster.loop.start(gateway.host, lambda: self._order(gateway, machine, fault))
        return False  # it counts once it was ordered

    async def _order(self, gateway: Machine, machine: Machine, fault: Fault) -> None:
        try:
            await gateway.program.models.first.roles.change(machine.host.worker_id)
        except RoleChangeRefused as refused:
            self._cluster.note("refused", refused)
        else:
            self.done.append(fault)

    def _flush_cache(self, fault: Fault) -> bool:
        """Flush the prefix cache of every worker, as an operator does."""
        for machine in list(self._cluster.machines.values()):
            if machine.pool is not None or machine.scratch or machine.role == "encode":
                self._on_host(machine, self._flush)
        return True

    def _distrust(self, fault: Fault) -> bool:
        """Let every decode worker distrust a cached prefix, as after a step that was not finite."""
        for machine in list(self._cluster.machines.values()):
            if machine.pool is not None:
                self._on_host(machine, self._forget)
        return True

    def _on_host(self, machine: Machine, act: Callable[[Machine], Coroutine[Any, Any, None]]) -> None:
        if not machine.host.dead and not machine.host.stopped and machine.program is not None:
            self._cluster.loop.start(machine.host, lambda: act(machine))

    async def _forget(self, machine: Machine) -> None:
        if machine.pool is not None:
            machine.pool.forget(machine.pool.cached_keys()[:1])
            machine.program._loop.requests.prefixes.report_changes()

    async def _flush(self, machine: Machine) -> None:
        loop = machine.program._loop
        (loop.flush if machine.role == "encode" else loop.flush_prefix_cache)()

    # ---- links

    def _reset(self, fault: Fault) -> bool:
        streams = self._cluster.network.between(*fault.target)
        for stream in streams:
            stream.reset()
        return bool(streams)

    def _lose_pair(self, fault: Fault) -> bool:
        """Break one data connection of all that there are between ranks, and no stream."""
        connections = self._cluster.sockets.open_connections()
        if connections:
            connections[fault.number % len(connections)].reset()
        return bool(connections)

    def _connected(self, fault: Fault) -> bool:
        one, other = fault.target
        if other.startswith(f"{one}/"):  # rank 0 and a rank of its group
            return self._cluster.process(other) is not None
        ends = (connection.ends for connection in self._cluster.sockets.open_connections())
        return set(fault.target) in map(set, ends) or bool(self._cluster.network.between(one, other))

    def _conditions_of(self, fault: Fault) -> list[LinkConditions]:
        one, other = fault.target
        conditions = self._cluster.network.conditions
        return [conditions.setdefault(ends, LinkConditions()) for ends in ((one, other), (other, one))]

    def _partition(self, fault: Fault) -> bool:
        for conditions in self._conditions_of(fault):
            conditions.held_until = max(conditions.held_until, self._cluster.loop.now + fault.lasts_s)
        return self._connected(fault)

    def _delay(self, fault: Fault) -> bool:
        for conditions in self._conditions_of(fault):
            conditions.extra_delay_s = DELAY_S
            self._cluster.loop.call_later(fault.lasts_s, setattr, conditions, "extra_delay_s", 0.0)
        return self._connected(fault)

    def _silence(self, fault: Fault) -> bool:
        """Let the machine of a worker or of a rank fall silent."""
        return fall_silent(self._cluster, fault.target[0], fault.lasts_s)

    def _repeat(self, fault: Fault) -> bool:
        for conditions in self._conditions_of(fault):
            conditions.repeat += fault.number
        return bool(self._cluster.network.between(*fault.target))

    # ---- data

    def _damage(self, fault: Fault) -> bool:
        prefill, decode = fault.target
        self._cluster.sockets.damage.setdefault((prefill, decode), []).append(
            Damage(fault.kind, fault.number)
        )
        if decode.startswith("e"):
            return not self._cluster.row_regions.one_host
        number = int(decode[1:].partition("/")[0])
        return self._cluster.scenario.decodes[number].transport == "tcp"

    _flip = _flip_header = _cut = _twice = _damage

    # ---- tiers

    def _tier_damage(self, fault: Fault) -> bool:
        return self._cluster.folder.damage(fault.kind.removeprefix("tier_"), fault.number)

    _tier_flip = _tier_cut = _tier_swap = _tier_vanish = _tier_damage

    def _tier_mode(self, fault: Fault) -> bool:
        folder, mode = self._cluster.folder, fault.kind.removeprefix("tier_")
        setattr(folder, mode, True)
        self._cluster.loop.call_later(fault.lasts_s, setattr, folder, mode, False)
        return bool(self._cluster.scenario.tiers)

    _tier_full = _tier_slow = _tier_mode

    # ---- Redis

    def _store_mode(self, fault: Fault) -> None:
        store = self._cluster.store
        store.mode = fault.kind.removeprefix("store_")
        self._cluster.loop.call_later(fault.lasts_s, setattr, store, "mode", "up")

    _store_down = _store_frozen = _store_mode

    def _store_slow(self, fault: Fault) -> None:
        store = self._cluster.store
        store.latency_s = STORE_SLOW_S
        self._cluster.loop.call_later(fault.lasts_s, setattr, store, "latency_s", LATENCY_S)

    def _store_flush(self, fault: Fault) -> None:
        self._cluster.store.flush()

    def _store_stale(self, fault: Fault) -> None:
        """Fail over to a replica that fell behind half a second ago."""
        self._cluster.store.remember()
        self._cluster.loop.call_later(0.5, self._cluster.store.fail_over)
