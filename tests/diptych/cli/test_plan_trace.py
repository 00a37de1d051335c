"""`diptych plan --trace`: JSON, tables and a plot of replays, and refusals that name the flag."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from diptych.cli.plan_command import plan
from tests.diptych.planner.shapes import LLAMA_3_8B, write_config

PNG = b"\x89PNG"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    trace = tmp_path / "trace.jsonl"
    times = itertools.accumulate(random.Random(0).expovariate(1 / 50) for _ in range(40))
    rows = [{"timestamp": time, "input_length": 700, "output_length": 20} for time in times]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model", str(write_config(tmp_path, LLAMA_3_8B)), "--trace", str(trace)]


def invoked(arguments: Sequence[str]) -> Any:
    app = typer.Typer()
    app.command()(plan)
    return CliRunner().invoke(app, list(arguments))


def test_json_has_a_replay_for_each_fleet(arguments: list[str]) -> None:
    done = invoked([*arguments, "--workers", "3", "--requests", "60", "--ttft", "500", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(one["prefill_workers"], one["decode_workers"]) for one in found["replays"]] == [(1, 2), (2, 1)]
    assert all(one["completed"] == 60 and one["p50_ttft_ms"] > 0 for one in found["replays"])
    assert found["best"] in ("1:2", "2:1")


def test_fleet_of_the_formulas_is_replayed_without_another(arguments: list[str]) -> None:
    found = json.loads(invoked([*arguments, "--json"]).stdout)
    assert found["best"] == "1:1"
    assert found["replays"][0]["completed"] == 40


def test_requests_beyond_the_model_are_counted_apart(arguments: list[str]) -> None:
    limits = ([], ["--max-model-len", "719"])
    few, none = (
        json.loads(invoked([*arguments, "--workers", "1:1", *more, "--json"]).stdout)["replays"][0]
        for more in limits
    )
    assert (few["too_long"], few["completed"]) == (0, 40)
    assert (none["too_long"], none["completed"], none["goodput"]) == (40, 0, 0.0)


def test_worker_rate_grows_with_the_fleet(arguments: list[str]) -> None:
    fleets = ["--workers", "1:1,4:4", "--worker-rate", "2", "--requests", "200", "--json"]
    small, large = json.loads(invoked([*arguments, *fleets]).stdout)["replays"]
    assert small["duration_s"] == pytest.approx(4 * large["duration_s"], rel=0.1)


def test_attainment_finds_the_greatest_rate(arguments: list[str]) -> None:
    limits = ["--ttft", "60", "--tpot", "20", "--requests", "200", "--workers", "1:1", "--attainment"]
    tight, wide = (
        json.loads(invoked([*arguments, *limits, share, "--json"]).stdout)["replays"][0]
        for share in ("0.9", "0.5")
    )
    assert tight["attainment"] >= 0.9
    assert 0.5 <= wide["attainment"] < 0.95
    assert wide["duration_s"] < tight["duration_s"]


def test_measured_loads_take_the_place_of_the_card(arguments: list[str], tmp_path: Path) -> None:
    load = {"max_concurrency": 1, "completed": 1, "total_input_tokens": 700, "total_output_tokens": 10}
    results = tmp_path / "b.json"
    times = {"request_throughput": 6.0, "mean_ttft_ms": 70.0, "mean_tpot_ms": 10.0}
    results.write_text(json.dumps([{**load, **times}]))
    fleet = ["--workers", "1:1", "--rate", "1", "--bench", str(results), "--json"]
    found = json.loads(invoked([*arguments, *fleet]).stdout)["replays"][0]
    assert found["p50_ttft_ms"] == pytest.approx(70.0, rel=0.01)
    assert found["p50_itl_ms"] == pytest.approx(10.0, rel=0.01)


def test_table_and_plot_show_the_best_fleet(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    done = invoked([*arguments, "--workers", "3", "--plot", str(plot), "--price-hour", "2"])
    for text in ("goodput a worker", "TTFT", "dollars", "is greatest with"):
        assert text in done.stdout
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param(["--workers", "1"], "--workers", id="workers"),
        pytest.param(["--routing", "best"], "--routing", id="routing"),
        pytest.param(["--input", "5"], "--input", id="input"),
        pytest.param(["--worker-rate", "2"], "--workers", id="worker-rate without workers"),
        pytest.param(["--worker-rate", "2", "--rate", "1", "--workers", "2"], "--rate", id="two rates"),
        pytest.param(["--price-hour", "1", "--api-price", "1,2"], "--api-price", id="api price"),
        pytest.param(["--attainment", "2"], "--attainment", id="attainment"),
        pytest.param(["--rate", "0"], "--rate", id="rate"),
        pytest.param(["--plot", "/nowhere/plot.png"], "--plot", id="plot"),
        pytest.param(["--trace", "/nowhere"], "--trace", id="trace"),
    ],
)
def test_a_bad_value_names_its_flag(arguments: list[str], more: list[str], words: str) -> None:
    done = invoked([*arguments, *more])
    assert done.exit_code == 2
    assert words in done.output


def test_a_replay_flag_needs_a_trace(arguments: list[str]) -> None:
    done = invoked([*arguments[:2], "--workers", "2:2"])
    assert done.exit_code == 2
    assert "--trace" in done.output
