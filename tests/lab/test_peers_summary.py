"""Medians, ratios, targets and the page, from figures that are known."""

import pytest

from lab.peers import table
from lab.peers.cells import PREFILL, QUEUED, START, STREAMS, Cell, Measurement, closed_loop
from lab.peers.servers import Family, Server
from lab.peers.shapes import Shape
from lab.peers.summary import Best, Spread, Summary
from lab.peers.targets import Limits, Target, our_paths, targets


def server(name: str, family: Family) -> Server:
    return Server(name, family, "bf16", ("program", "--port", "{port}"), {"THREADS": "2"})


OURS, OTHER = server("diptych-bf16", "diptych"), server("diptych-gguf", "diptych")
VLLM, LLAMA = server("vllm-bf16", "vllm"), server("llama.cpp-Q4_0", "llama.cpp")
ALL = [OURS, OTHER, VLLM, LLAMA]


def closed(server: Server, clients: int, rate: float, ttft: float, itl: float) -> Measurement:
    figures = {"output_throughput": rate, "median_ttft_ms": ttft, "median_itl_ms": itl, "failed": 0.0}
    return Measurement(Cell(0, server.name, closed_loop(clients)), figures)


def one(server: Server, load: str, **figures: float) -> Measurement:
    return Measurement(Cell(0, server.name, load), figures)


MEASURED = [
    closed(OURS, 16, 400, 300, 30),
    closed(OTHER, 16, 600, 200, 20),
    closed(VLLM, 16, 300, 1000, 31),
    closed(LLAMA, 16, 200, 250, 70),
    closed(OTHER, 1, 200, 40, 4),
    closed(LLAMA, 1, 100, 100, 8),
    closed(VLLM, 1, 50, 80, 20),
    closed(OTHER, 8, 500, 100, 15),
    closed(VLLM, 8, 250, 200, 30),
    closed(LLAMA, 8, 200, 250, 22),
    one(OURS, PREFILL, prefill_throughput=1500),
    one(OTHER, PREFILL, prefill_throughput=1800),
    one(VLLM, PREFILL, prefill_throughput=1400),
    one(OTHER, STREAMS, p99_itl_beside_ms=18),
    one(VLLM, STREAMS, p99_itl_beside_ms=300),
    one(OTHER, QUEUED, p99_itl_beside_ms=20),
    one(VLLM, QUEUED, p99_itl_beside_ms=1000),
    one(OTHER, closed_loop(16), median_handoff_ms=2.7, p99_handoff_ms=11),
    one(OTHER, START, start_s=7),
]
LIMITS = Limits(bf16_flops=512e9, prompt_flops=128e9)  # 4 prompts, 2048 tokens a second


def by_name(path: str = OTHER.name) -> dict[str, Target]:
    return {one.what: one for one in targets(ALL, Summary(MEASURED), LIMITS, path)}


def test_takes_medians_and_spreads_over_rounds_and_sums_faults() -> None:
    rounds = [
        Measurement(Cell(number, "a", PREFILL), {"rate": value, "failed": failed, "other": None})
        for number, (value, failed) in enumerate([(5.0, 0.0), (1.0, 2.0), (3.0, 0.0)])
    ]
    summary = Summary(rounds)
    assert summary.spread("a", PREFILL, "rate") == Spread(3.0, 1.0, 5.0)
    assert summary.median("a", PREFILL, "failed") == 2.0
    assert summary.median("a", PREFILL, "other") is None
    assert summary.median("b", PREFILL, "rate") is None


def test_best_is_the_highest_or_the_lowest_and_says_whose() -> None:
    summary = Summary(MEASURED)
    names = [VLLM.name, LLAMA.name, "absent"]
    assert summary.highest(names, closed_loop(16), "output_throughput") == Best(VLLM.name, 300)
    assert summary.lowest(names, closed_loop(16), "median_ttft_ms") == Best(LLAMA.name, 250)
    assert summary.lowest(["absent"], closed_loop(16), "median_ttft_ms") is None


