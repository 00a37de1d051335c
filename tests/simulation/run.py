"""A simulated run: a scenario in, an outcome out. The same scenario always gives the same trace."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gateway.session.choice_state as choice_state_module
from diptych.runtime.errors import DiptychError
from gateway.session.retry_policy import GiveUp, Retry, RetryContext
from tests.simulation.clients import Client
from tests.simulation.cluster import Cluster
from tests.simulation.faults import Faults
from tests.simulation.scenario import Scenario
from tests.simulation.stand_ins import installed_stand_ins
from tests.simulation.virtual_loop import Livelock

MAX_DEATHS = 2
"""Workers that may die under one request."""
LONGEST_S = 45.0
"""Virtual seconds of a run in which nothing hangs: a writer that does not stop is fenced after 30 s."""
LONGEST_HANG_S = 35.0
"""Virtual seconds that each process that hangs may add, and each machine that falls silent: a step is late
after 30 s, and an idle process that hangs is only met by the next request."""


@dataclass
class Outcome:
    """The outcome of a run; `violation` is the first invariant that was violated."""

    violation: str = ""
    trace: list[str] = field(default_factory=list)
    digest: str = ""
    events: int = 0
    messages: int = 0
    seconds: float = 0.0  # virtual
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    loaded: int = 0  # blocks that came from tiers
    damaged: int = 0  # entries of tiers that were found damaged
    shares: int = 0  # shares of blocks that ranks sent to ranks


class Run:
    """The state of one run."""

    def __init__(self, scenario: Scenario, *, keep_trace: bool) -> None:
        self.scenario = scenario
        self.outcome = Outcome()
        self._keep = keep_trace
        self._digest = hashlib.blake2b(digest_size=12)
        self.cluster = Cluster(scenario, self.note, self.report_violation)
        self.faults = Faults(self.cluster)
        self.clients = [Client(self.cluster, plan, self.report_violation) for plan in scenario.requests]
        self.verdicts: list[DiptychError] = []  # errors that the retry policy gave
        self.quarantined = False  # whether some request seemed to have killed two workers

    def note(self, *what: Any) -> None:
        line = f"{self.cluster.loop.now:.6f} " + " ".join(map(str, what))
        self._digest.update(line.encode())
        if self._keep:
            self.outcome.trace.append(line)

    def report_violation(self, what: str) -> None:
        if self.cluster.loop.is_closed():
            return  # a coroutine that the collector ends after the run
        if not self.outcome.violation:
            self.outcome.violation = what
            self.note("VIOLATION", what)
            self.cluster.loop.halted = True

    def record_verdict(self, rule: str, args: tuple[Any, ...], verdict: Any) -> None:
        """Record the verdict of a rule of the retry policy."""
        error = verdict.error if isinstance(verdict, GiveUp) else verdict
        if isinstance(error, DiptychError):
            self.verdicts.append(error)
        if isinstance(verdict, Retry):
            self.outcome.retries[args[0].value] += 1
            self.quarantined |= not verdict.confirmed_safe
        if rule == "quarantined":
            self.quarantined |= verdict
        if any(isinstance(arg, RetryContext) and arg.deaths - arg.unconfirmed > MAX_DEATHS for arg in args):
            self.report_violation(f"a request met its death number {MAX_DEATHS + 1}")

    def run(self) -> Outcome:
        try:
            with installed_stand_ins(self.cluster), _recording(self):
                self._run()
        except Livelock:
            self.outcome.violation = self.outcome.violation or "callbacks follow one another for ever"
        self._account()
        return self.outcome

    def _run(self) -> None:
        cluster, loop = self.cluster, self.cluster.loop
        cluster.start()
        self.faults.schedule(self.scenario.faults)
        for client in self.clients:
            loop.call_later(client.plan.at, client.start)
        last = max([f.at + f.lasts_s for f in self.scenario.faults] + [0.0])
        hangs = sum(fault.kind in ("hang", "silence") for fault in self.scenario.faults)
        longest = LONGEST_S + LONGEST_HANG_S * hangs
        if not loop.run(until=longest, over=lambda: loop.now > last and self._quiet()):
            if not self.outcome.violation:
                self.report_violation("forgotten: " + "; ".join(self._unfinished()))
            return
        if self.cluster.deaths_by_poison > MAX_DEATHS:
            self.report_violation(f"one request killed {self.cluster.deaths_by_poison} workers")
        for client in self.clients:
            self._check_end(client)

    def _quiet(self) -> bool:
        return not (self.cluster.restarting or self._waiting() or self.cluster.leftovers())

    def _waiting(self) -> bool:
        return any(not client.end for client in self.clients)

    def _unfinished(self) -> list[str]:
        return [c.plan.name for c in self.clients if not c.end] + self.cluster.leftovers()

    def _check_end(self, client: Client) -> None:
        """Check that a request was lost only by a verdict of the retry policy, for a cause that existed."""
        error, end = client.error, client.end
        if error is None:
            if end == "gateway lost" and not self._died(f"g{client.plan.gateway}"):
                self.report_violation(f"{client.plan.name}: its gateway was lost, but never died")
            return
        given_up = any(known is error or known is error.__cause__ for known in self.verdicts)
        if end == "INTERNAL":
            # Two workers must have died, or been unreachable for longer than any request waits.
            lost = sum(host.dead for host in self.cluster.hosts) + self.faults.silences
            given_up = (given_up or self.quarantined) and lost >= MAX_DEATHS
        if end in _VERDICTS and not given_up:
            self.report_violation(f"{client.plan.name} ended with {end}, which the retry policy did not give")
        if end not in _LEGAL:
            self.report_violation(f"{client.plan.name} ended with {end}: {error}")
        # A change of role is no excuse: it must cost no request.
        wrong = [fault for fault in self.faults.done if fault.kind != "role"]
        unprovoked = not (wrong or self.cluster.deaths_by_poison)
        if unprovoked and end in _NEEDS_A_FAULT and not (end == "NO_READY_WORKER" and client.too_early):
            self.report_violation(f"{client.plan.name} ended with {end}, though nothing went wrong")
        if end == "DEADLINE_EXCEEDED" and client.plan.deadline_s is None:
            self.report_violation(f"{client.plan.name} was late without a deadline")

    def _died(self, name: str) -> bool:
        return any(host.dead for host in self.cluster.hosts if host.name == name)

    def _account(self) -> None:
        outcome, cluster = self.outcome, self.cluster
        outcome.digest = self._digest.hexdigest()
        outcome.events = cluster.loop.events
        outcome.messages = cluster.network.messages
        outcome.seconds = cluster.loop.now
        outcome.tokens = sum(client.tokens for client in self.clients)
        outcome.faults.update(fault.kind for fault in self.faults.done)
        outcome.shares = cluster.shares.placed
        outcome.loaded, outcome.damaged = cluster.folder.loaded, cluster.folder.damaged
        outcome.ends.update(client.end or "unfinished" for client in self.clients)


_VERDICTS = frozenset({"WORKER_LOST", "KV_TRANSFER_FAILED", "INTERNAL", "SHUTTING_DOWN"})
_NEEDS_A_FAULT = _VERDICTS | {"NO_READY_WORKER", "DRAINING"}
_LEGAL = frozenset(
    {
        *_NEEDS_A_FAULT,
        *("QUEUE_FULL", "DEADLINE_UNATTAINABLE", "KV_CAPACITY", "DEADLINE_EXCEEDED"),
    }
)


@contextmanager
def _recording(run: Run) -> Iterator[None]:
    """Record the verdicts of the retry policy."""
    names = (
        *("decide", "wait_or_give_up", "no_worker_error"),
        *("over_budget_error", "shutting_down_error", "quarantine_error", "quarantined"),
    )
    real = {name: getattr(choice_state_module, name) for name in names}

    def listener(name: str) -> Any:
        def rule(*args: Any, **options: Any) -> Any:
            verdict = real[name](*args, **options)
            run.record_verdict(name, args, verdict)
            return verdict

        return rule

    try:
        for name in names:
            setattr(choice_state_module, name, listener(name))
        yield
    finally:
        for name, function in real.items():
            setattr(choice_state_module, name, function)


@contextmanager
def _loop_for_dead_processes() -> Iterator[None]:
    """Provide an event loop for a `finally` that asks for one: asyncio would make one that stays open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def simulate(scenario: Scenario, *, keep_trace: bool = False) -> Outcome:
    """Run a scenario, and collect the garbage of its dead processes before returning."""
    enabled, hook, disabled = gc.isenabled(), sys.unraisablehook, logging.root.manager.disable
    gc.disable()
    try:
        run = Run(scenario, keep_trace=keep_trace)
        outcome = run.run()
        # Coroutines of dead processes end here, where the errors of their `finally` are dropped.
        sys.unraisablehook = lambda unraisable: None
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings(), _loop_for_dead_processes():
            warnings.simplefilter("ignore")
            run.cluster.close()
            del run
            gc.collect()
    finally:
        sys.unraisablehook = hook
        logging.disable(disabled)
        if enabled:
            gc.enable()
    return outcome
