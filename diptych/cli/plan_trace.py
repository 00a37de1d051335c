"""`diptych plan --trace`: recorded traffic on fleets that exist as numbers only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from diptych.bench.datasets import BadDataset
from diptych.bench.plot import can_plot
from diptych.planner.capacity import worker_of
from diptych.planner.plan import Question, cost_and_rates
from diptych.replay.fleet import BLOCK_SIZE, ReplayFleet, ServiceGoal
from diptych.replay.replay import Replay
from diptych.replay.report import replay_report, save_replay_plot
from diptych.replay.result import ReplayResult
from diptych.replay.routing import Routing
from diptych.replay.step_times import StepTimes
from diptych.replay.sweep import best_result
from diptych.replay.trace_file import Traffic, read_trace
from gateway.worker_pool.local_prefill import HANDOFF_S

_REFRESH_S = 0.5


@dataclass(frozen=True)
class TraceOptions:
    """Flags of a replay."""

    path: Path
    fleets: list[tuple[int, int]]
    requests: int | None
    rate: float | None
    worker_rate: float | None
    routing: Routing
    max_batch: int
    prefill_chunk: int
    max_model_len: int
    plot: Path | None


def load_trace(path: Path, requests: int | None, rate: float | None) -> Traffic:
    """Read the traffic of --trace. Raises typer.BadParameter."""
    try:
        rows = read_trace(path)
    except BadDataset as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint="--trace") from error
    traffic = Traffic(rows, requests or len(rows))
    return traffic if rate is None else Traffic(rows, traffic.count, rate / traffic.rate)


def check_plot(path: Path | None) -> None:
    """Raise typer.BadParameter if a plot is asked for that cannot be made."""
    if path is not None and not can_plot():
        raise typer.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder", param_hint="--plot")


def replay_trace(question: Question, options: TraceOptions) -> list[ReplayResult]:
    """Replay a trace on each fleet, telling on standard error how far it is. Raises DoesNotFit."""
    costs, draft, rates = cost_and_rates(question)
    worker = worker_of(costs, question.card.memory * question.cards_a_worker, draft)
    worker.streams(BLOCK_SIZE)
    blocks = int(worker.free_bytes / (worker.kv_bytes * BLOCK_SIZE))
    # Measured loads contain the way between the workers; of cards it is the link's.
    measured = question.results is not None
    link = question.card.link * question.cards_a_worker
    times = StepTimes(rates, 0.0 if measured else costs.kv_bytes / link, 0.0 if measured else HANDOFF_S)
    goal = ServiceGoal(question.demand.ttft_s, question.demand.tpot_s)
    results = []
    for prefill, decode in options.fleets:
        rate = options.worker_rate * (prefill + decode) if options.worker_rate else options.rate
        traffic = load_trace(options.path, options.requests, rate)
        fleet = ReplayFleet(
            prefill,
            decode,
            times,
            blocks,
            options.max_model_len,
            max_batch=options.max_batch,
            prefill_chunk=options.prefill_chunk,
            prefill_enough=options.prefill_chunk,
            routing=options.routing,
        )
        progress = _progress(f"{prefill}:{decode}", traffic.count)
        results.append(Replay(fleet, goal, progress).run(traffic.requests()))
    return results


def show_results(
    question: Question, options: TraceOptions, results: list[ReplayResult], *, as_json: bool
) -> None:
    """Print the results of replays, and draw them where a plot is asked for."""
    if options.plot is not None:
        save_replay_plot(options.plot, results, f"{options.path.name} on {question.card.name}")
    if as_json:
        best = best_result(results).fleet
        found = {
            "trace": str(options.path),
            "card": question.card.name,
            "cards_a_worker": question.cards_a_worker,
            "best": f"{best.prefill}:{best.decode}",
            "replays": [one.as_json() for one in results],
        }
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    price = question.dollars_an_hour
    Console().print(replay_report(results, None if price is None else price * question.cards_a_worker))


def _progress(fleet: str, count: int) -> Callable[[int], None]:
    """Return a function that shows the requests that have arrived, on a terminal."""
    if not sys.stderr.isatty():
        return lambda arrived: None
    shown = begun = time.monotonic()

    def show(arrived: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < _REFRESH_S and arrived < count:
            return
        shown = now
        left = (now - begun) / max(arrived, 1) * (count - arrived)
        end = "\n" if arrived >= count else ""
        print(f"\r{fleet}: {arrived:,} of {count:,} requests, {left:.0f} s left ", end=end, file=sys.stderr)

    return show
