"""Table of the APIs: a line each, medians over the rounds, and each one's throughput beside that of gRPC."""

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
    apis = list(dict.fromkeys(sample.api for sample in samples))
    by_api = {api: [sample for sample in samples if sample.api == api] for api in apis}
    speed = {api: statistics.median(one.tokens_per_s for one in ones) for api, ones in by_api.items()}
    lines = [
        f"{title}; medians of {len(samples) // len(apis)} interleaved rounds (smallest–largest).",
        "",
        f"| api | {' | '.join(heading for heading, _, _ in _COLUMNS)} | tokens/s of gRPC's |",
        f"|---{'|---' * (len(_COLUMNS) + 1)}|",
    ]
    for api, ones in by_api.items():
        cells = [
            median_and_range([getattr(one, name) for one in ones], digits) for _, name, digits in _COLUMNS
        ]
        share = f"{100 * speed[api] / speed[REFERENCE]:.1f}%" if REFERENCE in speed else ""
        lines.append(f"| {api} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines)
