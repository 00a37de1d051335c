"""The scenarios: machines, requests and faults of one run, made from a seed, as plain values.

A scenario without some of its requests or faults is a scenario too, by which a failing one is shortened.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.simulation.images import IMAGE, image_tokens
from tests.simulation.model import (
    ADAPTERS,
    BLOCK_SIZE,
    FIRST_TOKEN,
    POISON,
    STATE_LAYOUT,
    TOKENS,
    WINDOW_LAYOUT,
    RequestSampling,
    oracle,
)
from tests.simulation.themes import THEMES, Theme

FAULTS_UNTIL_S = 2.2
"""No fault begins after this time."""
SILENT_SHARE = 0.3
"""Share of scenarios of groups with ranks on other machines in which a machine falls silent."""
WINDOWED_SHARE = 0.35
"""Share of scenarios whose model has a window."""
RECURRENT_SHARE = 0.3
"""Share of the others whose model has recurrent layers."""


@dataclass(frozen=True)
class RequestPlan:
    """The request of one client; times in seconds of the run."""

    name: str
    at: float
    gateway: int
    prompt: tuple[int, ...]
    sampling: RequestSampling
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
    adapter: str = ""  # "" = the base model


@dataclass(frozen=True)
class Fault:
    """A fault of `kind` at `target`: one host, or the two ends of a link."""

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
class GroupShape:
    """Processes of a worker: `stages` of `ranks` each; the last `remote` have memories of their own."""

    ranks: int
    stages: int = 1
    remote: int = 0
    rank_0_alone: bool = False
    """Rank 0 has a memory with its share alone as well, as where ranks are on GPUs of one host."""

    @property
    def size(self) -> int:
        return self.ranks * self.stages

    def holders(self, name: str) -> list[str]:
        """Return the names of the processes with memories of their own, of a worker of that name."""
        return [name, *(f"{name}/{number}" for number in range(self.size - self.remote, self.size))]


@dataclass(frozen=True)
class Scenario:
    """The plan of one run. `network` seeds the delays."""

    network: int
    gateways: int
    prefills: int
    decodes: tuple[DecodeShape, ...]
    chunk: int
    max_inflight: int
    max_queued_tokens: int
    step_s: float
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    local_prefill: str = "auto"
    local_bounds: tuple[int, int] = (8, 24)  # new tokens of prompts that decode workers compute themselves
    max_loras: int = 0  # adapters that a step computes at once; 0 = there are none
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Processes of each worker that map one memory, by role; else it is one."""
    groups: Mapping[str, GroupShape] = field(default_factory=dict)
    """Shapes of workers by role, of a model that is dealt to ranks (kv_cells.py); empty: it is not."""
    mixed_steps: bool = True  # chunks of these are rows of decode steps; else steps between them
    tiers: tuple[tuple[str, int], ...] = ()  # kinds of tiers below the pools, and the blocks that they hold
    window: bool = False  # the model has layers with a window, in blocks of their own
    recurrent: bool = False  # the model has recurrent layers, whose states lie in pages
    encoders: int = 0  # encode workers
    own_encoders: bool = True  # prefill workers encode where no encode worker does
    hosted: bool = False  # p0 and d0 are one process, p1 and d1, and so on: what befalls one befalls both

    @property
    def grouped(self) -> bool:
        """True if some workers may be several processes: such a model has no images and windows."""
        return bool(self.ranks or self.groups)

    def others(self, worker: str) -> list[str]:
        """Return the names of a worker's processes other than rank 0."""
        role = {"p": "prefill", "d": "decode"}[worker[0]]
        count = self.groups[role].size if role in self.groups else self.ranks.get(role, 1)
        return [f"{worker}/{number}" for number in range(1, count)]

    @property
    def workers(self) -> list[str]:
        """Names of the workers that can change their role."""
        return [f"p{n}" for n in range(self.prefills)] + [f"d{n}" for n in range(len(self.decodes))]

    @property
    def processes(self) -> list[str]:
        """Names of all programs."""
        gateways, encoders = range(self.gateways), range(self.encoders)
        return [f"g{n}" for n in gateways] + self.workers + [f"e{n}" for n in encoders]


_SHARES = {
    "everything": 6,
    "writers": 3,
    "copies": 2,
    "pulls": 2,
    "tiers": 2,
    "crowd": 1,
    "groups": 2,
    "shares": 2,
}
_TIERS = ((("ram", 12),), (("disk", 40),), (("ram", 6), ("disk", 24)), (("ram", 12), ("disk", 80)))


