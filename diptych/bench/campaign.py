"""Several loads in interleaved rounds: the machine's drift meets all of them alike.

Round by round every load runs once. A rate or a time of a load is the median over the rounds, with the
smallest and the largest beside it. Counts are of all rounds together, and so is the time that they took.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych.bench.backends import Backend
from diptych.bench.datasets import Dataset
from diptych.bench.drive import Run, drive
from diptych.bench.figures import ServiceLevel
from diptych.bench.load import INFINITE, Load
from diptych.bench.measurement import Figures, Measured, measure
from diptych.bench.request import RequestFailed
from diptych.bench.self_watch import Verdict

# Counts, which must agree with one another; a median would hide what happened in one round only.
_SUMMED = frozenset([
    "duration", "completed", "failed", "short_outputs",
    "total_input_tokens", "total_cached_tokens", "total_output_tokens",
])  # fmt: skip
_LARGEST = frozenset(["max_concurrent_requests", "max_output_tokens_per_s"])
_OPEN_LOOP_S = 20.0  # how long an open loop offers its load when no number of prompts is given
_TRACE_PROMPTS = 200
SEEDS_PER_RUN = 1_000  # a run's prompts differ from those of all other loads and rounds


@dataclass(frozen=True)
class Plan:
    """Runs of a benchmark. `num_prompts` None chooses a number for each load, see `prompts_of`."""

    loads: tuple[Load, ...]
    rounds: int
    num_prompts: int | None
    warmups: int
    seed: int
    level: ServiceLevel | None
    exact_lengths: bool
    price_hour: float | None = None
    """Dollars of the measured server for an hour."""

    def prompts_of(self, load: Load, dataset: Dataset) -> int:
        """Return the requests of one run: enough for each client to send four, or for 20 s, or a trace's
        first 200.
        """
        if self.num_prompts is not None:
            return self.num_prompts
        if load.request_rate is None:
            return min(dataset.size or _TRACE_PROMPTS, _TRACE_PROMPTS)
        if load.request_rate == INFINITE:
            return max(8, 4 * (load.max_concurrency or 0))
        return max(16, round(_OPEN_LOOP_S * load.request_rate))

    def results(self, dataset: Dataset) -> list[LoadResult]:
        """Return a result for each load, without a round yet."""
        return [LoadResult(load, self.prompts_of(load, dataset)) for load in self.loads]


@dataclass
class LoadResult:
    """Result of one load: its rounds."""

    load: Load
    num_prompts: int
    rounds: list[Measured] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Requests sent in all rounds."""
        return sum(len(run.outcomes) for run in self.runs)

    def figures(self) -> Figures:
        """Return the sums of counts over all rounds, the medians of other figures over the rounds that have
        them.
        """
        return {name: _over_rounds(name, values) for name, values in self._values().items()}

    def spread(self) -> dict[str, tuple[float, float]]:
        """Return each figure's smallest and largest value of a round."""
        return {name: (min(values), max(values)) for name, values in self._values().items() if values}

    def errors(self) -> dict[str, int]:
        """Return the failed requests of all rounds by code."""
        total: Counter[str] = Counter()
        for one in self.rounds:
            total.update(one.errors)
        return dict(total.most_common())

    def bottleneck(self) -> Verdict:
        """Return the worst verdict of a round on the generator itself."""
        seen = {one.bottleneck for one in self.rounds}
        return "busy" if "busy" in seen else "starved" if "starved" in seen else "no"

    def _values(self) -> dict[str, list[float]]:
        names = {name: None for one in self.rounds for name in one.figures}
        return {
            name: [value for one in self.rounds if (value := one.figures.get(name)) is not None]
            for name in names
        }


async def run_campaign(
    backend: Backend,
    dataset: Dataset,
    plan: Plan,
    results: Sequence[LoadResult],
    on_start: Callable[[int, Load], None],
    on_end: Callable[[], None],
) -> None:
    """Fill `results`, which `plan` made; when it is cancelled, they hold what is complete.

    Raises RequestFailed when not even a warm-up request is answered.
    """
    await _warm_up(backend, dataset, plan)
    for round_number in range(plan.rounds):
        for position, result in enumerate(results):
            on_start(round_number, result.load)
            seed = plan.seed * SEEDS_PER_RUN + round_number * len(results) + position
            requests = dataset.requests(result.num_prompts, seed)
            run = await drive(backend, result.load, requests, seed, on_end)
            result.runs.append(run)
            measured = measure(run, plan.level, exact_lengths=plan.exact_lengths, price_hour=plan.price_hour)
            result.rounds.append(measured)


def _over_rounds(name: str, values: Sequence[float]) -> float | None:
    if name in _SUMMED:
        return sum(values)
    if not values:
        return None
    return max(values) if name in _LARGEST else statistics.median(values)


async def _warm_up(backend: Backend, dataset: Dataset, plan: Plan) -> None:
    """Send requests that are not measured: they connect, compile code and touch memory."""
    requests = dataset.requests(plan.warmups, plan.seed * SEEDS_PER_RUN + SEEDS_PER_RUN - 1)
    ended = await asyncio.gather(*(backend.send(one) for one in requests), return_exceptions=True)
    failures = _failures(ended)
    if failures and len(failures) == len(ended):
        raise failures[0]


def _failures(ended: Sequence[object]) -> list[RequestFailed]:
    """Return the failed requests. Raises a fault of the generator itself."""
    failures = []
    for one in ended:
        if isinstance(one, RequestFailed):
            failures.append(one)
        elif isinstance(one, BaseException):
            raise one
    return failures
