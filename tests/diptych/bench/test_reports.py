"""The table, the warnings, the file and the picture, of runs whose figures are known."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from diptych.bench import report, result_file
from diptych.bench.campaign import LoadResult
from diptych.bench.drive import Run
from diptych.bench.figures import ServiceLevel
from diptych.bench.load import Load
from diptych.bench.measurement import measure
from diptych.bench.plot import in_order, knee_of, save_plot
from diptych.bench.request import Outcome, ServerTimes
from diptych.bench.self_watch import Strain
from tests.diptych.bench.outcomes import answered, failed

CALM = Strain(cpu_share=0.1, loop_share=0.1, lag_p50_ms=0.1, lag_p99_ms=0.5, lag_max_ms=1.0)
BUSY = Strain(cpu_share=0.95, loop_share=0.9, lag_p50_ms=5.0, lag_p99_ms=50.0, lag_max_ms=90.0)
STARVED = Strain(cpu_share=0.1, loop_share=0.1, lag_p50_ms=5.0, lag_p99_ms=50.0, lag_max_ms=90.0)
SERVER = ServerTimes(queue=0.001, prefill=0.040, handoff=0.0042, kv_transfer=0.002)
DESCRIBED = result_file.RunDescription("diptych", "m", None, "random", "mine", 0, {"rounds": 2})


def one_load(
    load: Load, rounds: Sequence[Sequence[Outcome]], strain: Strain = CALM, level: ServiceLevel | None = None
) -> LoadResult:
    runs = [Run(tuple(outcomes), 2.0, strain) for outcomes in rounds]
    return LoadResult(load, 4, [measure(one, level, exact_lengths=True) for one in runs], runs)


def at(clients: int, latency: float, count: int) -> LoadResult:
    return one_load(Load(max_concurrency=clients), [[answered([latency / 2, latency])] * count] * 2)


def shown(results: Sequence[LoadResult]) -> str:
    console = Console(file=io.StringIO(), width=120)
    for table in report.tables(results):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_medians_and_the_spread_of_rounds() -> None:
    rounds = [[answered([0.1, 0.2])] * count for count in (2, 4, 6)]
    text = shown([one_load(Load(max_concurrency=4), rounds)])
    assert "C=4" in text
    assert "4 (2–6)" in text  # output tokens/s: 4, 8 and 12 tokens in 2 s
    assert "median of 3 rounds" in text
    assert "100/100/100" in text
    assert "goodput" not in text
    assert "cached" not in text
    assert "handoff" not in text


def test_the_table_has_columns_for_what_was_asked_and_what_the_server_tells() -> None:
    outcomes = [answered([0.1, 0.2], server=SERVER)]
    text = shown([one_load(Load(max_concurrency=4), [outcomes], level=ServiceLevel(ttft=500))])
    assert "goodput" in text
    assert "4.20/4.20/4.20" in text


def test_the_table_fits_a_narrow_terminal() -> None:
    text = shown([one_load(Load(2.5), [[answered([0.4, 2.4], server=SERVER, cached=1)] * 3])])
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def warned(result: LoadResult, dataset: str = "random") -> str:
    return "\n".join(report.warnings([result], dataset))


def test_warns_of_everything_that_makes_a_figure_less_worth() -> None:
    load = Load(max_concurrency=1)
    assert warned(one_load(load, [[answered([1.0])]])) == ""
    assert "1 × QUEUE_FULL" in warned(one_load(load, [[failed("QUEUE_FULL")]]))
    assert "shorter than asked for: 1" in warned(one_load(load, [[answered([1.0], asked=2)]]))
    assert "THE GENERATOR WAS THE BOTTLENECK" in warned(one_load(load, [[answered([1.0])]], BUSY))
    assert "waited for a core" in warned(one_load(load, [[answered([1.0])]], STARVED))


def test_the_table_counts_failures_of_all_rounds() -> None:
    ended = [[answered([0.1, 0.2])] * 4, [failed("A")] * 4, [failed("A")] * 4]
    assert "8 of 12" in shown([one_load(Load(max_concurrency=4), ended)])


def test_a_generator_that_met_failures_only_is_not_blamed() -> None:
    gone = one_load(Load(max_concurrency=1), [[answered([1.0])] + [failed("UNAVAILABLE")] * 2], BUSY)
    assert "BOTTLENECK" not in warned(gone)
    assert gone.bottleneck() == "no"


def test_says_that_latencies_are_of_some_rounds_only() -> None:
    ended = [[answered([1.0])], [failed("A")], [failed("A")]]
    assert "2 of 3 rounds" in warned(one_load(Load(max_concurrency=1), ended))


def test_warns_of_a_hypervisor_that_takes_the_cores() -> None:
    run = Run((answered([1.0]),), 2.0, CALM, steal_share=0.25)
    result = LoadResult(Load(max_concurrency=1), 1, [measure(run, None, exact_lengths=True)], [run])
    assert "gave up to 25%" in warned(result)


def test_warns_of_a_cache_that_knew_the_prompts() -> None:
    cached = answered([1.0], cached=2)
    result = one_load(Load(max_concurrency=1), [[cached]])
    assert "another --seed" in warned(result)
    assert "in an earlier load, round or run" in warned(result, "prompts")
    assert "67% of the prompts' tokens" in warned(result, "sharegpt")
    assert warned(result, "mooncake") == warned(result, "shared-prefix") == ""
    assert "67%" in shown([result])


def test_the_file_has_the_fields_names(tmp_path: Path) -> None:
    rounds = [[answered([0.1, 0.2]), failed("A")]] * 2
    results = [one_load(Load(float("inf"), 4), rounds), one_load(Load(None), [[failed("A")]])]
    path = tmp_path / "new" / "out.json"
    result_file.write(path, result_file.as_objects(results, DESCRIBED, detailed=True))
    first, second = json.loads(path.read_text())
    vllm = """
        date backend endpoint_type label model_id tokenizer_id num_prompts request_rate burstiness
        max_concurrency duration
        completed failed total_input_tokens total_output_tokens request_throughput request_goodput
        output_throughput total_token_throughput mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms
        mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms
        p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms max_concurrent_requests
        max_output_tokens_per_s
        input_lens output_lens ttfts itls start_times generated_texts errors
    """.split()  # noqa: SIM905 (forty quoted words would hide the list)
    sglang = ["dataset_name", "input_throughput", "concurrency", "mean_e2e_latency_ms", "p99_e2e_latency_ms"]
    assert set(vllm + sglang) <= first.keys()
    assert (first["num_prompts"], first["completed"], first["failed"], first["rounds"]) == (4, 2, 2, 2)
    assert first["request_rate"] == "inf"
    assert first["spread"]["median_ttft_ms"] == pytest.approx([100, 100])
    assert first["errors_by_code"] == {"A": 2}
    assert first["ttfts"] == pytest.approx([0.1, 0.0, 0.1, 0.0])
    assert second["median_ttft_ms"] is None
    assert second["request_rate"] == "trace"


def test_options_that_are_no_number_in_json_are_written_as_text(tmp_path: Path) -> None:
    given = {"request_rate": (1.0, float("inf")), "time_scale": float("nan"), "label": None, "rounds": 2}
    path = tmp_path / "out.json"
    described = replace(DESCRIBED, arguments=given)
    result_file.write(path, result_file.as_objects([at(1, 1.0, 1)], described, detailed=False))
    [written] = json.loads(path.read_text())
    assert written["arguments"] == {
        "request_rate": [1.0, "inf"],
        "time_scale": "nan",
        "label": None,
        "rounds": 2,
    }


def test_the_plot_is_a_picture_and_marks_the_knee(tmp_path: Path) -> None:
    results = [at(1, 1.0, 10), at(4, 1.1, 40), at(16, 4.0, 44), at(64, 16.0, 44)]
    assert knee_of(results) == 1
    path = tmp_path / "plot.png"
    save_plot(path, [results[2], results[0], results[3], results[1]], "$5^$ a token")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_closed_loop_among_rates_stands_where_its_rate_was() -> None:
    def of(load: Load, latency: float, count: int) -> LoadResult:
        return one_load(load, [[answered([latency / 2, latency])] * count])  # of two seconds

    slow, fast = of(Load(8.0, 4), 1.0, 4), of(Load(max_concurrency=4), 1.0, 24)
    slowest = of(Load(2.0, 4), 0.9, 3)
    assert in_order([fast, slow, slowest]) == [slowest, slow, fast]


def test_no_knee_is_found_among_loads_that_differ_in_two_ways() -> None:
    loads = [Load(rate, limit) for rate in (1.0, 2.0) for limit in (4, 8)]
    results = [
        one_load(load, [[answered([0.1, latency])] * 4])
        for load, latency in zip(loads, (0.2, 0.3, 0.4, 0.5), strict=True)
    ]
    assert knee_of(results) is None
    assert knee_of([*results[:2], one_load(Load(1.0, 16), [[answered([0.1, 0.9])] * 4])]) == 0


def test_the_plot_copes_with_a_load_that_failed(tmp_path: Path) -> None:
    save_plot(tmp_path / "plot.png", [at(1, 1.0, 5), one_load(Load(max_concurrency=8), [[failed("A")]])], "t")
    save_plot(tmp_path / "plot.png", [one_load(Load(None), [[failed("A")]])], "t")
