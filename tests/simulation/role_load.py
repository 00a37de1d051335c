"""Goodput of eight workers under a load that turns: the rules of `--auto-roles` over measured step times.

The fleet is a model of queues in ticks of 50 ms, where prompts are computed first come, first served, and
answers in batches of at most 64. Its times are those of an 8B model on an H200
(lab/results/h200/2026-11-27-gpu.md). What decides is the gateway's own code: `wanted_workers` and
`RoleBalancer`. A change takes half of the grace, after which the worker's sequences are computed anew
elsewhere, and `LOAD_S`, an assumption, to read the weights.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from gateway.attempt.types import Role
from gateway.worker_pool.role_balance import RoleBalancer
from gateway.worker_pool.role_demand import (
    DecodeLoad,
    PrefillLoad,
    QueuedLoad,
    SloTargets,
    wanted_workers,
)
from gateway.worker_pool.role_rules import RoleBounds, RoleView, other

TICK_S = 0.05
TOKEN_S = 1 / 35_310  # prefill of 8,192 tokens in chunks of 2,048
STEP_BASE_S, STEP_ROW_S = 4.43e-3, 83.2e-6  # through the steps of 8 and of 64 sequences
PLACES, BLOCKS, BLOCK_SIZE = 64, 50_000, 16
PREFILLING = 8  # requests on their way through a prefill worker, as the gateway admits them
HAND_BACK_S, LOAD_S, PAUSE_S, LOOK_S = 4.0, 20.0, 30.0, 0.5
BUSY_TICKS = 100
TARGETS = SloTargets()


@dataclass(frozen=True)
class Phase:
    """A part of the load: requests a second of so many prompt and output tokens, for some seconds."""

    seconds: float
    rate: float
    prompt: int
    output: int


TURNING = (
    Phase(200, 28, 4000, 100),  # 3.2 prefill workers
    Phase(800, 28, 500, 1500),  # 6.4 decode workers
)
STEADY = (Phase(300, 16, 2000, 500),)  # either role has enough


@dataclass(eq=False)
class Request:
    """A request: when it came, its tokens, and what is left of them."""

    at: float
    prompt: int
    left: int
    output: int
    to_compute: float
    first_at: float | None = None


@dataclass(eq=False)
class Worker:
    """A worker; `until` is the end of what it does while it is not ready."""

    name: str
    role: Role
    queue: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, int, Request]] = field(default_factory=list)  # by the count at which it ends
    made: float = 0.0  # tokens of every sequence that ran all the time
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=BUSY_TICKS))
    drains_until: float | None = None
    loads_until: float | None = None

    @property
    def ready(self) -> bool:
        return self.drains_until is None and self.loads_until is None

    @property
    def waiting_tokens(self) -> int:
        return round(sum(one.to_compute for one in self.queue))

    @property
    def step_s(self) -> float:
        return STEP_BASE_S + STEP_ROW_S * len(self.running)


class Fleet:
    """Eight workers and the queue of their gateway."""

    def __init__(self, phases: tuple[Phase, ...], *, auto_roles: bool, seed: int) -> None:
        self.workers = [Worker(f"w{n}", Role.PREFILL if n < 4 else Role.DECODE) for n in range(8)]
        self.waiting: deque[Request] = deque()  # at the gateway
        self.computed: deque[Request] = deque()  # prompts without a place
        self.good = self.lost = self.changes = 0
        self.now = 0.0
        self._phases = phases
        self._balancer = RoleBalancer(RoleBounds()) if auto_roles else None
        self._pause_until = self._look_at = 0.0
        self._random = random.Random(seed)
        self._numbers = 0

    def run(self) -> Fleet:
        """Run through all phases and return itself."""
        for phase in self._phases:
            end, arrival = self.now + phase.seconds, self.now
            while self.now < end:
                while arrival <= self.now:
                    self.waiting.append(
                        Request(arrival, phase.prompt, phase.output, phase.output, phase.prompt)
                    )
                    arrival += self._random.expovariate(phase.rate)
                self._tick()
        return self

    def ready(self, role: Role) -> list[Worker]:
        """Return the ready workers of a role."""
        return [one for one in self.workers if one.role is role and one.ready]

    def _tick(self) -> None:
        self._admit()
        for worker in self.workers:
            self._go_on(worker)
            if worker.role is Role.PREFILL:
                self._prefill(worker)
            else:
                self._decode(worker)
        self._join()
        if self._balancer is not None and self.now >= self._look_at:
            self._look_at = self.now + LOOK_S
            self._balance(self._balancer)
        self.now += TICK_S

    def _admit(self) -> None:
        """Give prompts to prefill workers while answers will find a place; who waited too long has left."""
        while self.waiting and self.now - self.waiting[0].at > TARGETS.ttft_s:
            self.waiting.popleft()
            self.lost += 1
        prefill, decode = self.ready(Role.PREFILL), self.ready(Role.DECODE)
        inside = sum(len(one.queue) + len(one.running) for one in self.workers) + len(self.computed)
        room = PLACES * len(decode) + PREFILLING * len(prefill) - inside
        while self.waiting and room > 0:
            min(prefill, key=lambda one: one.waiting_tokens).queue.append(self.waiting.popleft())
            room -= 1

    def _prefill(self, worker: Worker) -> None:
        budget = TICK_S / TOKEN_S if worker.loads_until is None else 0.0
        left = budget
        while worker.queue and left > 0:
            first = worker.queue[0]
            step = min(left, first.to_compute)
            first.to_compute -= step
            left -= step
            if first.to_compute <= 0:
                worker.queue.popleft()
                first.first_at = first.first_at or self.now + TICK_S
                self.computed.append(first)
        worker.busy.append(1 - left / budget if budget else 0.0)

    def _decode(self, worker: Worker) -> None:
        if worker.running:
            worker.made += TICK_S / worker.step_s
        while worker.running and worker.running[0][0] <= worker.made:
            request = heapq.heappop(worker.running)[2]
            assert request.first_at is not None
            itl_s = (self.now - request.first_at) / max(request.output - 1, 1)
            in_time = request.first_at - request.at <= TARGETS.ttft_s and itl_s <= TARGETS.itl_s
            self.good += in_time
            self.lost += not in_time

    def _join(self) -> None:
        for worker in sorted(self.ready(Role.DECODE), key=lambda one: len(one.running)):
            while self.computed and len(worker.running) < PLACES:
                request = self.computed.popleft()
                self._numbers += 1
                heapq.heappush(worker.running, (worker.made + request.left, self._numbers, request))

    def _go_on(self, worker: Worker) -> None:
        """Take a change of role one step further: hand back, load, be ready."""
        if worker.drains_until is not None and self.now >= worker.drains_until:
            self._hand_back(worker)
            worker.drains_until, worker.loads_until = None, self.now + LOAD_S
        elif worker.loads_until is not None and self.now >= worker.loads_until:
            worker.loads_until, worker.role = None, other(worker.role)
            worker.busy.clear()
            self._pause_until = self.now + PAUSE_S

    def _hand_back(self, worker: Worker) -> None:
        """Let others compute what it has not ended: of a sequence the prompt and all tokens so far."""
        back = list(worker.queue)
        for end, _, request in worker.running:
            request.left = max(round(end - worker.made), 1)
            request.to_compute = request.prompt + request.output - request.left
            back.append(request)
        worker.queue.clear()
        worker.running.clear()
        for request in back:
            min(self.ready(Role.PREFILL), key=lambda one: one.waiting_tokens).queue.append(request)

    def _balance(self, balancer: RoleBalancer) -> None:
        prefill, decode = self.ready(Role.PREFILL), self.ready(Role.DECODE)
        queued_tokens = sum(one.prompt for one in self.waiting)
        wanted = wanted_workers(
            [PrefillLoad(sum(w.busy) / BUSY_TICKS, w.waiting_tokens, TOKEN_S) for w in prefill],
            [self._decode_load(w) for w in decode],
            QueuedLoad(len(self.waiting), queued_tokens, queued_tokens // BLOCK_SIZE),
            TARGETS,
        )
        views = [
            RoleView(
                one.name,
                one.role,
                ready=one.ready,
                becomes=None if one.ready else other(one.role),
                work=len(one.running) + one.waiting_tokens,
            )
            for one in self.workers
        ]
        name = balancer.decide(wanted, views, self.now)
        if name is not None and self.now >= self._pause_until:
            worker = next(one for one in self.workers if one.name == name)
            worker.drains_until = self.now + HAND_BACK_S
            balancer.forget()
            self.changes += 1

    @staticmethod
    def _decode_load(worker: Worker) -> DecodeLoad:
        tokens = sum(one.prompt + one.output // 2 for _, _, one in worker.running)
        step_s = worker.step_s if worker.running else 0.0
        return DecodeLoad(tokens // BLOCK_SIZE, BLOCKS, len(worker.running), PLACES, step_s)
