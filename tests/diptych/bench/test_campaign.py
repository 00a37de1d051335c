import asyncio
from collections.abc import Callable, Sequence

import pytest

from diptych.bench.campaign import LoadResult, Plan, run_campaign
from diptych.bench.datasets.synthetic import RandomLengths
from diptych.bench.drive import Run
from diptych.bench.load import INFINITE, Load
from diptych.bench.measurement import Measured, measure
from diptych.bench.request import BenchRequest, Reply, RequestFailed
from diptych.bench.self_watch import Strain
from tests.diptych.bench.outcomes import answered, failed

ONE, TWO = Load(max_concurrency=1), Load(max_concurrency=2)
DATASET = RandomLengths(4, 1)
CALM = Strain(cpu_share=0.1, loop_share=0.1, lag_p50_ms=0.1, lag_p99_ms=0.5, lag_max_ms=1.0)


class Recorder:
    name = "recorder"

    def __init__(self, fails: bool = False) -> None:
        self.prompts: list[object] = []
        self.fails = fails

    async def model(self) -> str:
        return "none"

    async def close(self) -> None:
        pass

    async def send(self, request: BenchRequest) -> Reply:
        self.prompts.append(request.prompt)
        await asyncio.sleep(0)
        if self.fails:
            raise RequestFailed("BROKEN", "as told")
        return Reply((asyncio.get_running_loop().time(),), 4, 1, 0, "")


def planned(loads: Sequence[Load], rounds: int = 1, prompts: int | None = 3, warmups: int = 2) -> Plan:
    return Plan(tuple(loads), rounds, prompts, warmups, seed=1, level=None, exact_lengths=True)


async def ran(
    backend: Recorder, plan: Plan, on_start: Callable[[int, Load], None] = lambda number, load: None
) -> list[LoadResult]:
    results = plan.results(DATASET)
    await run_campaign(backend, DATASET, plan, results, on_start, lambda: None)
    return results


def result(*values: float | None, failures: Sequence[float] = ()) -> LoadResult:
    rounds = [Measured({"x": value}, {}, "no") for value in values]
    rounds += [Measured({"failed": count}, {"A": int(count)}, "starved") for count in failures]
    return LoadResult(ONE, 1, rounds)


async def test_interleaves_rounds_after_a_warm_up() -> None:
    backend, order = Recorder(), []
    results = await ran(
        backend,
        planned([ONE, TWO], rounds=3),
        lambda number, load: order.append((number, load, len(backend.prompts))),
    )
    turns = [(number, load) for number in range(3) for load in (ONE, TWO)]
    assert order == [(*turn, 2 + 3 * position) for position, turn in enumerate(turns)]
    assert [len(one.rounds) for one in results] == [3, 3]


async def test_no_prompt_comes_twice_in_any_load_or_round() -> None:
    backend = Recorder()
    await ran(backend, planned([ONE, TWO], 4))
    assert len(set(backend.prompts)) == len(backend.prompts) == 2 + 4 * 2 * 3


async def test_the_same_seed_asks_the_same() -> None:
    asked = []
    for _ in range(2):
        backend = Recorder()
        await ran(backend, planned([TWO], 2))
        asked.append(sorted(map(str, backend.prompts)))
    assert asked[0] == asked[1]


async def test_stops_before_it_measures_a_server_that_answers_nothing() -> None:
    with pytest.raises(RequestFailed, match="BROKEN"):
        await ran(Recorder(True), planned([ONE]))


def test_takes_medians_and_spreads_over_rounds() -> None:
    assert result(5.0, None, 1.0, 3.0).figures() == {"x": 3.0}
    assert result(5.0, None, 1.0, 3.0).spread() == {"x": (1.0, 5.0)}
    assert result(None).figures() == {"x": None}


def test_no_failure_hides_behind_a_median() -> None:
    some = result(failures=[0, 2, 0])
    assert some.figures() == {"failed": 2}
    assert some.errors() == {"A": 2}
    assert some.bottleneck() == "starved"


def test_counts_of_all_rounds_agree_with_one_another() -> None:
    """The server was there for some of the first round only: each request is either answered or failed."""
    rounds = [[answered([1.0, 2.0])] * 3 + [failed("A")], [failed("A")] * 4]
    runs = [Run(tuple(outcomes), 2.0, CALM) for outcomes in rounds]
    made = LoadResult(ONE, 4, [measure(run, None, exact_lengths=True) for run in runs], runs)
    figures = made.figures()
    counts = {name: figures[name] for name in ("completed", "failed", "total_output_tokens", "duration")}
    assert counts == {"completed": 3, "failed": 5, "total_output_tokens": 6, "duration": 4.0}
    assert made.requests == 8
    assert figures["max_concurrent_requests"] == 4
    assert all(
        isinstance(value, int)
        for name, value in figures.items()
        if name.startswith("total_") and not name.endswith("throughput")
    )
    assert isinstance(figures["completed"], int)
    assert figures["median_ttft_ms"] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("load", "count"),
    [(Load(max_concurrency=16), 64), (ONE, 8), (Load(3.0), 60), (Load(INFINITE), 8), (Load(None), 200)],
)
def test_sends_enough_when_no_number_is_given(load: Load, count: int) -> None:
    assert planned([load], prompts=None).prompts_of(load, DATASET) == count
    assert planned([load], prompts=7).prompts_of(load, DATASET) == 7
