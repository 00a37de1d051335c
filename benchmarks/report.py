"""What people read after a run: a table, and a warning for everything that makes a figure less worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.campaign import LoadResult
from benchmarks.measurement import Figures

_CACHED_SHARE = 0.05  # of prompts that share nothing: more than a block or two by chance


def table(results: Sequence[LoadResult]) -> Table:
    """One row a load: medians over the rounds, throughput with its spread."""
    rounds = len(results[0].rounds) if results else 0
    shown = Table(caption=f"median of {rounds} rounds (smallest–largest)" if rounds > 1 else None)
    has = _columns(results)
    shown.add_column("load")
    shown.add_column("req/s", justify="right")
    if "goodput" in has:
        shown.add_column("goodput req/s", justify="right")
    shown.add_column("out tok/s", justify="right")
    shown.add_column("total tok/s", justify="right")
    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        shown.add_column(f"{name} ms\np50 / p90 / p99", justify="right")
    if "handover" in has:
        shown.add_column("hand-over ms\np50 / p99", justify="right")
        shown.add_column("KV transfer ms\np50 / p99", justify="right")
    shown.add_column("failed", justify="right")
    for result in results:
        shown.add_row(*_row(result, has))
    return shown


def warnings(results: Sequence[LoadResult], *, shares_nothing: bool) -> Iterator[str]:
    """Each in one sentence. `shares_nothing`: the prompts had no common prefixes to be found in a cache."""
    for result in results:
        figures, label = result.medians(), result.load.label
        for code, count in result.errors().items():
            yield f"{label}: {count} requests failed with {code}; e.g. {_example(result, code)}"
        if figures["short_outputs"]:
            yield f"{label}: {figures['short_outputs']:.0f} answers were shorter than asked for"
        cached, prompted = figures["total_cached_tokens"] or 0.0, figures["total_input_tokens"] or 0.0
        if shares_nothing and cached > _CACHED_SHARE * prompted:
            yield (
                f"{label}: {cached / prompted:.0%} of the prompts' tokens came out of a prefix cache; "
                "an earlier run had the same prompts, so give another --seed"
            )
        yield from _generator_warnings(result, figures)


def _generator_warnings(result: LoadResult, figures: Figures) -> Iterator[str]:
    verdict = result.bottleneck()
    lag, loop = result.spread()["generator_lag_p99_ms"][1], result.spread()["generator_loop_share"][1]
    if verdict == "busy":
        yield (
            f"{result.load.label}: THE GENERATOR WAS THE BOTTLENECK: its event loop used {loop:.0%} "
            "of a core; the server may do better than these figures"
        )
    elif verdict == "starved":
        yield (
            f"{result.load.label}: the generator waited for a core (event loop late by {lag:.1f} ms at p99, "
            f"busy {loop:.0%} of the time): latencies below that are not resolved"
        )


def _row(result: LoadResult, has: set[str]) -> list[str]:
    figures = result.medians()
    row = [result.load.label, _number(figures["request_throughput"], 2)]
    if "goodput" in has:
        row.append(_number(figures["request_goodput"], 2))
    row += [_with_spread(result, "output_throughput"), _number(figures["total_token_throughput"], 0)]
    for name, digits in (("ttft", 1), ("itl", 2), ("tpot", 2), ("e2el", 0)):
        row.append(_percentiles(figures, name, ("median", "p90", "p99"), digits))
    if "handover" in has:
        row += [_percentiles(figures, name, ("median", "p99"), 2) for name in ("handover", "kv_transfer")]
    return [*row, _number(figures["failed"], 0)]


def _columns(results: Sequence[LoadResult]) -> set[str]:
    medians = [one.medians() for one in results]
    optional = {"goodput": "request_goodput", "handover": "median_handover_ms"}
    return {column for column, name in optional.items() if any(one.get(name) is not None for one in medians)}


def _with_spread(result: LoadResult, name: str) -> str:
    middle = _number(result.medians()[name], 0)
    if len(result.rounds) < 2:
        return middle
    low, high = result.spread()[name]
    return f"{middle} ({low:.0f}–{high:.0f})"


def _percentiles(figures: Figures, name: str, kinds: Sequence[str], digits: int) -> str:
    return " / ".join(_number(figures.get(f"{kind}_{name}_ms"), digits) for kind in kinds)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _example(result: LoadResult, code: str) -> str:
    errors = (one.error for run in result.runs for one in run.outcomes)
    return next((error.message for error in errors if error is not None and error.code == code), "")
