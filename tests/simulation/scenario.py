"""What happens in one run, made from a seed: the machines, the requests and the faults, as plain values.

A scenario without some of its requests or faults is a scenario too, which is how a failing one is made short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.model import BLOCK_SIZE, FIRST_TOKEN, POISON, TOKENS, Draws

FAULTS_UNTIL_S = 2.2
"""Everything is well from here on, but for what a fault that began before still lasts."""


@dataclass(frozen=True)
class Ask:
    """One request of one client; times in seconds of the run."""

    name: str
    at: float
    gateway: int
    prompt: tuple[int, ...]
    draws: Draws
    max_tokens: int
    min_tokens: int = 0
    choices: int = 1
    stop_ids: tuple[int, ...] = ()
    stop_after: int | None = None  # a stop string: the text of the oracle's token of this number
    deadline_s: float | None = None
    leaves_after_s: float | None = None
    cached: bool = True
    priority: int = 0
    slow_reader: bool = False


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong: `kind` at `target`, which two hosts share where it is a link's."""

    at: float
    kind: str
    target: tuple[str, ...] = ()
    lasts_s: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        where = "–".join(self.target)
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.at:.3f} {self.kind} {where}{lasts}".rstrip()


@dataclass(frozen=True)
class DecodeShape:
    transport: str
    blocks: int
    max_batch: int


@dataclass(frozen=True)
class Scenario:
    """One run. `network` seeds the delays."""

    network: int
    gateways: int
    prefills: int
    decodes: tuple[DecodeShape, ...]
    chunk: int
    max_inflight: int
    max_queued_tokens: int
    step_s: float
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def workers(self) -> list[str]:
        return [f"p{n}" for n in range(self.prefills)] + [f"d{n}" for n in range(len(self.decodes))]


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    decodes = tuple(
        DecodeShape(
            rng.choice(["shared_memory", "shared_memory", "tcp"]),
            rng.choice([12, 16, 16, 24, 40]),
            rng.choice([2, 4, 8]),
        )
        for _ in range(rng.choice([1, 2, 2, 2, 3]))
    )
    shape = Scenario(
        network=seed,
        gateways=rng.choice([1, 1, 2]),
        prefills=rng.choice([1, 2, 2]),
        decodes=decodes,
        chunk=rng.choice([4, 8, 16]),
        max_inflight=rng.choice([3, 6, 16]),
        max_queued_tokens=rng.choice([100, 300, 1000]),
        step_s=rng.choice([0.002, 0.005, 0.015]),
        asks=(),
        faults=(),
    )
    asks = _asks(rng, shape)
    faults = _faults(rng, shape)
    return Scenario(**{**shape.__dict__, "asks": asks, "faults": faults})


def _asks(rng: random.Random, shape: Scenario) -> tuple[Ask, ...]:
    families = [_words(rng, rng.choice([4, 8, 16])) for _ in range(2)]
    smallest = min(d.blocks for d in shape.decodes) * BLOCK_SIZE
    asks = []
    for number in range(rng.randint(4, 9)):
        prompt = (*rng.choice([*families, ()]), *_words(rng, rng.randint(1, 12)))
        if rng.random() < 0.012:
            prompt = (POISON, *prompt)
        room = smallest - len(prompt) - 1
        most = min(rng.choice([1, 3, 8, 16, 24]), room)
        greedy = rng.random() < 0.5
        asks.append(
            Ask(
                name=f"r{number}",
                at=round(rng.uniform(0.3, 1.8), 3),
                gateway=rng.randrange(shape.gateways),
                prompt=prompt,
                draws=Draws(
                    0.0 if greedy else 0.5, rng.getrandbits(32), rng.choice([0.0, 0.0, 0.5])
                ),
                max_tokens=most,
                min_tokens=rng.choice([0, 0, min(3, most)]),
                choices=rng.choice([1, 1, 1, 1, 2, 3]),
                stop_ids=tuple(rng.sample(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS), rng.choice([0, 1, 2]))),
                stop_after=rng.randrange(1, most) if most > 4 and rng.random() < 0.15 else None,
                deadline_s=rng.choice([None, None, None, 0.08, 0.4, 2.0]),
                leaves_after_s=rng.choice([None] * 6 + [0.02, 0.1, 0.3]),
                cached=rng.random() < 0.85,
                priority=rng.choice([0, 0, 1]),
                slow_reader=rng.random() < 0.1,
            )
        )
    return tuple(sorted(asks, key=lambda ask: ask.at))


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, FIRST_TOKEN + 4 * TOKENS) for _ in range(count))


def _faults(rng: random.Random, shape: Scenario) -> tuple[Fault, ...]:
    if rng.random() < 0.04:
        return ()  # without faults nothing may be lost at all
    faults = [_fault(rng, shape) for _ in range(rng.choice([3, 5, 7, 9]))]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _fault(rng: random.Random, shape: Scenario) -> Fault:
    at = round(rng.uniform(0.3, FAULTS_UNTIL_S), 3)
    prefills, decodes = [w for w in shape.workers if w[0] == "p"], [w for w in shape.workers if w[0] == "d"]
    gateways = [f"g{n}" for n in range(shape.gateways)]
    worker = (rng.choice(shape.workers),)
    link = rng.choice(
        [
            (rng.choice(gateways), rng.choice(shape.workers)),
            (rng.choice(prefills), rng.choice(decodes)),
            (rng.choice(prefills), rng.choice(decodes)),
        ]
    )
    data = (rng.choice(prefills), rng.choice(decodes))
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    lasts = round(rng.choice([0.05, 0.3, 1.0, 2.5]), 3)
    match kind:
        case "kill" | "drain":
            return Fault(at, kind, worker)
        case "kill_gateway":
            return Fault(at, "kill", (rng.choice(gateways),))
        case "stop" | "slow":
            return Fault(at, kind, worker, lasts)
        case "reset":
            return Fault(at, kind, link)
        case "partition" | "delay":
            return Fault(at, kind, link, lasts)
        case "repeat":
            return Fault(at, kind, (rng.choice(decodes), rng.choice(gateways)), number=rng.randint(1, 4))
        case "flip" | "flip_header" | "cut" | "twice":
            return Fault(at, kind, data, number=rng.getrandbits(16))
        case "store_down" | "store_frozen" | "store_slow":
            return Fault(at, kind, lasts_s=lasts)
        case _:
            return Fault(at, kind)


_WEIGHTS = {
    "kill": 5,
    "kill_gateway": 1,
    "stop": 4,
    "slow": 2,
    "drain": 2,
    "reset": 4,
    "partition": 2,
    "delay": 2,
    "repeat": 2,
    "flip": 3,
    "flip_header": 1,
    "cut": 2,
    "twice": 1,
    "store_down": 1,
    "store_frozen": 1,
    "store_slow": 1,
    "store_flush": 1,
    "store_stale": 1,
    "flush_cache": 1,
}