@pytest.mark.parametrize(
    ("what", "ratio", "met"),
    [
        ("C=16 tokens/s, ours / vLLM's best", 2.0, True),
        ("C=16 tokens/s, ours / llama.cpp's best", 3.0, True),
        ("C=16 tokens/s in bf16, ours / vLLM's", 4 / 3, True),
        ("C=16 TTFT p50, ours / the better peer's", 0.8, False),
        ("C=16 ITL p50, ours / vLLM's", 20 / 31, True),
        ("C=1 ITL p50, ours / llama.cpp Q4_0's", 0.5, True),
        ("C=1 ITL p50, ours / vLLM's", 0.2, True),
        ("C=1 TTFT p50, ours / the better peer's", 0.5, True),
        ("C=8 tokens/s, ours / the better peer's", 2.0, True),
        ("prefill of 512 in bf16, ours / the arithmetic peak", 1500 / 2048, True),
        ("prefill of 512, ours / vLLM's", 1800 / 1400, False),
        (
            "ITL p99 of 8 streams beside prompts, one at a time, ours / vLLM's at its best throughput",
            0.06,
            False,
        ),
        ("ITL p99 of 8 streams beside prompts that queue, ours / vLLM's at its best throughput", 0.02, True),
        ("start-up of ours / 10 s", 0.7, True),
        ("C=16 handoff median of ours / 3 ms", 0.9, True),
        ("C=16 handoff p99 of ours / 10 ms", 1.1, False),
    ],
)
def test_judges_every_target(what: str, ratio: float, met: bool) -> None:
    target = by_name()[what]
    assert target.ratio == pytest.approx(ratio)
    assert target.met is met


def test_lists_no_target_that_is_not_judged_above() -> None:
    assert len(by_name()) == 16


def test_each_of_ours_is_judged_by_itself_the_fastest_first() -> None:
    assert our_paths(ALL, Summary(MEASURED)) == [OTHER.name, OURS.name]
    assert our_paths(ALL, Summary([])) == []
    for path in (OTHER.name, OURS.name):
        ours = {one.ours.server for one in by_name(path).values() if one.ours and "bf16" not in one.what}
        assert ours == {path}
    assert by_name(OURS.name)["C=16 TTFT p50, ours / the better peer's"].ratio == pytest.approx(1.2)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    judged = targets(ALL, Summary([]), None, OTHER.name)
    assert {(one.ratio, one.met) for one in judged} == {(None, None)}
    assert "not measured" in page([], judged)


def page(
    measured: list[Measurement],
    judged: list[Target],
    faults: dict[str, str] | None = None,
    shapes: tuple[Shape, ...] = (),
) -> str:
    return table.markdown(
        table.Report(
            title="Title",
            method="Method.",
            environment={"cpu": "Z80"},
            servers=ALL,
            concurrencies=(1, 16),
            summary=Summary(measured),
            targets={OTHER.name: judged},
            limits=LIMITS,
            faults=faults or {},
            shapes=shapes,
        )
    )


def test_the_page_has_absolute_figures_ratios_and_misses() -> None:
    text = page(MEASURED, list(by_name().values()))
    assert f"### {OTHER.name}" in text
    assert "| diptych-gguf | 600 | 200 | – | 20.0 |" in text
    assert "| C=16 TTFT p50, ours / the better peer's | ≤ 0.7 | 0.80 | **missed** |" in text
    assert "- prefill of 512, ours / vLLM's: 1.29, to be at least 1.3." in text
    assert "2048 prompt tokens/s" in text
    assert "THREADS=2 program --port {port}" in text
    assert "Left out" not in text


def test_the_page_has_other_lengths_and_ours_in_figures_of_the_fastest_vllm() -> None:
    shape = Shape(512, 128, 16)
    of_ours = one(OTHER, shape.load, output_throughput=600, median_ttft_ms=900, median_itl_ms=12)
    of_theirs = one(VLLM, shape.load, output_throughput=400, median_ttft_ms=1000, median_itl_ms=30)
    text = page([*MEASURED, of_ours, of_theirs], [], shapes=(shape,))
    assert "| diptych-gguf | 600 | 900 | – | 12.0 |" in text
    assert "| 512+128 C=16: diptych-gguf / vllm-bf16 | 1.50 | 0.90 | 0.40 | – | – |" in text
    assert "Other lengths" not in page(MEASURED, [])


def test_the_page_shows_spreads_and_failures() -> None:
    more = [Measurement(Cell(1, VLLM.name, closed_loop(16)), {"output_throughput": 200.0, "failed": 3.0})]
    text = page([*MEASURED, *more], [], {"vllm-w8a8": "status 1\nlong log"})
    assert "250 (200–300)" in text
    assert "| 3 |" in text
    assert "- vllm-w8a8: status 1\n" in text
    assert "long log" not in text
