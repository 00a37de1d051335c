"""Targets of the GPU step, and which of them a run shows: met, missed, or not measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["met", "missed", "unmeasured"]


@dataclass(frozen=True)
class Target:
    """A bound that figures of one section are held against."""

    text: str
    section: str = ""
    """Section that measures it; empty where none does."""
    figures: str = ""
    """Pattern of the whole name of its figures."""
    at_least: float = 0.0
    """Bound on the ratio; on the bound that a figure was made with where it is 0."""
    count: int = 1
    """Figures that must be there."""


_SHOWN = 1e-9
"""Bound of what is to be measured, whatever it is."""

TARGETS = (
    Target(
        "8B bf16, 16 and 64 clients: 1.05 of vLLM's tokens/s", "beside", r"(16|64) clients, tokens/s", 1.05, 2
    ),
    Target("8B bf16, TTFT p50 at most half of vLLM's", "beside", r"(16|64) clients, TTFT p50", 2.0, 2),
    Target("8B bf16, ITL p99 at most a quarter of vLLM's", "beside", r"(16|64) clients, ITL p99", 4.0, 2),
    Target("8B bf16, one client: 1.15 of vLLM's tokens/s", "beside", r"1 clients, tokens/s", 1.15),
    Target("8B FP8, 16 and 64 clients: vLLM's tokens/s", "beside fp8", r"(16|64) clients, tokens/s", 1.0, 2),
    Target("FP8 products of 2,048 rows: 1.4 of bf16's speed", "quantised", r".*, FP8, 2048 rows", 1.4),
    Target(
        "4 bits, products of one row: twice bf16's", "quantised", r".*, 4 bits, groups of 128, 1 rows", 2.0
    ),
    Target("4 bits, a step of one row: half of bf16's", "quantised steps", r"8B in 4 bits, .* 1 rows", 2.0),
    Target("4 bits, 16 clients: vLLM's tokens/s with Marlin", "beside 4 bits", r"16 clients, tokens/s", 1.0),
    Target("4 bits: weights at most 1.1 of the files", "beside 4 bits", r"weights of process .*"),
    Target(
        "decode step of 8B at batch 1, 8, 16 and 64: 0.80 of the roofline", "model step",
        r"Llama-3-8B decode step, batch (1|8|16|64), .*", 0.80, 4,
    ),
    Target("prefill of 8,192: 0.82 of products' rate", "model step", r"Llama-3-8B prefill of 8192 .*", 0.82),
    Target("8B, a prompt of 128: 2.1 times its bytes", "short prompts", r"Llama-3-8B, 128 tokens", 1 / 2.1),
    Target("bundled model, lone prompt of 128: 10 ms", "short prompts", r"SmolLM2-135M, 128 tokens"),
    Target("block conversion: 0.85 of a copy", "block copies", r"convert_blocks, .*", 0.85, 2),
    Target(
        "batch-invariant: no form of a token differs", "batch invariance", r"batch-invariant: forms .*"
    ),
    Target(
        "a killed hosting process, and a CUDA fault in it, with 64 streams: all go on", "faults",
        r".*: answers that failed or have other tokens", count=2,
    ),
    Target("greedy text of 30 prompts: that of transformers in fp32", "greedy text", r"prompts whose .*"),
    Target("KL of FP8 and 4 bits: at most 0.002", "divergence", r"mean KL of (FP8|4 bits)", count=2),
    Target("30B of experts at 1, 16 and 64 rows: shown", "expert steps", r".*", _SHOWN, 3),
    Target(
        "30B of experts, 16 clients beside vLLM: shown", "beside experts", r"16 clients, tokens/s", _SHOWN
    ),
    Target("`make test-gpu` whole"),
)  # fmt: skip


def verdicts(sections: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Target, Verdict, str]]:
    """Yield each target with its verdict and the figures that it rests on.

    `sections` are those of the JSON that results.py writes; of figures of one name the last one counts. A
    target with too few figures is met by none of them, and missed by one.
    """
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for section in sections:
        for figure in section["figures"]:
            found[section["section"], figure["name"]] = figure
    for target in TARGETS:
        own = [
            figure
            for (section, name), figure in found.items()
            if target.section and section == target.section and re.fullmatch(target.figures, name)
        ]
        yield target, _verdict(target, own), "; ".join(map(_shown, own))


def _verdict(target: Target, own: list[Mapping[str, Any]]) -> Verdict:
    held = [passed for figure in own if (passed := _holds(target, figure)) is not None]
    if False in held:
        return "missed"
    return "met" if len(held) >= target.count else "unmeasured"


def _holds(target: Target, figure: Mapping[str, Any]) -> bool | None:
    """Return whether a figure reaches the target; None where it has nothing to be held against."""
    if not target.at_least:
        met = figure["met"]
        return None if met is None else bool(met)
    ratio = figure["ratio"]
    return None if ratio is None else float(ratio) >= target.at_least


def _shown(figure: Mapping[str, Any]) -> str:
    ratio = figure["ratio"]
    return f"{figure['name']} {figure['value']:.4g} {figure['unit']}" + (
        "" if ratio is None else f" ({ratio:.2f})"
    )


def markdown(sections: Iterable[Mapping[str, Any]]) -> str:
    """Render the verdicts as a table."""
    lines = ["## Targets", "", "| what | verdict | figures |", "|---|---|---|"]
    for target, verdict, shown in verdicts(sections):
        lines.append(f"| {target.text} | {verdict} | {shown.replace('|', '/')} |")
    return "\n".join([*lines, ""])
