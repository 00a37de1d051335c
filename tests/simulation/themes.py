"""The themes of scenarios: which faults are likely, and the shapes in which they matter."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Theme:
    """The focus of a scenario: the weights of its faults, and the shapes that make them matter."""

    weights: dict[str, int]
    transports: tuple[str, ...] = ("shared_memory", "shared_memory", "tcp")
    blocks: tuple[int, ...] = (12, 16, 16, 24, 40)
    step_s: tuple[float, ...] = (0.002, 0.005, 0.015)
    chunks: tuple[int, ...] = (4, 8, 16)  # tokens of a prefill step
    burst_s: float = 1.5  # in which all requests come
    leave: float = 0.33  # share of clients that go before the end
    at_prefill: bool = False  # processes and links of prefill workers only
    requests: tuple[int, int] = (4, 9)  # least and most
    groups: float = 0.2  # share of scenarios whose workers are several processes
    turns: float = 0.0  # share of requests that continue an earlier one and its answer, as a chat does
    tiered: float = 0.3  # share of scenarios with tiers
    hosted: bool = False  # a prefill and a decode worker share a process
    shares: bool = False  # groups whose ranks have memories of their own, and hand off by rank


_EVERYTHING = {
    "kill": 5,
    "kill_gateway": 1,
    "stop": 4,
    "hang": 1,
    "slow": 2,
    "drain": 2,
    "reset": 4,
    "partition": 2,
    "delay": 2,
    "repeat": 2,
    "flip": 2,
    "flip_header": 1,
    "cut": 1,
    "twice": 1,
    "store_down": 1,
    "store_frozen": 1,
    "store_slow": 1,
    "store_flush": 1,
    "store_stale": 1,
    "flush_cache": 1,
}
THEMES = {
    "everything": Theme(_EVERYTHING),
    "writers": Theme(  # writes to granted blocks while writers hang, links break and requests are cancelled
        {"stop": 5, "hang": 2, "delay": 5, "partition": 4, "reset": 4, "slow": 2, "kill": 1, "drain": 1},
        transports=("shared_memory",),
        blocks=(12, 14),
        step_s=(0.01, 0.03),
        chunks=(4,),
        burst_s=0.5,
        leave=0.75,
        at_prefill=True,
    ),
    "copies": Theme(  # copies that are damaged, late, or for another request
        {"flip": 4, "flip_header": 2, "cut": 3, "twice": 3, "reset": 6, "slow": 5, "stop": 2, "kill": 1},
        transports=("tcp",),
        blocks=(12, 16, 24),
        step_s=(0.01, 0.03),
        burst_s=0.5,
        at_prefill=True,
    ),
    "pulls": Theme(  # prefixes that only the decode worker has, while both sides die, hang and forget
        {
            "kill": 3,
            "stop": 3,
            "hang": 1,
            "slow": 2,
            "drain": 1,
            "reset": 3,
            "partition": 2,
            "delay": 2,
            "flip": 4,
            "flip_header": 2,
            "cut": 2,
            "twice": 2,
            "flush_cache": 2,
            "distrust": 3,
        },
        transports=("tcp",),
        blocks=(24, 32, 40),
        step_s=(0.005, 0.015, 0.03),
        leave=0.1,
        requests=(8, 14),
        turns=0.8,
    ),
    "groups": Theme(  # workers of several processes, of which each may die, hang or write late
        {"kill": 4, "stop": 4, "hang": 2, "slow": 2, "delay": 2, "partition": 3, "reset": 3, "drain": 1},
        transports=("shared_memory", "shared_memory", "tcp"),
        blocks=(12, 14, 24),
        step_s=(0.01, 0.03),
        chunks=(4, 8),
        burst_s=0.5,
        leave=0.5,
        groups=1.0,
    ),
    "shares": Theme(  # shares of blocks between ranks, which are late, lost, damaged, or of another grant
        {"kill": 3, "stop": 3, "hang": 1, "slow": 2, "delay": 2, "partition": 2, "reset": 3, "drain": 1},
        transports=("tcp",),
        blocks=(12, 14, 24),
        step_s=(0.005, 0.015),
        chunks=(4, 8),
        burst_s=0.6,
        leave=0.25,
        turns=0.3,
        groups=0.0,
        tiered=0.0,
        shares=True,
    ),
    "tiers": Theme(  # prefixes that pools have lost to tiers, while these and their workers fail
        {
            "kill": 4,
            "stop": 1,
            "slow": 2,
            "drain": 2,
            "reset": 1,
            "flush_cache": 2,
            "distrust": 2,
            "tier_flip": 5,
            "tier_cut": 2,
            "tier_swap": 2,
            "tier_vanish": 2,
            "tier_full": 2,
            "tier_slow": 3,
        },
        blocks=(12, 14, 16),
        step_s=(0.002, 0.005, 0.015),
        leave=0.05,
        burst_s=1.9,
        requests=(14, 22),
        turns=0.8,
        tiered=1.0,
        groups=0.0,
    ),
    "crowd": Theme(  # too little memory for the requests
        {"kill": 1, "stop": 1, "reset": 1, "repeat": 2, "slow": 2, "flush_cache": 2},
        blocks=(12,),
        burst_s=0.1,
        leave=0.15,
    ),
}
HOSTED = Theme(  # processes of two workers, which die, hang and are fenced together
    {"kill": 4, "stop": 3, "slow": 1, "drain": 2, "reset": 2, "repeat": 1, "flush_cache": 1},
    transports=("shared_memory",),
    blocks=(12, 16, 24),
    step_s=(0.005, 0.02),
    chunks=(4, 8),
    groups=0.0,
    tiered=0.0,
    hosted=True,
)
"""Theme of its own campaign: it is drawn for no seed of the others."""
TIERED_GROUPS = replace(THEMES["tiers"], groups=1.0)
"""The same for workers of several processes that map one memory."""
TIERED_SHARES = replace(THEMES["shares"], turns=0.8, tiered=1.0, requests=(10, 16), leave=0.05, burst_s=1.5)
"""The same for workers whose ranks have memories of their own."""
