"""Lines through loads as `diptych bench` writes them, and factors that a simulated machine was given."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pytest

from diptych.planner.measured_rates import BadMeasurements, Measured


def _load(
    clients: int, prompt: int, ttft: float, tpot: float, prefill: float | None = None, rate: float = 1.0
) -> dict[str, object]:
    """Return the figures of a closed loop; times in milliseconds."""
    server = {} if prefill is None else {"mean_server_prefill_ms": prefill}
    return {
        "max_concurrency": clients,
        "completed": 10,
        "total_input_tokens": 10 * prompt,
        "total_output_tokens": 10 * 33,
        "request_throughput": rate,
        "mean_ttft_ms": ttft,
        "mean_tpot_ms": tpot,
        **server,
    }


def test_measured_loads_give_back_the_lines_they_lie_on() -> None:
    # 33 tokens at these times and rates keep a client's stream busy for a half of its time.
    loads = [
        _load(clients, prompt, ttft, tpot, rate=clients / (0.064 * tpot))
        for clients, prompt, ttft, tpot in [
            (1, 100, 30, 5),
            (1, 500, 110, 5),
            (9, 100, 90, 9),
            (17, 100, 200, 13),
        ]
    ]
    rates = Measured.of_results(loads)
    assert rates.prefill_s(1000, 0) == pytest.approx(0.210)
    assert rates.step_s(1, 100) == pytest.approx(0.005)
    assert rates.step_s(5, 100) == pytest.approx(0.009)
    assert rates.step_s(9, 100) == pytest.approx(0.013)
    assert (rates.overhead_s, rates.prompts_beside, rates.steps_beside) == (0.0, 1.0, 1.0)


def test_a_single_load_is_scaled_by_its_prompt() -> None:
    rates = Measured.of_results([_load(1, 100, 30, 5)])
    assert rates.prefill_s(200, 0) == pytest.approx(0.06)
    assert rates.step_s(50, 100) == pytest.approx(0.005)


def test_prompts_beside_decode_steps_take_as_long_as_the_server_says() -> None:
    lone = [_load(1, 100, 30, 5, 20), _load(1, 300, 70, 5, 60)]
    always = 2 / (0.060 + 32 * 0.006)  # one client has its answer for as long as the other its prompt
    beside = [_load(8, 200, 900, 12, 500), _load(2, 200, 90, 6, 60, always), _load(2, 20, 30, 6, 5)]
    rates = Measured.of_results([*lone, *beside])
    assert rates.prompts_beside == pytest.approx(1.5), "of two clients, and the longer prompts"
    assert rates.overhead_s == pytest.approx(0.010)
    assert rates.prefill_s(200, 0) == pytest.approx(0.040)
    waits = _load(2, 200, 90, 6, 60, 2 / (0.060 + 32 * 0.006 + 0.064))
    rates = Measured.of_results([*lone, beside[0], waits])
    assert rates.prompts_beside == pytest.approx(1 + 0.5 / 0.75), "its own prompt waits for a quarter"
    assert Measured.of_results(lone).prompts_beside == 1.0
    unknown = [_load(1, 100, 30, 5), _load(2, 100, 90, 6)]
    assert Measured.of_results(unknown).prompts_beside == 1.0
    faster = _load(2, 200, 90, 6, 30)
    assert Measured.of_results([*lone, faster, beside[0]]).prompts_beside == 1.0


def test_context_costs_what_its_bytes_take_to_be_read() -> None:
    step_s, stream_s, share = 0.004, 0.0005, 0.0003
    loads = []
    for clients, prompt in ((1, 16), (1, 300), (4, 16), (16, 16), (32, 16), (32, 300)):
        context = prompt + 33 / 2
        # Answers that take nearly all of a client's time: the streams of a step are the clients.
        tpot_s = step_s + clients * (stream_s + share * step_s * context)
        loads.append(_load(clients, prompt, 1e-3, 1000 * tpot_s, rate=clients / (32 * tpot_s)))
    rates = Measured.of_results(loads, share)
    assert rates.step_per_context == pytest.approx(share * step_s, rel=0.05)
    assert rates.step_s(32, 1000) == pytest.approx(step_s + 32 * (stream_s + share * step_s * 1000), rel=0.05)
    assert Measured.of_results(loads).step_s(32, 1000) == Measured.of_results(loads).step_s(32, 0)


def _turns(clients: int, prompt_s: float, step_s: float, factor: float) -> Mapping[str, object]:
    """Return what clients see that take turns: one prompt at a time, while the others' steps take longer."""
    steps = 32
    # Of the steps of one answer, those during the prompts of the others are slow.
    others_s = (clients - 1) * prompt_s
    answer_s = others_s + (steps - others_s / (factor * step_s)) * step_s
    assert answer_s >= others_s
    return _load(
        clients,
        round(1000 * prompt_s),
        1000 * prompt_s,
        1000 * answer_s / steps,
        1000 * prompt_s,
        rate=clients / (prompt_s + answer_s),
    )


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
def test_factor_of_steps_beside_prompts_is_found(factor: float) -> None:
    loads = [_turns(1, length, 0.010, 1.0) for length in (0.02, 0.1)]
    loads += [_turns(clients, length, 0.010, factor) for clients in (2, 3) for length in (0.02, 0.1)]
    rates = Measured.of_results(loads)
    assert rates.prompts_beside == pytest.approx(1.0)
    assert rates.steps_beside == pytest.approx(factor, abs=0.05)
    assert statistics.mean(rates.step_s(batch, 0) for batch in (1, 3)) == pytest.approx(0.010, rel=0.02)


def test_a_file_without_figures_is_named() -> None:
    with pytest.raises(BadMeasurements, match="no load"):
        Measured.of_results([])
    with pytest.raises(BadMeasurements, match=r"load 0 .*completed"):
        Measured.of_results([{}])
