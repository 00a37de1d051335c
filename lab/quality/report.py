"""The table and the file: figures of each precision, and whether it passes the bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lab.quality.divergence import Quality

WORST_RATIO = 1.01
"""The bar: perplexity within 1% of what the same weights give in fp32, their own precision."""


def passes(quality: Quality) -> bool:
    """Return whether a precision may be the default."""
    return quality.perplexity_ratio <= WORST_RATIO


def markdown(found: Mapping[str, Quality], about: Mapping[str, Any]) -> str:
    """Render a table with a row for each precision, and what it was measured on."""
    lines = [
        f"Model: {about['model']} ({about['backend']} backend). Text: {about['source']}, {about['licence']}, "
        f"sha256 {about['sha256'][:16]}…; {about['windows']} windows of {about['window']} tokens.",
        "",
        "| dtype | perplexity | of fp32 (95% interval) | mean KL, nats | top-1 agreement "
        f"| within {WORST_RATIO - 1:.0%} |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {one.perplexity:.3f} | {one.perplexity_ratio:.4f} ± {one.ratio_error:.4f} "
        f"| {one.mean_kl:.5f} | {one.top1_agreement:.2%} | {'yes' if passes(one) else '**no**'} |"
        for name, one in found.items()
    ]
    tokens = next(iter(found.values())).tokens
    return "\n".join([*lines, "", f"{tokens:,} predicted tokens each."])


def as_object(found: Mapping[str, Quality], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description, the bar and the figures for a JSON file."""
    return {
        **about,
        "worst_ratio": WORST_RATIO,
        "precisions": {name: {**asdict(one), "passes": passes(one)} for name, one in found.items()},
    }
