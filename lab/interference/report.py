"""The tables: figures of each system, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

from lab.interference.systems import APART, LENDING, WIDE
from lab.interference.targets import START, Round, Target, medians, spread, targets

OTHERS = "others_percent"

_SYSTEMS = (
    (APART, "cores apart"),
    (LENDING, "cores lent (default)"),
    (WIDE, "all cores to either"),
)
_FIGURES = (
    ("8 streams alone, ITL p50 ms", "median_itl_alone_ms", 1),
    ("8 streams alone, ITL p99 ms", "p99_itl_alone_ms", 1),
    ("8 streams beside prompts, ITL p50 ms", "median_itl_beside_ms", 1),
    ("8 streams beside prompts, ITL p99 ms", "p99_itl_beside_ms", 1),
    ("one stream alone, ITL p50 ms", "median_itl_one_ms", 1),
    ("512-token prompts alone, tokens/s", "prompt_throughput_alone", 0),
    ("512-token prompts beside streams, tokens/s", "prompt_throughput_beside", 0),
    ("lone 512-token prompt, TTFT p50 ms", "median_ttft_prompt_ms", 0),
    ("2,008-token prompt, TTFT ms", "median_ttft_cold_ms", 0),
    ("the same with 2,000 tokens cached, TTFT ms", "median_ttft_cached_ms", 0),
    ("start until ready, s", START, 1),
    ("cores that others used meanwhile, %", OTHERS, 0),
)


def markdown(rounds: Sequence[Round], title: str) -> str:
    """Medians over the rounds, (smallest–largest) beside them."""
    systems = [(name, heading) for name, heading in _SYSTEMS if any(name in one for one in rounds)]
    lines = [
        f"{title}; medians of {len(rounds)} rounds (smallest–largest).",
        "",
        "| | " + " | ".join(heading for _, heading in systems) + " |",
        "|---" * (len(systems) + 1) + "|",
    ]
    for label, figure, digits in _FIGURES:
        cells = [_cell(rounds, name, figure, digits) for name, _ in systems]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "| target | | measured (rounds) | met |", "|---|---|---|---|"]
    lines += [_target(one) for one in targets(rounds)]
    return "\n".join(lines)


def _cell(rounds: Sequence[Round], system: str, figure: str, digits: int) -> str:
    middle, ends = medians(rounds, system).get(figure), spread(rounds, system, figure)
    if middle is None or ends is None:
        return "–"
    beside = f" ({ends[0]:.{digits}f}–{ends[1]:.{digits}f})" if len(rounds) > 1 else ""
    return f"{middle:.{digits}f}{beside}"


def _target(one: Target) -> str:
    if one.value is None:
        return f"| {one.what} | {one.direction} {one.bound:g} | not measured | – |"
    each = ", ".join(f"{value:.2f}" for value in one.values)
    beside = f" ({each})" if len(one.values) > 1 else ""
    return (
        f"| {one.what} | {one.direction} {one.bound:g} | {one.value:.2f}{beside} "
        f"| {'yes' if one.met else '**no**'} |"
    )