def make_scenario(seed: int, theme_name: str | None = None, theme: Theme | None = None) -> Scenario:
    """Return the scenario of a seed, of the theme or of the named one if one is given."""
    rng = random.Random(f"scenario {seed}")
    drawn = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    theme = theme or THEMES[theme_name or drawn]
    decodes = tuple(
        DecodeShape(rng.choice(theme.transports), rng.choice(theme.blocks), rng.choice([2, 4, 8]))
        for _ in range(rng.choice([1, 2, 2, 2, 3]))
    )
    local = random.Random(f"local prefill {seed}")
    adapters = random.Random(f"adapters {seed}")
    tiers = random.Random(f"tiers {seed}")
    ranks, groups = _ranks(seed, theme), _groups(seed, theme)
    images = random.Random(f"images {seed}")
    encoders = images.choice([0, 0, 0, 1, 2])
    shape = Scenario(
        tiers=tiers.choice(_TIERS) if tiers.random() < theme.tiered else (),
        hosted=theme.hosted,
        encoders=encoders,
        own_encoders=not encoders or images.random() < 0.6,
        local_prefill=local.choice(["auto", "always", "always", "never"]),
        local_bounds=local.choice([(4, 0), (8, 24), (40, 40)]),
        mixed_steps=local.random() < 0.5,
        max_loras=0 if groups else adapters.choice([0, 0, 1, 1, 2]),
        ranks=ranks,
        groups=groups,
        network=seed,
        gateways=rng.choice([1, 1, 2]),
        prefills=rng.choice([1, 2, 2]),
        decodes=decodes,
        chunk=rng.choice(theme.chunks),
        max_inflight=rng.choice([3, 6, 16, 16]),
        max_queued_tokens=rng.choice([100, 300, 1000]),
        step_s=rng.choice(theme.step_s),
        requests=(),
        faults=(),
    )
    requests = _plan_requests(rng, shape, theme)
    whole = bool(shape.grouped or shape.tiers)  # neither goes with blocks of windows
    if not whole and random.Random(f"window {seed}").random() < WINDOWED_SHARE:
        shape = _with_window(shape)
    elif not whole and random.Random(f"recurrent {seed}").random() < RECURRENT_SHARE:
        shape = _with_states(shape)
    faults = _faults(rng, replace(shape, requests=requests), theme)
    more = (
        *_role_changes(shape),
        *_rank_faults(shape, requests),
        *_pair_faults(shape, requests),
        *_encoder_faults(shape, requests),
        *_row_faults(shape, requests),
    )
    faults = tuple(sorted((*faults, *more), key=lambda fault: fault.at))
    return replace(shape, requests=requests, faults=faults)


def _with_window(shape: Scenario) -> Scenario:
    """Return the scenario of a model with a window, with pools that hold as many requests at once."""
    decodes = tuple(replace(one, blocks=one.blocks * WINDOW_LAYOUT.blocks_per_place) for one in shape.decodes)
    return replace(shape, window=True, decodes=decodes)


def _with_states(shape: Scenario) -> Scenario:
    """Return the scenario of a model with recurrent layers, likewise."""
    decodes = tuple(replace(one, blocks=one.blocks * STATE_LAYOUT.blocks_per_place) for one in shape.decodes)
    return replace(shape, recurrent=True, decodes=decodes)


def _ranks(seed: int, theme: Theme) -> dict[str, int]:
    """Return the processes of a worker, by role: most scenarios have no groups."""
    rng = random.Random(f"ranks {seed}")
    if rng.random() >= theme.groups:
        return {}
    return {"prefill": rng.choice([1, 2, 2, 3]), "decode": rng.choice([1, 1, 2])}


def _rank_faults(shape: Scenario, requests: Sequence[RequestPlan]) -> list[Fault]:
    """Return faults of ranks other than 0, while a request is on its way."""
    rng = random.Random(f"faults of ranks {shape.network}")
    ranks = [rank for worker in shape.workers for rank in shape.others(worker)]
    return [
        Fault(
            round(rng.choice(requests).at + rng.uniform(0.0, 0.2), 4),
            rng.choice(["kill", "stop", "stop", "hang"]),
            (rng.choice(ranks),),
            rng.choice([0.05, 0.3, 1.0]),
        )
        for _ in range(rng.choice([1, 2, 4]))
        if ranks
    ]


