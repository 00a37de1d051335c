"""The figures of an overload beside what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.bench.figures import percentile
from lab.overload.phases import Phase, Played

TTFT_FACTOR = 2.0
GOODPUT_SHARE = 0.95
REFUSAL_MS = 20.0
REFUSAL_CODES = frozenset({"QUEUE_FULL", "DEADLINE_UNATTAINABLE"})


@dataclass(frozen=True)
class Line:
    """Figure with its target, and whether it is met."""

    name: str
    measured: str
    target: str
    met: bool


def lines(played: Played) -> list[Line]:
    """Return the lines of accepted, of all, and of refused requests, and of the time after."""
    high, over, after = (_p99_ms(phase.ttfts) for phase in (played.high, played.over, played.after))
    limit = TTFT_FACTOR * high
    share = played.over.tokens_per_s / played.peak.tokens_per_s
    refusal = _p99_ms(played.over.refusals)
    strange = played.over.codes - REFUSAL_CODES
    refused_later = len(played.after.refusals)
    return [
        Line("TTFT p99 of those taken", f"{over:.0f} ms", f"at most {limit:.0f} ms", over <= limit),
        Line("goodput", f"{share:.0%} of peak", f"at least {GOODPUT_SHARE:.0%}", share >= GOODPUT_SHARE),
        Line("refusal p99", f"{refusal:.1f} ms", f"at most {REFUSAL_MS:.0f} ms", not refusal > REFUSAL_MS),
        Line("other errors", ", ".join(sorted(strange)) or "none", "none", not strange),
        Line(
            "from 2 s after it",
            f"TTFT p99 {after:.0f} ms, {refused_later} of {len(played.after.outcomes)} refused",
            f"at most {limit:.0f} ms, as many as before ({len(played.high.refusals)})",
            after <= limit and refused_later <= len(played.high.refusals),
        ),
    ]


def table(played: Played, found: Sequence[Line]) -> str:
    """Markdown: the phases, then the figures."""
    rows = [
        f"capacity {played.rate:.2f} requests/s, {played.peak.tokens_per_s:.0f} output tokens/s",
        "",
        "| load | sent | answered | refused | output tokens/s | TTFT p50 | TTFT p99 | refusal p99 |",
        "|---|---|---|---|---|---|---|---|",
        *(
            _row(name, phase)
            for name, phase in (
                ("capacity (closed)", played.peak),
                ("high", played.high),
                ("overload", played.over),
                ("after it", played.after),
            )
        ),
        "",
        "| figure | measured | target | |",
        "|---|---|---|---|",
        *(
            f"| {one.name} | {one.measured} | {one.target} | {'met' if one.met else 'missed'} |"
            for one in found
        ),
    ]
    return "\n".join(rows)


def _row(name: str, phase: Phase) -> str:
    ttfts = phase.ttfts
    cells = (
        name,
        len(phase.outcomes),
        len(ttfts),
        len(phase.refusals),
        f"{phase.tokens_per_s:.0f}",
        f"{1000 * percentile(ttfts, 50):.0f} ms",
        f"{_p99_ms(ttfts):.0f} ms",
        f"{_p99_ms(phase.refusals):.1f} ms",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _p99_ms(ordered: Sequence[float]) -> float:
    return 1000 * percentile(ordered, 99)
