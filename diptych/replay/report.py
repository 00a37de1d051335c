"""Table and picture of replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table

from diptych.replay.result import PERCENTILES, ReplayResult
from diptych.replay.sweep import best_result

HOUR_S, MILLION = 3600.0, 1e6


def replay_report(results: Sequence[ReplayResult], dollars_an_hour: float | None = None) -> Group:
    """Return a table with a column for each replay. `dollars_an_hour`: price of one worker."""
    table = Table(title="Replay", title_justify="left")
    table.add_column("prefill : decode workers")
    for one in results:
        table.add_column(f"{one.fleet.prefill} : {one.fleet.decode}", justify="right")
    rows: list[tuple[str, Callable[[ReplayResult], str]]] = [
        ("offered, requests/s", lambda one: f"{one.rate:.3f}"),
        ("goodput a worker, requests/s", lambda one: f"{one.goodput_per_worker:.3f}"),
        ("within the service level", lambda one: f"{one.attainment:.1%}"),
        ("answered / refused / too long", lambda one: f"{one.completed} / {one.refused} / {one.too_long}"),
        ("output tokens/s", lambda one: f"{one.output_tokens / max(one.last_s, 1e-9):,.0f}"),
        ("TTFT p50 / p90 / p99, ms", lambda one: _three(one, "ttft")),
        ("ITL p50 / p90 / p99, ms", lambda one: _three(one, "itl")),
        ("cached prompt tokens", lambda one: f"{one.hit_rate:.1%}"),
        ("the best worker had", lambda one: f"{one.best_hit_rate:.1%}"),
        ("prefill / decode workers busy", lambda one: f"{one.prefill_busy:.0%} / {one.decode_busy:.0%}"),
        ("streams of a decode step", lambda one: f"{one.mean_batch:.1f}"),
        ("prompts of decode workers", lambda one: f"{one.local}"),
        ("preempted", lambda one: f"{one.preempted}"),
    ]
    if dollars_an_hour is not None:
        rows.append(("dollars a million output tokens", lambda one: _dollars(one, dollars_an_hour)))
    for name, figure in rows:
        table.add_row(name, *(figure(one) for one in results))
    return Group(table, *_advice(results))


def save_replay_plot(path: Path, results: Sequence[ReplayResult], title: str) -> None:
    """Draw goodput a worker, latencies, and shares over the fleets. Needs matplotlib."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    labels = [f"{one.fleet.prefill}:{one.fleet.decode}" for one in results]
    figures = [one.as_json() for one in results]
    panels = (
        ("goodput a worker, requests/s", (("goodput_per_worker", "goodput"),)),
        ("TTFT, ms", (("p50_ttft_ms", "p50"), ("p90_ttft_ms", "p90"), ("p99_ttft_ms", "p99"))),
        ("ITL, ms", (("p50_itl_ms", "p50"), ("p90_itl_ms", "p90"), ("p99_itl_ms", "p99"))),
        (
            "share",
            (
                ("attainment", "within the service level"),
                ("hit_rate", "cached prompt tokens"),
                ("prefill_busy", "prefill busy"),
                ("decode_busy", "decode busy"),
            ),
        ),
    )
    figure = Figure(figsize=(16, 4), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for panel, (label, lines) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, legend in lines:
            known = [(at, one[name]) for at, one in enumerate(figures) if one[name] is not None]
            panel.plot([at for at, _ in known], [value for _, value in known], marker="o", label=legend)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("prefill : decode workers")
        panel.set_xticks(range(len(labels)), labels, rotation=45 if len(labels) > 6 else 0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)


def _advice(results: Sequence[ReplayResult]) -> Iterator[str]:
    best = best_result(results)
    if len(results) > 1 and best.good:
        yield (
            f"Goodput a worker is greatest with {best.fleet.prefill} prefill and {best.fleet.decode} decode "
            f"workers: {best.goodput_per_worker:.3f} requests a second."
        )
    if not best.good:
        yield "No answer is within the service level."


def _three(result: ReplayResult, name: str) -> str:
    values = (getattr(result, name).percentile(percent) for percent in PERCENTILES)
    return " / ".join("-" if value is None else f"{1000 * value:,.0f}" for value in values)


def _dollars(result: ReplayResult, dollars_an_hour: float) -> str:
    if not result.output_tokens:
        return "-"
    spent = result.fleet.workers * dollars_an_hour * result.last_s / HOUR_S
    return f"{spent / result.output_tokens * MILLION:.2f}"