def _groups(seed: int, theme: Theme) -> dict[str, GroupShape]:
    """Return the shapes of groups whose ranks have memories of their own, of at least one role."""
    if not theme.shares:
        return {}
    rng = random.Random(f"groups {seed}")
    shapes = {}
    for role in ("prefill", "decode"):
        ranks, stages = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 1, 2])
        most = ranks * stages - 1
        remote = rng.choice([most, most, rng.randint(0, most)])
        shapes[role] = GroupShape(ranks, stages, remote, 0 < remote == most and rng.random() < 0.5)
    if not any(shape.remote for shape in shapes.values()):
        shapes[rng.choice(["prefill", "decode"])] = GroupShape(2, 1, 1)
    return shapes


def _pair_faults(shape: Scenario, requests: Sequence[RequestPlan]) -> list[Fault]:
    """Return faults of the connections between ranks, most of them while shares are on their way."""
    rng = random.Random(f"pairs {shape.network}")
    if not shape.groups:
        return []
    prefills = [name for n in range(shape.prefills) for name in shape.groups["prefill"].holders(f"p{n}")]
    decodes = [name for n in range(len(shape.decodes)) for name in shape.groups["decode"].holders(f"d{n}")]
    kinds = [*["lose_pair"] * 3, "delay", "delay", "partition", "flip", "flip_header", "cut", "twice"]
    found = []
    for _ in range(rng.choice([1, 3, 5])):
        kind = rng.choice(kinds)
        pair: tuple[str, ...] = (rng.choice(prefills), rng.choice(decodes))
        if kind == "lose_pair":
            pair = ()  # one that there is then
        lasts = rng.choice([0.05, 0.3, 1.0]) if kind in ("delay", "partition") else 0.0
        at = round(rng.choice(requests).at + rng.uniform(0.0, 0.15), 4)
        found.append(Fault(at, kind, pair, lasts, rng.getrandbits(16)))
    return found + _faults_within_groups(shape, requests) + _silences(shape, requests)


def _faults_within_groups(shape: Scenario, requests: Sequence[RequestPlan]) -> list[Fault]:
    """Return delays between rank 0 and ranks of its group, which see late what it orders, and its death."""
    rng = random.Random(f"within groups {shape.network}")
    pairs = [(worker, rank) for worker in shape.workers for rank in shape.others(worker)]
    return [
        Fault(
            round(rng.choice(requests).at + rng.uniform(0.0, 0.15), 4),
            rng.choice(["delay", "partition"]),
            rng.choice(pairs),
            rng.choice([0.05, 0.3, 1.0]),
        )
        for _ in range(rng.choice([0, 1, 2]) if pairs else 0)
    ]


def _silences(shape: Scenario, requests: Sequence[RequestPlan]) -> list[Fault]:
    """Return silences of machines of ranks, rank 0 among them: most are longer than a group waits."""
    rng = random.Random(f"silences {shape.network}")
    names = [
        name
        for worker in shape.workers
        for name in shape.groups[{"p": "prefill", "d": "decode"}[worker[0]]].holders(worker)
    ]
    if rng.random() >= SILENT_SHARE:
        return []
    at = round(rng.choice(requests).at + rng.uniform(-0.05, 0.15), 4)
    return [Fault(at, "silence", (rng.choice(names),), rng.choice([2.0, 12.0, 20.0, 20.0, 30.0]))]


def _role_changes(shape: Scenario) -> list[Fault]:
    """Return changes of workers' roles; where all but one of a role are gone they are refused."""
    rng = random.Random(f"roles {shape.network}")
    if shape.hosted:  # such a worker keeps its role
        return []
    at = (round(rng.uniform(0.3, FAULTS_UNTIL_S), 4) for _ in range(rng.choice([0, 0, 1, 2, 3])))
    return [Fault(one, "role", (rng.choice(shape.workers),)) for one in at]


