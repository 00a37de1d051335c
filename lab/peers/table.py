"""The results as Markdown: absolute figures, then ratios beside their targets, misses said plainly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.peers.cells import PREFILL, QUEUED, START, STREAMS, TEXT, closed_loop
from lab.peers.servers import Server
from lab.peers.shapes import Shape
from lab.peers.summary import Best, Summary
from lab.peers.targets import Limits, Target


@dataclass(frozen=True)
class Report:
    """Contents of the page."""

    title: str
    method: str
    environment: Mapping[str, Any]
    servers: Sequence[Server]
    concurrencies: Sequence[int]
    summary: Summary
    targets: Mapping[str, Sequence[Target]]
    """Targets by the one of ours that is judged."""
    limits: Limits | None
    faults: Mapping[str, str]
    shapes: Sequence[Shape] = ()


def markdown(report: Report) -> str:
    parts = [
        f"# {report.title}",
        report.method,
        _environment(report),
        "## Closed loop",
        *(_closed(report, closed_loop(clients)) for clients in report.concurrencies),
        *(_shapes(report) if report.shapes else []),
        "## Prefill, interference, start-up",
        _others(report),
        "## Ratios and targets",
        *(part for path, judged in report.targets.items() for part in _judgement(path, judged)),
        *([_faults(report.faults)] if report.faults else []),
        "## Command lines",
        _commands(report.servers),
    ]
    return "\n\n".join(parts) + "\n"


def _environment(report: Report) -> str:
    rows = [[name, _told(value)] for name, value in report.environment.items()]
    if report.limits is not None:
        peak, prompts = report.limits.bf16_flops / 1e9, report.limits.prompts_per_s
        rows.append(["bf16 peak, all cores", f"{peak:.0f} GFLOP/s: {512 * prompts:.0f} prompt tokens/s"])
    busy = [
        _spread(report.summary, one.name, load, "busy_before_share", 100, 0) for one, load in _texts(report)
    ]
    steal = [_spread(report.summary, one.name, load, "steal_share", 100, 0) for one, load in _texts(report)]
    rows.append(["cores in use by others before a turn, %", ", ".join(busy)])
    rows.append(["stolen by the hypervisor, %", ", ".join(steal)])
    return _table(["", ""], rows)


def _texts(report: Report) -> list[tuple[Server, str]]:
    load = closed_loop(report.concurrencies[-1])
    return [(one, load) for one in report.servers]


def _closed(report: Report, load: str) -> str:
    head = [load, "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "TPOT p50", "failed", "inexact"]
    figures = [
        ("output_throughput", 0),
        ("median_ttft_ms", 0),
        ("p99_ttft_ms", 0),
        ("median_itl_ms", 1),
        ("p99_itl_ms", 1),
        ("median_tpot_ms", 1),
        ("failed", 0),
        ("inexact", 0),
    ]
    return _table(head, _rows(report, [(load, *figure) for figure in figures]))


_COMPARED = [
    ("tokens/s", "output_throughput"),
    ("TTFT p50", "median_ttft_ms"),
    ("ITL p50", "median_itl_ms"),
    ("ITL p99", "p99_itl_ms"),
    ("whole answer p50", "median_e2el_ms"),
]


def _shapes(report: Report) -> Iterator[str]:
    """Every figure, and each of ours in figures of the vLLM that has most tokens a second there."""
    yield "## Other lengths (in + out, tokens)"
    ours = [one.name for one in report.servers if one.family == "diptych"]
    peers = [one.name for one in report.servers if one.family == "vllm"]
    rows = []
    for load in (shape.load for shape in report.shapes):
        yield _closed(report, load)
        best = report.summary.highest(peers, load, "output_throughput")
        if best is None:
            continue
        for name in ours:
            ratios = _ratios(report.summary, name, best.server, load)
            rows.append([f"{load}: {name} / {best.server}", *ratios])
    if rows:
        yield _table(["ratios of medians", *(what for what, _ in _COMPARED)], rows)


def _ratios(summary: Summary, ours: str, theirs: str, load: str) -> list[str]:
    pairs = [(summary.median(ours, load, name), summary.median(theirs, load, name)) for _, name in _COMPARED]
    return ["–" if a is None or not b else f"{a / b:.2f}" for a, b in pairs]


def _others(report: Report) -> str:
    head = [
        "",
        "prefill tokens/s",
        "ITL p50 alone",
        "p99 alone",
        "p50 beside",
        "p99 beside",
        "tokens/s beside",
        "p99 beside a queue",
        "tokens/s of the queue",
    ]
    figures = [
        (PREFILL, "prefill_throughput", 0),
        (STREAMS, "median_itl_alone_ms", 1),
        (STREAMS, "p99_itl_alone_ms", 1),
        (STREAMS, "median_itl_beside_ms", 1),
        (STREAMS, "p99_itl_beside_ms", 1),
        (STREAMS, "prompt_throughput_beside", 0),
        (QUEUED, "p99_itl_beside_ms", 1),
        (QUEUED, "prompt_throughput_beside", 0),
        (START, "start_s", 1),
        (TEXT, "right_answers", 0),
    ]
    return _table([*head, "start-up s", "Paris"], _rows(report, figures))


def _rows(report: Report, figures: Sequence[tuple[str, str, int]]) -> Iterator[list[str]]:
    for server in report.servers:
        cells = [_spread(report.summary, server.name, *one[:2], 1, one[2]) for one in figures]
        if any(cell != "–" for cell in cells):
            yield [server.name, *cells]


def _judgement(path: str, judged: Sequence[Target]) -> list[str]:
    return [f"### {path}", _targets(judged), _misses(judged)]


def _targets(targets: Sequence[Target]) -> str:
    rows = [
        [
            one.what,
            f"{'≥' if one.direction == 'at least' else '≤'} {one.bound:g}",
            "–" if one.ratio is None else f"{one.ratio:.2f}",
            {True: "met", False: "**missed**", None: "not measured"}[one.met],
            _best(one.ours),
            _best(one.theirs),
        ]
        for one in targets
    ]
    return _table(["what", "target", "measured", "", "ours", "theirs"], rows)


def _misses(targets: Sequence[Target]) -> str:
    missed = [one for one in targets if one.met is False]
    if not missed:
        return "No target that was measured is missed."
    said = (f"- {one.what}: {one.ratio:.2f}, to be {one.direction} {one.bound:g}." for one in missed)
    return "Missed:\n\n" + "\n".join(said)


def _faults(faults: Mapping[str, str]) -> str:
    told = (f"- {name}: {reason.splitlines()[0]}" for name, reason in faults.items())
    return "Left out, because it failed:\n\n" + "\n".join(told)


def _commands(servers: Sequence[Server]) -> str:
    lines = []
    for one in servers:
        variables = [f"{name}={value}" for name, value in one.environment.items()]
        lines.append(f"# {one.name}\n{' '.join([*variables, *one.arguments])}")
    return "```\n" + "\n".join(lines) + "\n```"


def _spread(summary: Summary, server: str, load: str, figure: str, factor: float, digits: int) -> str:
    seen = summary.spread(server, load, figure)
    if seen is None:
        return "–"
    middle, low, high = (f"{factor * value:.{digits}f}" for value in (seen.median, seen.lowest, seen.highest))
    return middle if low == high == middle or figure in ("failed", "inexact") else f"{middle} ({low}–{high})"


def _best(best: Best | None) -> str:
    return "–" if best is None else f"{best.value:.1f} ({best.server})"


def _told(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(f"{one:.1f}" if isinstance(one, float) else str(one) for one in value)
    return str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
