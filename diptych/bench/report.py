"""Report of a run: tables, and a warning for everything that makes a figure less worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from diptych.bench.campaign import LoadResult
from diptych.bench.measurement import Figures

_CACHED_SHARE = 0.05  # of prompts that share nothing: more than a block or two by chance
_OTHER_SEED = "an earlier run had the same prompts, so give another --seed"
_SAME_FILE = "the same prompts came in an earlier load, round or run, or they begin alike"
# Why prompts were known, by dataset; those of other datasets share prefixes on purpose.
_CACHED_BECAUSE = {
    "random": _OTHER_SEED, "azure": _OTHER_SEED, "prompts": _SAME_FILE, "sharegpt": _SAME_FILE
}  # fmt: skip
_STEAL_SHARE = 0.02  # of the machine: beyond it the slowest of a hundred tokens may be such a pause

_LATENCIES = (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2el"))
_SERVER_TIMES = (
    ("handoff", "handoff"),
    ("KV transfer", "kv_transfer"),
    ("queue", "server_queue"),
    ("prefill", "server_prefill"),
)


def tables(results: Sequence[LoadResult]) -> Iterator[Table]:
    """Yield tables with a row a load: rates, latencies, and the times that a Diptych server reports."""
    figures = [one.figures() for one in results]
    if not results:
        return
    rounds = len(results[0].rounds)
    rates = _table("load", "req/s", "out tok/s", "per user", "total tok/s", "failed")
    rates.title = "throughput" if rounds == 1 else f"throughput, median of {rounds} rounds (smallest–largest)"
    with_cached = any(one["total_cached_tokens"] for one in figures)
    if with_cached:
        rates.add_column("cached", justify="right")
    with_goodput = any(one["request_goodput"] is not None for one in figures)
    if with_goodput:
        rates.add_column("goodput req/s", justify="right")
    with_price = any("dollars_per_million_output_tokens" in one for one in figures)
    if with_price:
        rates.add_column("$/M out tok", justify="right")
    for result, known in zip(results, figures, strict=True):
        cells = [_with_spread(result, "request_throughput", 2), _with_spread(result, "output_throughput", 0)]
        failed = f"{known['failed']:.0f} of {result.requests}" if known["failed"] else "0"
        cells += [_number(known["output_throughput_per_user"], 1)]
        cells += [_number(known["total_token_throughput"], 0), failed]
        if with_cached:
            cells.append(f"{_cached_share(known):.0%}")
        if with_goodput:
            cells.append(_with_spread(result, "request_goodput", 2))
        if with_price:
            cells.append(_number(known["dollars_per_million_output_tokens"], 2))
        rates.add_row(result.load.label, *cells)
    yield rates
    yield _latency_table("latency, ms: p50/p90/p99", results, figures, _LATENCIES)
    if any(one.get("median_handoff_ms") is not None for one in figures):
        yield _latency_table("in the server, ms: p50/p90/p99", results, figures, _SERVER_TIMES)


def warnings(results: Sequence[LoadResult], dataset: str) -> Iterator[str]:
    """Yield warnings of a sentence each. `dataset` is the name of that which the prompts came from."""
    for result in results:
        figures, label = result.figures(), result.load.label
        for code, count in result.errors().items():
            yield f"{label}: failed requests: {count} × {code}, e.g. {_example(result, code)}"
        answered = sum(bool(one.figures["completed"]) for one in result.rounds)
        if 0 < answered < len(result.rounds):
            yield (
                f"{label}: no request was answered in {len(result.rounds) - answered} of "
                f"{len(result.rounds)} rounds: latencies are of the others, rates of all"
            )
        if figures["short_outputs"]:
            yield f"{label}: answers shorter than asked for: {figures['short_outputs']:.0f}"
        cached, cause = _cached_share(figures), _CACHED_BECAUSE.get(dataset)
        if cause is not None and cached > _CACHED_SHARE:
            yield f"{label}: {cached:.0%} of the prompts' tokens came out of a prefix cache; {cause}"
        yield from _generator_warnings(result, figures)
        if (stolen := result.spread()["steal_share"][1]) > _STEAL_SHARE:
            yield (
                f"{label}: the hypervisor gave up to {stolen:.0%} of this machine's CPU time to other "
                "guests: the tails are theirs as well"
            )


def _cached_share(figures: Figures) -> float:
    return (figures["total_cached_tokens"] or 0) / (figures["total_input_tokens"] or 1)


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


def _latency_table(
    title: str,
    results: Sequence[LoadResult],
    figures: Sequence[Figures],
    lines: Sequence[tuple[str, str]],
) -> Table:
    made = _table("load", *(heading for heading, _ in lines))
    made.title = title
    for result, known in zip(results, figures, strict=True):
        made.add_row(result.load.label, *(_percentiles(known, name) for _, name in lines))
    return made


def _table(*headings: str) -> Table:
    made = Table(box=box.SIMPLE, title_justify="left")
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return made


def _with_spread(result: LoadResult, name: str, digits: int) -> str:
    middle = _number(result.figures()[name], digits)
    if len(result.rounds) < 2 or name not in result.spread():
        return middle
    low, high = result.spread()[name]
    return f"{middle} ({low:.{digits}f}–{high:.{digits}f})"


def _percentiles(figures: Figures, name: str) -> str:
    values = [figures.get(f"{kind}_{name}_ms") for kind in ("median", "p90", "p99")]
    return "/".join(_number(value, _digits(value or 0.0)) for value in values)


def _digits(value: float) -> int:
    """Return the decimals that keep three significant digits."""
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _example(result: LoadResult, code: str) -> str:
    errors = (one.error for run in result.runs for one in run.outcomes)
    return next((error.message for error in errors if error is not None and error.code == code), "")
