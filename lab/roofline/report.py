"""Tables of an engine's figures, with the roofline beside each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
"""Run of one precision with one number of threads, as it lies in the file (see record.py)."""


def markdown(runs: Sequence[Run]) -> str:
    """Render ceilings, decode steps and prefill rates of each run."""
    return "\n\n".join(section for run in runs for section in _sections(run))


def _sections(run: Run) -> Iterable[str]:
    threads = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}"
    yield f"### {run['dtype']}, {threads}"
    peak = run["ceilings"]["peaks"][run["format"]]
    yield (
        f"Memory is read at {run['ceilings']['read_rate'] / 1e9:.1f} GB/s, {run['format']} is multiplied at "
        f"{peak['rate'] / 1e9:.0f} GOP/s ({_reached(peak['by'])}); a step reads "
        f"{run['weight_bytes'] / 1e6:.0f} MB of weights. {run['backend']} backend."
    )
    decodes = [point for point in run["points"] if point["kind"] == "decode"]
    if decodes:
        yield _decode_table(decodes)
    prefills = [point for point in run["points"] if point["kind"] == "prefill"]
    if prefills:
        yield _prefill_table(prefills, peak["rate"])


def _reached(by: str) -> str:
    return "a loop in registers" if by == "registers" else "the best matrix product of torch"


def _decode_table(points: Sequence[Mapping[str, Any]]) -> str:
    contexts = sorted({point["tokens"] for point in points})
    batches = sorted({point["batch"] for point in points})
    found = {(point["batch"], point["tokens"]): point for point in points}
    lines = [
        "Decode: ms a step (ms of the roofline: m memory, a arithmetic; how much of the roof's speed)",
        "",
        "| batch | " + " | ".join(f"context {context:,}" for context in contexts) + " |",
        "|---" * (len(contexts) + 1) + "|",
    ]
    for batch in batches:
        cells = [_decode_cell(found.get((batch, context))) for context in contexts]
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _decode_cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "–"
    step, roof = 1000 * point["seconds"], 1000 * point["roof_seconds"]
    return f"{step:.1f} ({roof:.1f} {point['bound'][0]}, {roof / step:.0%})"


def _prefill_table(points: Sequence[Mapping[str, Any]], peak: float) -> str:
    lines = [
        "| prefill of | ms | tokens/s | roofline tokens/s | of the roof's speed | of the arithmetic peak |",
        "|---|---|---|---|---|---|",
    ]
    for point in sorted(points, key=lambda one: one["tokens"]):
        tokens, seconds, roof = point["tokens"], point["seconds"], point["roof_seconds"]
        share = point["products"] / seconds / peak
        lines.append(
            f"| {tokens:,} | {1000 * seconds:.0f} | {tokens / seconds:,.0f} | {tokens / roof:,.0f} "
            f"| {roof / seconds:.0%} | {share:.0%} |"
        )
    return "\n".join(lines)
