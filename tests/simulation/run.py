"""One run: a scenario in, what came of it out. The same scenario gives the same trace, whatever else runs."""

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

import gateway.session.choice_state as session_module
from diptych.runtime.errors import DiptychError
from gateway.session.retry_policy import GiveUp, Retry, RetryContext
from tests.simulation.clients import Client
from tests.simulation.cluster import Cluster
from tests.simulation.faults import Faults
from tests.simulation.scenario import Scenario
from tests.simulation.stand_ins import standing_in
from tests.simulation.virtual_loop import Livelock

DEATHS = 2
"""The most that a request may cost."""
LONGEST_S = 45.0
"""Of virtual time: a writer that does not stop is fenced after 30 s, and nothing waits longer."""


@dataclass
class Outcome:
    """What a run was like; `violation` is the first thing that must not happen and did."""

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


class Run:
    """The state of one run."""

    def __init__(self, scenario: Scenario, *, keep_trace: bool) -> None:
        self.scenario = scenario
        self.outcome = Outcome()
        self._keep = keep_trace
        self._digest = hashlib.blake2b(digest_size=12)
        self.cluster = Cluster(scenario, self.note, self.violated)
        self.faults = Faults(self.cluster)
        self.clients = [Client(self.cluster, ask, self.violated) for ask in scenario.asks]
        self.verdicts: list[DiptychError] = []  # that the rules of recovery gave
        self.suspected = False  # whether some request seemed to have killed two workers

    def note(self, *what: Any) -> None:
        line = f"{self.cluster.loop.now:.6f} " + " ".join(map(str, what))
        self._digest.update(line.encode())
        if self._keep:
            self.outcome.trace.append(line)

    def violated(self, what: str) -> None:
        if self.cluster.loop.is_closed():
            return  # a coroutine that the collector ends, when all is over
        if not self.outcome.violation:
            self.outcome.violation = what
            self.note("VIOLATION", what)
            self.cluster.loop.halted = True

    def heard(self, rule: str, args: tuple[Any, ...], verdict: Any) -> None:
        """A rule of recovery has spoken."""
        error = verdict.error if isinstance(verdict, GiveUp) else verdict
        if isinstance(error, DiptychError):
            self.verdicts.append(error)
        if isinstance(verdict, Retry):
            self.outcome.retries[args[0].value] += 1
            self.suspected |= not verdict.acquitted
        if rule == "suspect":
            self.suspected |= verdict
        if any(isinstance(arg, RetryContext) and arg.deaths - arg.unproven > DEATHS for arg in args):
            self.violated(f"a request met its death number {DEATHS + 1}")

    def run(self) -> Outcome:
        try:
            with standing_in(self.cluster), _recording(self):
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
            loop.call_later(client.ask.at, client.start)
        last = max([f.at + f.lasts_s for f in self.scenario.faults] + [0.0])
        if not loop.run(until=LONGEST_S, over=lambda: loop.now > last and self._quiet()):
            if not self.outcome.violation:
                self.violated("forgotten: " + "; ".join(self._unfinished()))
            return
        if self.cluster.deaths_by_poison > DEATHS:
            self.violated(f"one request killed {self.cluster.deaths_by_poison} workers")
        for client in self.clients:
            self._check_end(client)

    def _quiet(self) -> bool:
        return not (self.cluster.restarting or self._waiting() or self.cluster.leftovers())

    def _waiting(self) -> bool:
        return any(not client.end for client in self.clients)

    def _unfinished(self) -> list[str]:
        return [c.ask.name for c in self.clients if not c.end] + self.cluster.leftovers()

    def _check_end(self, client: Client) -> None:
        """A request is lost only where the rules of recovery say so, and for a reason that was there."""
        error, end = client.error, client.end
        if error is None:
            if end == "gateway lost" and not self._died(f"g{client.ask.gateway}"):
                self.violated(f"{client.ask.name}: its gateway was lost, but never died")
            return
        given_up = any(known is error or known is error.__cause__ for known in self.verdicts)
        if end == "INTERNAL":
            # Two workers have to have died, or been out of reach for longer than anybody waits.
            lost = sum(host.dead for host in self.cluster.hosts) + self.faults.silences
            given_up = (given_up or self.suspected) and lost >= DEATHS
        if end in _VERDICTS and not given_up:
            self.violated(f"{client.ask.name} ended with {end}, which no rule gave as its verdict")
        if end not in _LEGAL:
            self.violated(f"{client.ask.name} ended with {end}: {error}")
        unprovoked = not (self.faults.done or self.cluster.deaths_by_poison)
        if unprovoked and end in _NEEDS_A_FAULT and not (end == "NO_READY_WORKER" and client.too_early):
            self.violated(f"{client.ask.name} ended with {end}, though nothing went wrong")
        if end == "DEADLINE_EXCEEDED" and client.ask.deadline_s is None:
            self.violated(f"{client.ask.name} was late without a deadline")

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
    """Listen to what the rules of recovery say."""
    names = ("decide", "no_route", "nobody_came", "over_budget", "shutting_down", "suspect")
    real = {name: getattr(session_module, name) for name in names}

    def listener(name: str) -> Any:
        def rule(*args: Any, **options: Any) -> Any:
            verdict = real[name](*args, **options)
            run.heard(name, args, verdict)
            return verdict

        return rule

    try:
        for name in names:
            setattr(session_module, name, listener(name))
        yield
    finally:
        for name, function in real.items():
            setattr(session_module, name, function)


@contextmanager
def _loop_of_the_dead() -> Iterator[None]:
    """An event loop for a `finally` that asks for one: asyncio would make one that nobody closes."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def simulate(scenario: Scenario, *, keep_trace: bool = False) -> Outcome:
    """Run a scenario. What its dead processes leave behind is collected before this returns."""
    enabled, hook, disabled = gc.isenabled(), sys.unraisablehook, logging.root.manager.disable
    gc.disable()
    try:
        run = Run(scenario, keep_trace=keep_trace)
        outcome = run.run()
        # Coroutines of dead processes end here, where nobody hears what their `finally` says.
        sys.unraisablehook = lambda unraisable: None
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings(), _loop_of_the_dead():
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