def _encoder_faults(shape: Scenario, requests: Sequence[RequestPlan]) -> list[Fault]:
    """Return faults of encode workers, and of the links to them, most of them while a request is young."""
    if not shape.encoders:
        return []
    rng = random.Random(f"encoders {shape.network}")
    processes = ("kill", "kill", "stop", "hang", "slow", "drain")
    kinds = (*processes, "reset", "reset", "partition", "delay", "flush_cache")
    found = []
    for _ in range(rng.choice([0, 1, 2, 3])):
        at = round(rng.choice(requests).at + rng.uniform(0.0, 0.1), 4)
        kind, encoder = rng.choice(kinds), f"e{rng.randrange(shape.encoders)}"
        others = [f"g{rng.randrange(shape.gateways)}", f"p{rng.randrange(shape.prefills)}"]
        lasts = rng.choice([0.05, 0.3, 1.0, 2.5])
        if kind in ("reset", "partition", "delay"):
            found.append(Fault(at, kind, (rng.choice(others), encoder), 0.0 if kind == "reset" else lasts))
        elif kind == "flush_cache":
            found.append(Fault(at, kind))
        else:
            found.append(Fault(at, kind, (encoder,), lasts if kind in ("stop", "slow") else 0.0))
    return found


def _row_faults(shape: Scenario, requests: Sequence[RequestPlan]) -> list[Fault]:
    """Return damage to frames of rows from encode workers."""
    rng = random.Random(f"rows {shape.network}")
    return [
        Fault(
            round(rng.choice(requests).at + rng.uniform(0.0, 0.05), 4),
            rng.choice(["flip", "flip_header", "cut", "twice"]),
            (f"p{rng.randrange(shape.prefills)}", f"e{rng.randrange(shape.encoders)}"),
            number=rng.getrandbits(16),
        )
        for _ in range(rng.choice([0, 1, 2]) if shape.encoders else 0)
    ]


def _add_images(shape: Scenario, requests: list[RequestPlan], room: int) -> list[RequestPlan]:
    """Put images into some prompts, as far as there is room."""
    rng = random.Random(f"images of requests {shape.network}")
    if shape.grouped or (not shape.encoders and rng.random() < 0.7):  # groups read no images
        return requests
    found = []
    for plan in requests:
        prompt = plan.prompt
        for _ in range(rng.choice([0, 1, 1, 2])):
            image = image_tokens(rng.randrange(3), rng.choice([1, 2, 2, 3]))
            place = rng.choice([0, 0, rng.randint(0, len(plan.prompt))])
            if len(prompt) + len(image) + plan.max_tokens + 2 <= room:
                # Not within another image: rows end with the token that names it.
                place = next(n for n in range(place, len(prompt) + 1) if n == 0 or prompt[n - 1] != IMAGE)
                prompt = (*prompt[:place], *image, *prompt[place:])
        found.append(replace(plan, prompt=prompt))
    return found


def _plan_requests(rng: random.Random, shape: Scenario, theme: Theme) -> tuple[RequestPlan, ...]:
    families = [_words(rng, rng.choice([4, 8, 16])) for _ in range(2)]
    smallest = min(d.blocks for d in shape.decodes) * BLOCK_SIZE
    poisoned = rng.random() < 0.06
    requests = [
        _plan_request(rng, shape, theme, families, smallest) for _ in range(rng.randint(*theme.requests))
    ]
    if shape.max_loras:
        adapters = random.Random(f"adapters of requests {shape.network}")
        requests = [replace(plan, adapter=adapters.choice(["", *ADAPTERS])) for plan in requests]
    requests = _add_images(shape, requests, smallest)
    if theme.turns:
        requests = _make_turns(rng, theme, requests, smallest)
    if poisoned:
        requests[0] = replace(requests[0], prompt=(POISON, *requests[0].prompt), adapter="")
    requests.sort(key=lambda plan: plan.at)
    return tuple(replace(plan, name=f"r{number}") for number, plan in enumerate(requests))


def _make_turns(
    rng: random.Random, theme: Theme, requests: list[RequestPlan], room: int
) -> list[RequestPlan]:
    """Let some requests continue an earlier one, with its answer, some time after it came."""
    turns: list[RequestPlan] = requests[:1]
    for plan in requests[1:]:
        before = rng.choice(turns)
        limits = before.min_tokens, before.max_tokens
        answer = oracle(before.prompt, before.sampling, 0, frozenset(before.stop_ids), limits, before.adapter)
        prompt = (*before.prompt, *answer, *_words(rng, rng.randint(1, 4)))
        most = min(plan.max_tokens, room - len(prompt) - 2)
        if rng.random() < theme.turns and most > 0:
            at = round(before.at + rng.uniform(0.1, 0.5), 3)
            stop_after = None if plan.stop_after is None or plan.stop_after >= most else plan.stop_after
            plan = replace(
                plan,
                at=at,
                prompt=prompt,
                max_tokens=most,
                min_tokens=min(plan.min_tokens, most),
                stop_after=stop_after,
            )
        turns.append(plan)
    return turns


