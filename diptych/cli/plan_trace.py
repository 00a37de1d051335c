"""`diptych plan --trace`: recorded traffic on fleets that exist as numbers only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console

from decode_worker.local_schedule import LocalBounds, default_chunks
from diptych.bench.datasets import BadDataset
from diptych.bench.plot import can_plot
from diptych.cli.plan_values import check, named, one_of, refuse_given
from diptych.planner.capacity import worker_of
from diptych.planner.measured_rates import Measured
from diptych.planner.plan import Question, cost_and_rates, make_plan
from diptych.replay.fleet import BLOCK_SIZE, ReplayFleet, ServiceGoal
from diptych.replay.replay import Replay
from diptych.replay.report import replay_report, save_replay_plot
from diptych.replay.result import ReplayResult
from diptych.replay.routing import Routing
from diptych.replay.step_times import StepTimes
from diptych.replay.sweep import best_result, greatest_rate, parse_fleets
from diptych.replay.trace_file import Traffic, read_trace
from gateway.worker_pool.local_prefill import HANDOFF_S
from prefill_worker.scheduler import ENOUGH_ON_CPU

_REFRESH_S = 0.5


@dataclass(frozen=True)
class TraceOptions:
    """Flags of a replay."""

    path: Path
    traffic: Traffic
    """Requests at the rate that is asked for, or as recorded."""
    fleets: Sequence[tuple[int, int]]
    """Prefill and decode workers; none: those that the formulas give."""
    worker_rate: float | None
    attainment: float | None
    """Share of answers within the service level at which the greatest rate is looked for."""
    routing: Routing
    max_batch: int
    prefill_chunk: int
    local_prefill: bool
    """Decode workers compute short prompts where that is sooner."""
    max_model_len: int | None
    """Most tokens of a request; None: the model's."""
    plot: Path | None


def trace_options(
    path: Path,
    *,
    workers: str | None,
    requests: int | None,
    rate: float | None,
    worker_rate: float | None,
    attainment: float | None,
    routing: str,
    max_batch: int,
    prefill_chunk: int,
    local_prefill: str,
    max_model_len: int | None,
    plot: Path | None,
) -> TraceOptions:
    """Check the flags of a replay, and read its trace. Raises typer.BadParameter."""
    if worker_rate is not None:
        refuse_given("cannot be given beside --worker-rate", ("--rate", rate))
        check("--worker-rate", worker_rate, worker_rate > 0, "above 0")
        if workers is None:
            raise typer.BadParameter("needs --workers", param_hint="--worker-rate")
    if attainment is not None:
        refuse_given("cannot be given beside --attainment", ("--rate", rate), ("--worker-rate", worker_rate))
        check("--attainment", attainment, 0 < attainment <= 1, "above 0, at most 1")
    if rate is not None:
        check("--rate", rate, rate > 0, "above 0")
    if plot is not None and not can_plot():
        raise typer.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")
    if plot is not None and not plot.parent.is_dir():
        raise typer.BadParameter(f"{plot.parent} is no folder", param_hint="--plot")
    return TraceOptions(
        path,
        _load(path, requests, rate),
        [] if workers is None else named("--workers", lambda: parse_fleets(workers)),
        worker_rate,
        attainment,
        Routing(one_of("--routing", routing, tuple(one.value for one in Routing))),
        max_batch,
        prefill_chunk,
        one_of("--local-prefill", local_prefill, ("auto", "never")) == "auto",
        max_model_len,
        plot,
    )


def _load(path: Path, requests: int | None, rate: float | None) -> Traffic:
    try:
        rows = read_trace(path)
    except BadDataset as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint="--trace") from error
    traffic = Traffic(rows, requests or len(rows))
    return traffic if rate is None else traffic.at_rate(rate)


def replay_on(question: Question, options: TraceOptions, *, as_json: bool) -> None:
    """Replay a trace, and print and draw what came of it. Raises DoesNotFit, BadMeasurements."""
    if not options.fleets:
        fleet = make_plan(question).fleet
        options = replace(options, fleets=[(fleet.prefill_workers, fleet.decode_workers)])
    show_results(question, options, replay_trace(question, options), as_json=as_json)


def replay_trace(question: Question, options: TraceOptions) -> list[ReplayResult]:
    """Replay a trace on each fleet, telling on standard error how far it is. Raises DoesNotFit."""
    costs, draft, rates = cost_and_rates(question)
    blocks = worker_of(costs, question.card.memory * question.cards_a_worker, draft).streams(BLOCK_SIZE)
    # Measured loads contain the way between the workers; of cards it is the link's.
    if isinstance(rates, Measured):
        times = StepTimes.of_measured(rates)
    else:
        times = StepTimes(rates, costs.kv_bytes / (question.card.link * question.cards_a_worker), HANDOFF_S)
    # Workers that slow one another down compute on cores; what depends on that is as theirs.
    beside, alone = default_chunks("cpu" if times.share_cores else "cuda")
    goal = ServiceGoal(question.demand.ttft_s, question.demand.tpot_s)
    results = []
    for prefill, decode in options.fleets:
        fleet = ReplayFleet(
            prefill,
            decode,
            times,
            blocks,
            options.max_model_len or question.shape.max_context,
            max_batch=options.max_batch,
            prefill_chunk=options.prefill_chunk,
            prefill_enough=ENOUGH_ON_CPU if times.share_cores else None,
            local=LocalBounds(chunk=beside, idle_chunk=alone) if options.local_prefill else None,
            routing=options.routing,
        )
        results.append(_replay(fleet, goal, options))
    return results


def _replay(fleet: ReplayFleet, goal: ServiceGoal, options: TraceOptions) -> ReplayResult:
    def at(rate: float) -> ReplayResult:
        traffic = options.traffic.at_rate(rate)
        label = f"{fleet.prefill}:{fleet.decode} at {rate:.3g} requests/s"
        return Replay(fleet, goal, _progress(label, traffic.count)).run(traffic.requests())

    if options.attainment is not None:
        return greatest_rate(at, options.traffic.rate, options.attainment)
    return at(options.worker_rate * fleet.workers if options.worker_rate else options.traffic.rate)


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
