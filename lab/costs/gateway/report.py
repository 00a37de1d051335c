"""The table: a line a door, medians over the rounds, and each door's throughput beside that of gRPC."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lab.costs.gateway.measure import Sample
from lab.spread import median_and_range

_COLUMNS = (
    ("tokens/s", "tokens_per_s", 0),
    ("gateway CPU µs a token", "cpu_us_per_token", 0),
    ("ITL p50 ms", "itl_p50_ms", 1),
    ("ITL p99 ms", "itl_p99_ms", 1),
)
REFERENCE = "grpc"


def markdown(samples: Sequence[Sample], title: str) -> str:
    """(smallest–largest) beside each median."""
    doors = list(dict.fromkeys(sample.door for sample in samples))
    by_door = {door: [sample for sample in samples if sample.door == door] for door in doors}
    speed = {door: statistics.median(one.tokens_per_s for one in ones) for door, ones in by_door.items()}
    lines = [
        f"{title}; medians of {len(samples) // len(doors)} interleaved rounds (smallest–largest).",
        "",
        f"| door | {' | '.join(heading for heading, _, _ in _COLUMNS)} | tokens/s of gRPC's |",
        f"|---{'|---' * (len(_COLUMNS) + 1)}|",
    ]
    for door, ones in by_door.items():
        cells = [
            median_and_range([getattr(one, name) for one in ones], digits) for _, name, digits in _COLUMNS
        ]
        share = f"{100 * speed[door] / speed[REFERENCE]:.1f}%" if REFERENCE in speed else ""
        lines.append(f"| {door} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines)