def _plan_request(
    rng: random.Random, shape: Scenario, theme: Theme, families: Sequence[tuple[int, ...]], room: int
) -> RequestPlan:
    prompt = (*rng.choice([*families, ()]), *_words(rng, rng.randint(1, 12)))
    most = min(rng.choice([1, 3, 8, 16, 24]), room - len(prompt) - 2)
    return RequestPlan(
        name="",
        at=round(rng.uniform(0.3, 0.3 + theme.burst_s), 3),
        gateway=rng.randrange(shape.gateways),
        prompt=prompt,
        sampling=RequestSampling(rng.choice([0.0, 0.5]), rng.getrandbits(32), rng.choice([0.0, 0.0, 0.5])),
        max_tokens=most,
        min_tokens=rng.choice([0, 0, min(3, most)]),
        choices=rng.choice([1, 1, 1, 1, 2, 3]),
        stop_ids=tuple(rng.sample(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS), rng.choice([0, 1, 2]))),
        stop_after=rng.randrange(1, most) if most > 4 and rng.random() < 0.15 else None,
        deadline_s=rng.choice([None, None, None, None, 0.08, 0.4, 2.0]),
        leaves_after_s=round(rng.choice([0.02, 0.06, 0.2]), 3) if rng.random() < theme.leave else None,
        cached=rng.random() < 0.85,
        priority=rng.choice([0, 0, 1]),
        slow_reader=rng.random() < 0.1,
    )


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, FIRST_TOKEN + 4 * TOKENS) for _ in range(count))


def _faults(rng: random.Random, shape: Scenario, theme: Theme) -> tuple[Fault, ...]:
    if rng.random() < 0.03:
        return ()  # without faults nothing may be lost at all
    faults = [_fault(rng, shape, theme) for _ in range(rng.choice([4, 6, 8, 10]))]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _fault(rng: random.Random, shape: Scenario, theme: Theme) -> Fault:
    at = rng.uniform(0.3, FAULTS_UNTIL_S)
    if rng.random() < 0.7:  # while some request is on its way
        at = rng.choice(shape.requests).at + rng.uniform(0.0, 0.2)
    at = round(at, 4)
    gateways = [f"g{n}" for n in range(shape.gateways)]
    prefills, decodes = [w for w in shape.workers if w[0] == "p"], [w for w in shape.workers if w[0] == "d"]
    pair = (rng.choice(prefills), rng.choice(decodes))
    worker = (rng.choice(prefills if theme.at_prefill else shape.workers),)
    ours = (rng.choice(gateways), rng.choice(shape.workers))
    link = pair if theme.at_prefill else rng.choice([ours, pair, pair])
    kind = rng.choices(list(theme.weights), list(theme.weights.values()))[0]
    lasts = rng.choice([0.05, 0.3, 1.0, 2.5])
    match kind:
        case "kill" | "drain":
            return Fault(at, kind, worker)
        case "kill_gateway":
            return Fault(at, "kill", (rng.choice(gateways),))
        case "hang":
            return Fault(at, kind, worker)
        case "stop" | "slow":
            return Fault(at, kind, worker, lasts)
        case "reset":
            return Fault(at, kind, link)
        case "partition" | "delay":
            return Fault(at, kind, link, lasts)
        case "repeat":
            return Fault(at, kind, (rng.choice(decodes), rng.choice(gateways)), number=rng.randint(1, 4))
        case "flip" | "flip_header" | "cut" | "twice":
            return Fault(at, kind, pair, number=rng.getrandbits(16))
        case "tier_flip" | "tier_cut" | "tier_swap" | "tier_vanish":
            return Fault(at, kind, number=rng.getrandbits(16))
        case "tier_full" | "tier_slow":
            return Fault(at, kind, lasts_s=lasts)
        case "store_down" | "store_frozen" | "store_slow":
            return Fault(at, kind, lasts_s=lasts)
        case _:
            return Fault(at, kind)
