"""`diptych plan` as a process: tables, JSON, and refusals that name the flag."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.diptych.engine.models.published_hybrids import PUBLISHED
from tests.diptych.planner.shapes import LLAMA_3_8B, write_config


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diptych", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config(tmp_path, LLAMA_3_8B))


def test_tables_have_the_fleet_and_its_cost(model: str) -> None:
    done = plan("--model", model, "--gpu", "h200", "--rate", "20", "--input", "2000", "--price-hour", "4")
    assert done.returncode == 0, done.stderr
    for text in ("8.03 B", "128.0 KiB", "prefill : decode workers", "tokens a dollar"):
        assert text in done.stdout


def test_small_model_and_a_short_wait_have_figures_that_are_not_rounded_away() -> None:
    done = plan("--ttft", "0.001", "--input", "5000")
    assert "and 0.001 ms are wanted" in " ".join(done.stderr.split())
    assert "269 MB" in plan().stdout


def test_json_has_the_same_plan(model: str) -> None:
    done = plan("--model", model, "--rate", "5", "--ttft", "300", "--tpot", "30", "--json")
    found = json.loads(done.stdout)
    assert found["fleet"]["prefill_workers"] >= 1
    assert found["demand"]["ttft_s"] == 0.3
    assert found["bill"] is None
    assert found["model"]["kv_bytes"] == 131072


def test_measured_loads_take_the_place_of_the_card(model: str, tmp_path: Path) -> None:
    load = {"max_concurrency": 1, "completed": 1, "total_input_tokens": 100, "total_output_tokens": 10}
    results = tmp_path / "b.json"
    times = {"request_throughput": 4.0, "mean_ttft_ms": 50.0, "mean_tpot_ms": 20.0}
    results.write_text(json.dumps([{**load, **times}]))
    done = plan("--model", model, "--bench", str(results), "--input", "100", "--json")
    assert json.loads(done.stdout)["fleet"]["step_s"] == pytest.approx(0.020, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--gpu", "h999"], "--gpu", id="card"),
        pytest.param(["--rate", "0"], "--rate", id="rate"),
        pytest.param(["--prefix", "1.5"], "--prefix", id="prefix"),
        pytest.param(["--memory", "many"], "--memory", id="memory"),
        pytest.param(["--quantization", "q9"], "--quantization", id="type"),
        pytest.param(["--api-price", "1,2"], "--price-hour", id="price"),
        pytest.param(["--bench", "/nowhere"], "--bench", id="bench"),
    ],
)
def test_a_bad_value_names_its_flag(model: str, arguments: list[str], words: str) -> None:
    done = plan("--model", model, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def words_of(text: str) -> str:
    """Return a text without the lines and the borders of its tables."""
    return " ".join(re.sub("[│┌┐└┘─╭╮╰╯]", " ", text).split())


@pytest.fixture
def hybrid(tmp_path: Path) -> str:
    return str(write_config(tmp_path, PUBLISHED["Bamba-9B-v2"]))


def test_a_plan_of_recurrent_layers_says_what_a_stream_takes(hybrid: str) -> None:
    text = words_of(plan("--model", hybrid).stdout)
    for words in ("recurrent states a stream 249 MB", "1280 tokens and", "the states each"):
        assert words in text


@pytest.mark.parametrize(
    "flag", ["--tensor-parallel", pytest.param("--speculative-model", marks=pytest.mark.full)]
)
def test_what_workers_refuse_beside_recurrent_layers_is_not_planned(hybrid: str, flag: str) -> None:
    done = plan("--model", hybrid, flag, hybrid if "model" in flag else "2")
    assert done.returncode == 2
    assert flag in done.stderr
    assert "recurrent layers of bamba" in words_of(done.stderr)


def test_a_load_out_of_reach_ends_with_the_reason(model: str) -> None:
    done = plan("--model", model, "--gpu", "l4", "--ttft", "1")
    assert done.returncode == 1
    assert "first token" in done.stderr
